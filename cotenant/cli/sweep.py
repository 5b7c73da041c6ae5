"""`cotenant sweep`: every combination of some changes, planned and simulated, as CSV.

While it runs, what is done stands in ``FILE.part``, from which the same command goes on after an interruption; FILE
itself is there only when all is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.cli.loading import load_planned, text_of, write_file
from cotenant.cli.options import (
    Jobs,
    Json,
    PlannerName,
    ProblemFile,
    Repository,
    Seconds,
    Seeds,
    ServerSettings,
    WorkloadFile,
)
from cotenant.cli.output import aside, console, progress_bars, show_json
from cotenant.cli.simulate import without_failures, workload_for_plan
from cotenant.errors import ConfigError
from cotenant.measure.table import table

if TYPE_CHECKING:
    from cotenant.sim.sweep import Point, Row
    from cotenant.workload import Workload

LIMIT = 1000
COLUMNS = (
    "seed", "planner", "devices", "cost_per_hour", "utilisation", "model", "offered_per_s", "unserved_per_s",
    "goodput_per_s", "attainment", "required", "p50_ms", "p99_ms", "p999_ms", "rejected", "expired", "failed", "error",
)  # fmt: skip


def sweep(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    repository: Repository = None,
    planner: PlannerName = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=VALUES",
            help="An axis: rate=0.5,1,2 or devices=1..4, slo=resnet50:50ms,100ms, planner=geometry,elastic. "
            "May be given several times; every combination is tried.",
        ),
    ] = None,
    workload: WorkloadFile = None,
    seconds: Seconds = 60.0,
    seeds: Seeds = 3,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all into this CSV file.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Refuse to simulate more often than that.")] = LIMIT,
    jobs: Jobs = 2,
    json: Json = False,
) -> None:
    """Plan and simulate every combination of some changes."""
    from cotenant.sim.sweep import grid
    from cotenant.sim.what_if import Scenario, read_values

    axes = [read_values(text) for text in over or ()]
    if not axes:
        raise ConfigError("nothing to sweep over; say what varies, such as --over rate=0.5,1,2")
    runs = math.prod(len(axis) for axis in axes) * seeds
    if runs > limit:
        raise ConfigError(
            f"{' x '.join(str(len(axis)) for axis in axes)} combinations with {seeds} seeds are {runs} runs, more than "
            f"{limit}; take fewer values or seeds, or raise --limit"
        )
    without_failures(workload)
    asked, answer = load_planned(problem, settings, repository, planner)
    question = Scenario(
        planner=answer.planner, problem=asked, workload=workload_for_plan(asked, answer, None, 1.0, workload)
    )
    points = grid(question, axes, answer, seconds, seeds)
    rows = kept(points, output, min(jobs, len(points)))
    if output is not None:
        write_file(output, _csv(rows))
        _part(output).unlink()
    if json:
        show_json(rows)
    else:
        console.print(sweep_view(points, rows))


def kept(points: Sequence[Point], output: Path | None, jobs: int) -> list[Row]:
    """The rows of all points in order. With an output, what is done already is taken from its part file."""
    from cotenant.sim.parallel import task_pool
    from cotenant.sim.sweep import run_point

    done: dict[tuple[str, ...], list[Row]] = {}
    if output is not None:
        done = _begun(_part(output), _fingerprint(points))
    left = [point for point in points if _key(point) not in done]
    if len(left) < len(points):
        aside.print(f"{len(points) - len(left)} of {len(points)} combinations were done before", highlight=False)
    try:
        with task_pool(jobs) as workers, progress_bars("sweeping", transient=True) as progress:
            if aside.is_terminal:
                progress.start()
            task = progress.add_task("", total=len(points), completed=len(points) - len(left))
            for number, rows in workers.each(run_point, left):
                done[_key(left[number])] = rows
                if output is not None:
                    _append(_part(output), rows)
                progress.advance(task)
    except BaseException:
        if output is not None and done:
            reached = f"{len(done)} of {len(points)} combinations are in {_part(output)}"
            aside.print(
                f"{reached}; the same command goes on from there", highlight=False, markup=False, soft_wrap=True
            )
        raise
    return [row for point in points for row in done[_key(point)]]


def _key(point: Point) -> tuple[str, ...]:
    return tuple(change.text for change in point.changes)


def _part(output: Path) -> Path:
    return output.with_name(output.name + ".part")


def _fingerprint(points: Sequence[Point]) -> str:
    """Of everything on which results depend; the same in every process."""
    problem = points[0].question.problem
    measured = [(key, profile.points) for key, profile in sorted(problem.profiles.items())]
    what = [
        (point.label, point.question.planner, point.seconds, point.seeds, _asked(point.question.workload))
        for point in points
    ]
    world = (problem.models, problem.fleet, problem.objective, problem.applications, measured)
    predictor = (type(problem.interference).__name__, problem.interference)
    text = msgspec.json.encode([what, world, predictor], enc_hook=_described, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def _asked(workload: Workload) -> tuple[object, ...]:
    """Sources may have the same fields: which they are is said, too."""
    return [type(source).__name__ for source in workload.sources.values()], workload


def _described(value: object) -> object:
    """A predictor that is no struct, as it is written to a file; or just its name."""
    written = getattr(value, "to_json", None)
    return type(value).__name__ if written is None else written()


def _begun(part: Path, fingerprint: str) -> dict[tuple[str, ...], list[Row]]:
    """What a part file holds, by changes; the file is made where there is none. Its last line may be cut off."""
    from cotenant.sim.sweep import Row

    if not part.exists():
        write_file(part, f"{fingerprint}\n", quiet=True)
        return {}
    first, *lines = text_of(part).split("\n")
    if first != fingerprint:
        raise ConfigError(f"{part}: holds part of another sweep; delete it, or choose another --output")
    done: dict[tuple[str, ...], list[Row]] = {}
    for line in lines[:-1]:
        try:
            rows = msgspec.json.decode(line, type=list[Row])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{part}: is damaged: {error}; delete it") from None
        done[rows[0].changes] = rows
    write_file(part, "\n".join([first, *lines[:-1], ""]), quiet=True)
    return done


def _append(part: Path, rows: Sequence[Row]) -> None:
    try:
        with part.open("ab") as file:
            file.write(msgspec.json.encode(rows) + b"\n")
    except OSError as error:
        raise ConfigError(f"{part}: cannot be written: {error.strerror}") from None


def _csv(rows: Sequence[Row]) -> str:
    """A line for each model in each run; first what was changed, a column for each axis."""
    axes = [text.partition("=")[0] for text in rows[0].changes]
    names = [f"{axis}_{n + 1}" if axes.count(axis) > 1 else axis for n, axis in enumerate(axes)]
    text = io.StringIO()
    file = csv.writer(text, lineterminator="\n")
    file.writerow((*(f"over_{name}" for name in names), *COLUMNS))
    for row in rows:
        it = row.report
        head = (*(change.partition("=")[2] for change in row.changes), row.seed, row.planner, row.devices)
        if it is None:
            file.writerow((*head, *[""] * (len(COLUMNS) - 4), row.error))
            continue
        times = (_plain(None if value is None else value * 1e3) for value in (it.p50, it.p99, it.p999))
        ends = (it.outcomes.get(name, 0) for name in ("rejected", "expired", "failed"))
        asked = (it.model, _plain(it.offered), _plain(row.unserved))
        good = (_plain(it.goodput), _plain(it.attainment), _plain(it.required))
        file.writerow((*head, _plain(row.cost_per_hour), _plain(row.utilisation), *asked, *good, *times, *ends, ""))
    return text.getvalue()


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def sweep_view(points: Sequence[Point], rows: Iterable[Row]) -> RenderableType:
    """A line for each combination, over its seeds."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.changes, []).append(row)
    priced = any(row.cost_per_hour is not None for own in found.values() for row in own)
    names = [change.key for change in points[0].changes]
    headings = [*names, "devices", *([">cost /h"] if priced else []), ">busy", ">in time /s"]
    view = table(f"{len(points)} combinations, {len(points[0].seeds)} seeds", *headings, "worst model in time")
    for changes, own in found.items():
        _add(view, [change.partition("=")[2] for change in changes], own, priced=priced)
    notes = [f"{' '.join(key)}: no plan: {own[0].error}" for key, own in found.items() if own[0].error]
    return Group(view, *(Text(note, style="red") for note in notes))


