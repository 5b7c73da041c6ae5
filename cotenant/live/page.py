"""Render the web page at ``/``: the plan, the models, the workers and the rollouts."""

from __future__ import annotations

from html import escape

from cotenant.core.plan import Plan
from cotenant.core.units import show_share
from cotenant.live.status import AdaptationStatus, Status

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #dde3e9 }
.number { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #b3261e }
.bar { display: flex; height: 4.2rem; border: 1px solid #8796a5; border-radius: 4px; overflow: hidden }
.cut { background: #d6e6f5; border-right: 2px solid #fff; padding: .2rem .5rem; font-size: 12px; overflow: hidden }
"""


def render_page(status: Status) -> str:
    """Return the page as HTML. It reloads itself every two seconds."""
    plan = Plan.from_json(bytes(status.plan))
    bars = []
    for device in plan.devices:
        cuts = "".join(
            f'<div class="cut" style="width:{partition.share / 10}%">{show_share(partition.share)}<br>'
            + ", ".join(escape(placement.model) for placement in partition.placements)
            + "</div>"
            for partition in device.partitions
        )
        bars.append(f'<p>{escape(device.kind)} {device.id.index}</p><div class="bar">{cuts}</div>')
    models = [_row(row) for row in status.rows(plan)]
    workers = "".join(
        f'<tr class="{"bad" if worker.over_share or worker.state != "ready" else ""}"><td>{escape(worker.lane)}</td>'
        f"<td>{escape(worker.state)}</td><td>{show_share(worker.share)}</td>"
        f"<td>{'-' if worker.used_share is None else show_share(round(worker.used_share))}</td>"
        f"<td>{worker.memory / 2**20:.0f} MiB</td><td>{worker.restarts}</td><td>{escape(worker.reason)}</td></tr>"
        for worker in status.workers
    )
    rollouts = "".join(
        f'<tr class="{"bad" if past.failed else ""}">' + "".join(f"<td>{escape(cell)}</td>" for cell in past.row())
        for past in status.rollout.last
    )
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Cotenant</title>'
        f"<style>{STYLE}</style><h1>Cotenant</h1>"
        f"<p>Plan by {escape(plan.planner)}. {escape(status.isolation)}.</p>"
        f"<p>Rollout: {escape(status.rollout.sentence())}.</p>{''.join(bars)}"
        "<table><tr><th>model<th>state<th>target<th>planned/s<th>served<th>mean<th>attainment<th>other outcomes</tr>"
        f"{''.join(models)}</table>"
        "<table><tr><th>partition<th>worker<th>share<th>used<th>memory<th>restarts<th>last death</tr>"
        f"{workers}</table>"
        "<table><tr><th>revision<th>reason<th>outcome<th>durations<th>failure</tr>"
        f"{rollouts}</table>"
        f"{'' if status.adaptation is None else _adaptation(status.adaptation)}"
    )


def _adaptation(status: AdaptationStatus) -> str:
    """Return what the controller does and why, what it knows of each model, and its last decisions."""
    models = "".join(_row(row) for row in status.rows())
    decisions = "".join(_row(decision.row()) for decision in status.decisions[:8])
    return (
        f"<p>Adaptation: {'; '.join(escape(line) for line in status.sentences())}.</p>"
        "<table><tr><th>model<th>offered/s<th>planned/s<th>sustained/s<th>slowdown planned<th>observed against that"
        f"<th>attainment of late</tr>{models}</table>"
        f"<table><tr><th>when<th>decision<th>reason</tr>{decisions}</table>"
    )


def _row(cells: list[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
