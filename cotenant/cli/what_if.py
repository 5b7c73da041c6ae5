"""Compare the plan in force with scenarios: `cotenant simulate --what-if`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.cli.output import collect_results, console, show_json
from cotenant.core.plan import Plan
from cotenant.core.units import show_rate, show_seconds
from cotenant.measure.report import ModelReport
from cotenant.planners import Problem
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
VIOLATED = "!"  # also readable without colours
BELOW = "~"
EQUAL_LATENCY = 0.05  # relative; latencies that differ by less are shown as equal


def run_what_ifs(
    question: Scenario,
    plan: Plan,
    changes: Sequence[Sequence[ScenarioChange]],
    *,
    seconds: float,
    seed: int,
    jobs: int,
    json: bool,
) -> list[ScenarioResult]:
    """Plan and simulate each scenario, show them next to the given plan, and return them."""
    trials = [ScenarioTask(label=NOW, question=question, plan=plan, seconds=seconds, seed=seed)]
    for scenario in changes:
        label = ",".join(change.text for change in scenario)
        trials.append(
            ScenarioTask(label=label, question=apply_changes(question, scenario, plan), seconds=seconds, seed=seed)
        )
    with task_pool(min(jobs, len(trials))) as workers:
        outcomes = collect_results("what if", workers.each(run_scenario, trials), len(trials))
    if json:
        show_json([_plain(outcome) for outcome in outcomes])
    else:
        console.print(side_by_side(outcomes))
    return outcomes


def report_what_ifs(
    path: Path, outcomes: Sequence[ScenarioResult], problem: Problem, files: Sequence[Path | None]
) -> None:
    """Write the report of scenarios. files: the problem's or settings', the plan's, the workload's."""
    from cotenant.cli.report_file import write_report
    from cotenant.cli.reports import asked_section, input_files, listings, plan_section
    from cotenant.render.page import Section

    base, *others = outcomes
    write_report(
        path,
        title=f"What if: {', '.join(outcome.label for outcome in others)}",
        question="What would these changes do to devices, cost and SLOs?",
        answer=[scenario_summary(outcome, base) for outcome in others],
        good=None,
        sections=[
            Section(heading="Side by side", parts=(scenario_table(outcomes),)),
            plan_section(base.plan, problem),
            asked_section(problem),
            listings(*files),
        ],
        files=input_files(*files),
    )


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
    """Tabulate scenarios, and sum each up in a line."""
    summaries = (Text(scenario_summary(outcome, outcomes[0])) for outcome in outcomes[1:])
    return Group(scenario_table(outcomes), *summaries)


def scenario_table(outcomes: Sequence[ScenarioResult]) -> Table:
    """Tabulate a column per scenario; what differs from the first is bold, a violated SLO red and marked."""
    base = outcomes[0]
    view = table("what if", "", *(f">{escape(outcome.label.replace(',', ' '))}" for outcome in outcomes))
    view.add_row("planner", *_cells([outcome.plan.planner for outcome in outcomes]))
    view.add_row("devices", *_cells([_devices(outcome) for outcome in outcomes]))
    if any(outcome.plan.cost_per_hour is not None for outcome in outcomes):
        view.add_row("cost /h", *_cells([_cost(outcome, base) for outcome in outcomes]))
    view.add_row("utilisation", *_cells([f"{outcome.utilisation * 100:.0f} %" for outcome in outcomes]))
    view.add_row("offered /s", *_cells([show_rate(_offered(outcome)) for outcome in outcomes]))
    view.add_row("goodput /s", *_cells([show_rate(_goodput(outcome)) for outcome in outcomes]))
    view.add_section()
    for name in [row.model for row in base.report.models]:
        rows = [_row(outcome, name) for outcome in outcomes]
        view.add_row(f"{escape(name)} attainment", *(_attained(row, rows[0]) for row in rows))
    view.add_section()
    for name in [row.model for row in base.report.models]:
        rows = [_row(outcome, name) for outcome in outcomes]
        view.add_row(f"{escape(name)} p99", *(_tail(row, rows[0]) for row in rows))
    marks = [f"{VIOLATED}: SLO violated"] if any(outcome.broken for outcome in outcomes) else []
    marks += [f"{BELOW}: below the SLO, by no more than chance"] if any(map(_below, outcomes)) else []
    view.caption = "; ".join(marks) or None
    return view


def scenario_summary(outcome: ScenarioResult, base: ScenarioResult) -> str:
    """Return one line on what a scenario does to devices, cost and SLOs."""
    parts = []
    more = outcome.plan.devices_used - base.plan.devices_used
    parts.append(f"{abs(more)} {'more' if more > 0 else 'fewer'}" if more else "same devices")
    if outcome.plan.cost_per_hour is not None and base.plan.cost_per_hour:
        parts.append(f"{outcome.plan.cost_per_hour / base.plan.cost_per_hour - 1:+.0%} cost".replace("%", " %"))
    if outcome.plan.unserved:
        parts.append(f"{show_rate(sum(outcome.plan.unserved.values()))} requests/s unserved")
    told = [
        f"{word}: {_listed(rows)}"
        for word, rows in (("SLO violated", outcome.broken), ("below the SLO by chance", _below(outcome)))
        if rows
    ]
    return f"{outcome.label}: {', '.join(parts)}; {'; '.join(told) or 'all SLOs met'}."


def _below(outcome: ScenarioResult) -> list[ModelReport]:
    """Return the models that are below their SLO by no more than chance allows."""
    return [row for row in outcome.report.models if row.slo_met and _is_below(row)]


def _is_below(row: ModelReport) -> bool:
    return row.attainment is not None and row.attainment < row.required


def _listed(rows: Sequence[ModelReport]) -> str:
    shown = ", ".join(f"{row.model} {_percent(row)} < {row.required * 100:g} %" for row in rows[:4])
    return shown + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


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
    """Return the attainment, never rounded up to what was asked for."""
    return "-" if row.attainment is None else f"{math.floor(row.attainment * 1e4 + 1e-6) / 100:.2f} %"


def _attained(row: ModelReport, base: ModelReport) -> Text:
    style = "bold red" if not row.slo_met else "bold" if base.slo_met != row.slo_met else ""
    mark = f" {VIOLATED}" if not row.slo_met else f" {BELOW}" if _is_below(row) else ""
    return Text(_percent(row) + mark, style=style)


def _tail(row: ModelReport, base: ModelReport) -> Text:
    if row.p99 is None:
        return Text("-")
    same = base.p99 is not None and abs(row.p99 / base.p99 - 1) < EQUAL_LATENCY
    return Text(show_seconds(row.p99), style="" if same else "bold")
