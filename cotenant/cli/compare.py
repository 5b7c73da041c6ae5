"""Plan a problem with several planners, and compare the results: `cotenant plan --compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.output import aside, progress_bars
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError, PlanError
from cotenant.planners import BASELINES, Problem, load_planner
from cotenant.planners import planner_names as planners
from cotenant.planners.compare import Comparison, Row, compare
from cotenant.planning import plan
from cotenant.render.table import table


def parse_planners(names: str | None) -> list[str]:
    """Parse planners from ``a,b``; None is all but the papers' baselines. Raises PlanError for one that does not
    exist."""
    if names is None:
        return [name for name in planners() if name not in BASELINES]
    selected = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not selected:
        raise ConfigError(f"--planners {names!r} names none; write some of {','.join(planners())}")
    for name in selected:
        load_planner(name)
    return selected


def compare_planners(problem: Problem, names: Sequence[str], *, portfolio: bool = True) -> Comparison:
    """Plan with each planner. One that has no plan for the problem is a row with the reason."""
    plans, errors = [], {}
    with progress_bars("planning with", transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            try:
                plans.append(plan(problem, name, portfolio=portfolio))
            except PlanError as error:
                errors[name] = str(error)
            progress.advance(task)
    return compare(problem, plans, errors)


def comparison_view(comparison: Comparison) -> RenderableType:
    """Return the comparison as a table, with columns for prices, bounds and unserved rates only where there are any."""
    rows = comparison.rows
    rate = comparison.objective == "rate"
    priced = any(row.cost_per_hour is not None for row in rows)
    proven = comparison.bound is not None
    unserved = not rate and any(row.unserved for row in rows)
    objective = (
        "largest multiple of the rates"
        if rate
        else "least cost for the rates"
        if priced
        else "fewest devices for the rates"
    )
    headings = ["planner", ">devices", *([">cost /h"] if priced else []), *([">times the rates"] if rate else [])]
    headings += [*([">bound", ">gap"] if proven else []), *([">unserved /s"] if unserved else []), ">solved in"]
    view = table(f"planners compared: {objective}", *headings, "worst forecast")
    for row in rows:
        if row.error:
            view.add_row(escape(row.planner), *(["-"] * (len(headings) - 1)), Text("no plan", style="red"))
            continue
        cells = [escape(row.planner), f"{row.devices}"]
        cells += ["-" if row.cost_per_hour is None else f"{row.cost_per_hour:.2f}"] if priced else []
        cells += [f"{row.scale:.3g}"] if rate else []
        if proven:
            cells += ["-" if row.bound is None else f"{row.bound:.4g}"]
            cells += ["-" if row.gap is None else f"{row.gap:.1%}".replace("%", " %")]
        cells += [f"{sum(row.unserved.values()):.4g}" if row.unserved else "-"] if unserved else []
        style = "bold" if row is rows[0] else ""
        view.add_row(*cells, show_seconds(row.solve_s), _worst(row), style=style)
    notes = [f"{row.planner} has no plan: {row.error}" for row in rows if row.error]
    notes += [f"{row.planner} violates {violation}" for row in rows for violation in row.violations]
    return Group(view, *(Text(note, style="red") for note in notes))


def report_comparison(path: Path, comparison: Comparison, problem: Problem, *files: Path | None) -> None:
    """Write the report of a comparison. files: the problem's or settings'."""
    from cotenant.cli.report_file import write_report
    from cotenant.cli.reports import asked_section, input_files, listings
    from cotenant.render.page import Section

    write_report(
        path,
        title=f"{len(comparison.rows)} planners compared",
        question="Which planner serves these models best?",
        answer=[comparison.summary],
        good=None,
        sections=[
            Section(heading="The planners", parts=(comparison_view(comparison),)),
            asked_section(problem),
            listings(*files),
        ],
        files=input_files(*files),
    )


def _worst(row: Row) -> Text:
    if row.worst is None:
        return Text("-")
    colour = "green" if row.meets_slos else "red"
    text = Text(f"{row.worst.attainment * 100:.2f} %", style=colour)
    return text.append(f" {row.worst.model}", style="default")
