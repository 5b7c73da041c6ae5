"""Show what a server serves, on which partitions, how well, and how it came to that plan: `cotenant status`."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from cotenant.cli.options import LOCAL, CaFile, Json, ServerAddress, TokenFile
from cotenant.cli.output import console, show_json
from cotenant.core.plan import Plan
from cotenant.core.units import show_memory, show_share
from cotenant.render.jobs_table import job_notes, jobs_table
from cotenant.render.plan_table import plan_bars
from cotenant.render.table import shorten_middle, table

if TYPE_CHECKING:
    from cotenant.live.status import AdaptationStatus, Status

SHOWN_DECISIONS = 8  # of those that the server remembers
SHOWN_ROLLOUTS = 5
PERIOD = 1.0  # seconds between two refreshes of --watch


def status(
    address: ServerAddress = LOCAL,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Show a server's models, partitions, workers and SLO attainment. With --watch --json: one line per second."""
    from cotenant.cli.client import endpoint, fetch_status

    server = endpoint(address, token_file, ca_file)
    current = fetch_status(server)
    if not watch:
        if json:
            show_json(current)
        else:
            console.print(status_view(current))
        return
    if json:
        while True:
            show_json(msgspec.json.format(msgspec.json.encode(current, enc_hook=str), indent=-1))
            time.sleep(PERIOD)
            current = fetch_status(server)
    with Live(status_view(current), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(PERIOD)
            live.update(status_view(fetch_status(server)), refresh=True)


def status_view(status: Status) -> RenderableType:
    """Draw models, workers and rollouts as tables, the plan as bars."""
    plan = Plan.from_json(bytes(status.plan))
    numbers = (">target", ">planned/s", ">served", ">mean", ">attainment")
    models = table("models", "model", "state", *numbers)
    models.columns[1].no_wrap = True
    notes = []  # below the table: they are long, and of few models
    for *cells, note in status.rows(plan):
        models.add_row(*(escape(cell) for cell in [shorten_middle(cells[0]), *cells[1:]]))
        if note:
            notes.append(Text(f"{cells[0]}: {note}"))
    usage = (">share", ">used", ">memory", ">restarts")
    failures = ["last failure"] if any(worker.reason for worker in status.workers) else []
    workers = table("partitions", "partition", "worker", "standby", *usage, "models", *failures)
    workers.columns[0].no_wrap = True
    for worker in status.workers:
        used = "-" if worker.used_share is None else show_share(round(worker.used_share))
        workers.add_row(
            str(worker.lane),
            worker.state,
            worker.standby or "-",
            show_share(worker.share),
            f"[red]{used}[/]" if worker.over_share else used,
            show_memory(worker.memory),
            str(worker.restarts),
            escape(", ".join(worker.models)),
            *([escape(worker.reason)] if failures else ()),
        )
    batches: list[RenderableType] = []
    if status.batches:
        means = (">batches", ">profiled", ">predicted", ">observed", ">predicted slowdown", ">observed slowdown")
        listed = table("mean latency of batches since the start", "partition", "model", *means)
        for lane_batches in status.batches:
            listed.add_row(*(escape(cell) for cell in lane_batches.row()))
        batches.append(listed)
    last = status.rollout.last[:SHOWN_ROLLOUTS]
    headings = [">revision", "reason", "outcome", "durations", ">late", "failure"][
        : 6 if any(each.failure for each in last) else 5
    ]
    rollouts = table("rollouts", *headings)
    for past in last:
        cells = past.row()[: len(headings)]
        rollouts.add_row(*(escape(cell) for cell in cells), style="red" if past.failed else "")
    rollout = Text(f"rollout: {status.rollout.sentence()}")
    durations: list[RenderableType] = []
    if steps := status.duration_rows():
        listed = table("durations of rollouts", "step", ">count", ">p50", ">p99", ">max")
        for step in steps:
            listed.add_row(*step)
        durations = [listed, Text(f"requests late while a rollout was under way: {status.rollout.late}")]
    adaptation = () if status.adaptation is None else adaptation_view(status.adaptation)
    now = datetime.now(UTC).timestamp()
    jobs: list[RenderableType] = []
    if status.jobs:
        jobs = [jobs_table(status.jobs, now), *map(Text, job_notes(status.jobs, now))]
    nodes: list[RenderableType] = []
    if status.nodes:
        listed = table("nodes", "node", "address", "state", "devices", ">round trip", ">sessions")
        for *cells, reason in (node.row() for node in status.nodes):
            listed.add_row(*map(escape, cells))
            nodes += [Text(reason, style="red")] if reason else []
        nodes.insert(0, listed)
    starting = [Text(f"starting: {status.startup}")] if status.startup else []
    errors = [Text(error, style="red") for error in (status.reload_error, *status.file_errors) if error]
    # With --watch what does not fit on the screen is cut off: what tells why things change comes first.
    return Group(
        *starting,
        *errors,
        models,
        *notes,
        plan_bars(plan),
        workers,
        *nodes,
        rollout,
        *adaptation,
        *jobs,
        rollouts,
        *durations,
        *batches,
        Text(status.isolation),
    )


def adaptation_view(status: AdaptationStatus) -> list[RenderableType]:
    """Draw what the controller does and why, its last decisions, and what it knows of each model."""
    told = [Text(f"adaptation: {line}" if not number else line) for number, line in enumerate(status.sentences())]
    numbers = (">offered/s", ">planned/s", ">sustained/s", ">planned slowdown", ">observed / planned")
    models = table("adaptation", "model", *numbers, ">recent attainment")
    for row in status.rows():
        models.add_row(*(escape(cell) for cell in row))
    decisions = table("last decisions", ">when", "decision", "reason")
    for decision in status.decisions[:SHOWN_DECISIONS]:
        decisions.add_row(*(escape(cell) for cell in decision.row()))
    return [*told, *([decisions] if status.decisions else []), models]