def _add(view: Table, values: Sequence[str], rows: Sequence[Row], *, priced: bool) -> None:
    reports = [row.report for row in rows if row.report is not None]
    if not reports:
        view.add_row(*map(escape, values), Text("no plan", style="red"))
        return
    seeds = len({row.seed for row in rows})
    first = rows[0]
    busy = sum(row.utilisation for row in rows) / len(rows)
    cost = [] if not priced else ["-" if first.cost_per_hour is None else f"{first.cost_per_hour:.2f}"]
    goodput = sum(report.goodput for report in reports) / seeds
    attained: dict[str, float] = {}
    required: Mapping[str, float] = {report.model: report.required for report in reports}
    for name in required:
        parts = [report.attainment for report in reports if report.model == name and report.attainment is not None]
        if parts:
            attained[name] = sum(parts) / len(parts)
    worst = min(attained, key=lambda name: attained[name] - required[name], default="")
    text = Text("-")
    if worst:
        kept = attained[worst] >= required[worst]
        text = Text(f"{attained[worst] * 100:.2f} %", style="green" if kept else "red").append(
            f" {worst}", style="default"
        )
    cells = [*values, first.devices or "none", *cost, f"{busy * 100:.0f} %", f"{goodput:.4g}"]
    view.add_row(*map(escape, cells), text)
