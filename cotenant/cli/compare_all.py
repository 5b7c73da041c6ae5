"""Compare all planners on the same problems: `cotenant compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape

from cotenant.cli.loading import read_bytes, write_file
from cotenant.cli.options import Duration, Jobs, Json, PlotFile
from cotenant.cli.output import StepProgress, console, print_labelled, print_written, progress_bars, show_json
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from cotenant.planners import Problem
    from cotenant.planning.planner_study import Estimate, StudyRow, StudySummary, StudyTask


def compare(
    problems: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROBLEM", help="Problem files (TOML), or names of built-in problems, such as v100/tight."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Compare on all built-in problems.")] = False,
    planners: Annotated[
        str | None, typer.Option("--planners", metavar="A,B,...", help="Planners to compare. Default: all.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FOLDER", help="Folder of the published measurements. Default: COTENANT_DATA."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Random draws of the rates for each problem.")] = 5,
    duration: Duration = 10.0,
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="FILE", help="Append measurements to this file, and resume from it."),
    ] = None,
    jobs: Jobs = 1,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Compare planners on the same problems: distance to a proven bound, attainment in simulation, work and churn."""
    from cotenant.planning.planner_study import measure, summarise, summarise_planners
    from cotenant.render.figure import check_drawable
    from cotenant.sim.parallel import task_pool

    if not problems and not every:
        raise ConfigError("no problem to compare on; name some, or use --all (see `cotenant compare --help`)")
    if plot is not None:
        check_drawable(plot)
    tasks = _tasks(problems or [], _planners(planners), data, seeds, duration, every=every)
    known = {} if results is None else {row.key: row for row in _read(results)}
    waiting = [task for task in tasks if _key(task) not in known]
    with progress_bars("comparing") as progress, task_pool(jobs) as pool:
        show = StepProgress(progress)
        show("planners", 0, len(waiting))
        for done, (_, row) in enumerate(pool.each(measure, waiting), 1):
            known[row.key] = row
            if results is not None:
                _append(results, row)
            show("planners", done, len(waiting))
    rows = [known[_key(task)] for task in tasks]
    overall, by_problem = summarise_planners(rows), summarise(rows)
    if plot is not None:
        from cotenant.render.study_figure import save_study

        save_study(overall, by_problem, plot)
        print_written(plot)
    if json:
        show_json({"planners": overall, "problems": by_problem, "measurements": rows})
        return
    console.print(_overall_table(overall, rows))
    console.print(_distance_table(overall, by_problem))
    for row in rows:
        for fault in row.faults:
            print_labelled("invalid:", f"{row.planner} on {row.problem}, seed {row.seed}: {fault}")
    for each in overall:
        for error in each.errors:
            print_labelled("no plan:", f"{each.planner}: {error}", to=console)


def _planners(names: str | None) -> list[str]:
    from cotenant.cli.compare import parse_planners
    from cotenant.planners import planner_names

    return planner_names() if names is None else parse_planners(names)


def _tasks(
    problems: Sequence[str], planners: Sequence[str], data: Path | None, seeds: int, seconds: float, *, every: bool
) -> list[StudyTask]:
    """Return all measurements. Problems of --all without their data are left out with a note; named ones are errors."""
    from cotenant.planning.planner_study import StudyTask
    from cotenant.planning.study_problems import study_problem, study_problem_names

    tasks = []
    for name in dict.fromkeys([*problems, *(study_problem_names() if every else ())]):
        try:
            drawn = [
                study_problem(name, seed, data) if name in study_problem_names() else _from_file(Path(name))
                for seed in range(seeds)
            ]
        except ConfigError as error:
            if name in problems:
                raise
            print_labelled("left out:", f"{name}: {error}")
            continue
        tasks += [
            StudyTask(planner, name, seed, problem, seconds)
            for planner in planners
            for seed, problem in enumerate(drawn)
        ]
    return tasks


def _from_file(path: Path) -> Problem:
    from cotenant.cli.loading import load_problem

    problem: Problem = load_problem(path, None, None)
    if problem.applications:
        raise ConfigError(f"{path}: has applications, whose targets are split before planners see them; leave them out")
    return problem


def _key(task: StudyTask) -> tuple[str, str, int, float]:
    return (task.planner, task.name, task.seed, task.seconds)


def _read(path: Path) -> list[StudyRow]:
    """Return the measurements of an earlier run; none where there is no file. A line that was cut off is removed."""
    from cotenant.planning.planner_study import StudyRow

    if not path.exists():
        return []
    written = read_bytes(path)
    whole = written[: written.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(msgspec.json.decode(line, type=StudyRow))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: not a measurement of `cotenant compare`: {error}") from None
    if whole != written:
        write_file(path, whole.decode(), quiet=True)
    return rows


def _append(path: Path, row: StudyRow) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _overall_table(overall: Sequence[StudySummary], rows: Sequence[StudyRow]) -> Table:
    from cotenant.render.table import table

    measured = len({(row.problem, row.seed) for row in rows})
    view = table(
        f"planners on {measured} problems: means and 95 % intervals",
        "planner",
        ">above the bound, %",
        ">unserved, %",
        ">rejected or late, %",
        ">processor time",
        ">workers restarted, %",
        ">no plan",
    )
    for each in overall:
        view.add_row(
            escape(each.planner),
            _percent(each.distance),
            _percent(each.unserved),
            _percent(each.missed),
            "-" if each.cpu_s is None else show_seconds(each.cpu_s.mean),
            _percent(each.churn),
            f"{each.of - each.planned}" if each.of > each.planned else "-",
        )
    return view


def _distance_table(overall: Sequence[StudySummary], by_problem: Sequence[StudySummary]) -> Table:
    """Return the mean distances from the bound, a row for each planner and a column for each problem."""
    from cotenant.render.table import table

    problems = list(dict.fromkeys(each.problem for each in by_problem))
    title = "above the proven bound, %; - where not everything is served"
    view = table(title, "planner", *(f">{problem.replace('/', ' ')}" for problem in problems))
    at = {(each.planner, each.problem): each for each in by_problem}
    for each in overall:
        cells = (at.get((each.planner, problem)) for problem in problems)
        view.add_row(
            escape(each.planner),
            *("-" if cell is None or cell.distance is None else f"{cell.distance.mean * 100:.1f}" for cell in cells),
        )
    return view


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.mean * 100:.1f} ± {estimate.half * 100:.1f}"
