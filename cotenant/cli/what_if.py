"""`cotenant simulate --what-if`: the plan as it is and what would be, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.output import collect_results, console, show_json
from cotenant.core.plan import Plan
from cotenant.core.units import show_rate, show_seconds
from cotenant.measure.report import ModelReport
from cotenant.planning.what_if import (
    Scenario,
    ScenarioChange,
    ScenarioResult,
    ScenarioTask,
    apply_changes,
    run_scenario,
)
from cotenant.render.table import table
from cotenant.sim.parallel import task_pool

NOW = "now"
BROKEN = "!"  # for those who see no colours
NEAR = 0.05  # durations that differ by less are as good as equal


def run_what_ifs(
    question: Scenario,
    plan: Plan,
    changes: Sequence[Sequence[ScenarioChange]],
    *,
    seconds: float,
    seed: int,
    jobs: int,
    json: bool,
) -> None:
    """Plan anew with each of the changes, simulate all, and show them beside the plan that is given."""
    trials = [ScenarioTask(label=NOW, question=question, plan=plan, seconds=seconds, seed=seed)]
    for made in changes:
        label = ",".join(change.text for change in made)
        trials.append(
            ScenarioTask(label=label, question=apply_changes(question, made, plan), seconds=seconds, seed=seed)
        )
    with task_pool(min(jobs, len(trials))) as workers:
        found = collect_results("what if", workers.each(run_scenario, trials), len(trials))
    if json:
        show_json([_plain(outcome) for outcome in found])
    else:
        console.print(side_by_side(found))


def _plain(outcome: ScenarioResult) -> dict[str, object]:
    return {
        "what_if": outcome.label,
        "devices": outcome.kinds,
        "cost_per_hour": outcome.plan.cost_per_hour,
        "utilisation": outcome.utilisation,
        "unserved": outcome.plan.unserved,
        "plan": msgspec.Raw(outcome.plan.to_json()),
        "report": msgspec.Raw(outcome.report.to_json()),
    }


def side_by_side(outcomes: Sequence[ScenarioResult]) -> RenderableType:
    """A column for each; what differs from the first is bold, a broken promise red and marked."""
    base = outcomes[0]
    view = table("what if", "", *(f">{escape(outcome.label.replace(',', ' '))}" for outcome in outcomes))
    view.add_row("planner", *_cells([outcome.plan.planner for outcome in outcomes]))
    view.add_row("devices", *_cells([_devices(outcome) for outcome in outcomes]))
    if any(outcome.plan.cost_per_hour is not None for outcome in outcomes):
        view.add_row("cost /h", *_cells([_cost(outcome, base) for outcome in outcomes]))
    view.add_row("busy", *_cells([f"{outcome.utilisation * 100:.0f} %" for outcome in outcomes]))
    view.add_row("asked /s", *_cells([show_rate(_offered(outcome)) for outcome in outcomes]))
    view.add_row("in time /s", *_cells([show_rate(_goodput(outcome)) for outcome in outcomes]))
    view.add_section()
    for name in [row.model for row in base.report.models]:
        rows = [_row(outcome, name) for outcome in outcomes]
        view.add_row(f"{escape(name)} in time", *(_attained(row, rows[0]) for row in rows))
    view.add_section()
    for name in [row.model for row in base.report.models]:
        rows = [_row(outcome, name) for outcome in outcomes]
        view.add_row(f"{escape(name)} p99", *(_tail(row, rows[0]) for row in rows))
    if any(outcome.broken for outcome in outcomes):
        view.caption = f"{BROKEN}: a promise that is not kept"
    return Group(view, *(Text(scenario_summary(outcome, base)) for outcome in outcomes[1:]))


def scenario_summary(outcome: ScenarioResult, base: ScenarioResult) -> str:
    """One line on what a change does to devices, cost and promises."""
    told = []
    more = outcome.plan.devices_used - base.plan.devices_used
    told.append(f"{abs(more)} {'more' if more > 0 else 'fewer'}" if more else "as many devices")
    if outcome.plan.cost_per_hour is not None and base.plan.cost_per_hour:
        told.append(f"{outcome.plan.cost_per_hour / base.plan.cost_per_hour - 1:+.0%} cost".replace("%", " %"))
    if outcome.plan.unserved:
        told.append(f"{show_rate(sum(outcome.plan.unserved.values()))} requests/s find no place")
    broken = [f"{row.model} ({_percent(row)})" for row in outcome.broken]
    kept = "every promise is kept" if not broken else f"not kept: {', '.join(broken[:4])}"
    if len(broken) > 4:
        kept += f" and {len(broken) - 4} more"
    return f"{outcome.label}: {', '.join(told)}; {kept}."


def _cells(values: Sequence[str]) -> list[Text]:
    return [Text(value, style="bold" if value != values[0] else "") for value in values]


def _devices(outcome: ScenarioResult) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in outcome.kinds.items()) or "none"


def _cost(outcome: ScenarioResult, base: ScenarioResult) -> str:
    cost = outcome.plan.cost_per_hour
    return "-" if cost is None else f"{cost:.2f}"


def _offered(outcome: ScenarioResult) -> float:
    return sum(row.offered for row in outcome.report.models)


def _goodput(outcome: ScenarioResult) -> float:
    return sum(row.goodput for row in outcome.report.models)


def _row(outcome: ScenarioResult, name: str) -> ModelReport:
    return next(row for row in outcome.report.models if row.model == name)


def _percent(row: ModelReport) -> str:
    return "-" if row.attainment is None else f"{row.attainment * 100:.2f} %"


def _attained(row: ModelReport, base: ModelReport) -> Text:
    style = "bold red" if not row.slo_met else "bold" if base.slo_met != row.slo_met else ""
    return Text(_percent(row) + ("" if row.slo_met else f" {BROKEN}"), style=style)


def _tail(row: ModelReport, base: ModelReport) -> Text:
    if row.p99 is None:
        return Text("-")
    same = base.p99 is not None and abs(row.p99 / base.p99 - 1) < NEAR
    return Text(show_seconds(row.p99), style="" if same else "bold")
