"""Size the fleet for more load, with each kind of device alone and with all together: planned and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cotenant.cli.capacity_report import (
    Output,
    check_rates,
    check_simulated,
    counts,
    describe_devices,
    interval,
    search_capacity,
)
from cotenant.cli.output import collect_results, console, print_written, show_json
from cotenant.cli.report_file import write_report
from cotenant.cli.simulate import workload_of
from cotenant.core.units import show_rate
from cotenant.errors import ConfigError
from cotenant.render.table import table

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.planning.fleet_sizing import SizingResult
    from cotenant.render.page import Section
    from cotenant.sim.capacity import Capacity

STEPS = 5  # multiples of the load to size, from today's to the requested one


def report_growth(
    problem: Problem,
    file: Path | None,
    planner: str | None,
    growth: float,
    seconds: float,
    seeds: tuple[int, ...],
    jobs: int,
    output: Output,
) -> None:
    """Size the fleet and show it: `capacity --growth`. file: of a workload, whose peak rates are planned for."""
    from cotenant.cli.reports import input_files
    from cotenant.config import read_settings
    from cotenant.planners import load_planner
    from cotenant.planning.fleet_sizing import SizingTask, cheapest_result, size_fleet
    from cotenant.sim.capacity import peak_rates
    from cotenant.sim.parallel import task_pool
    from cotenant.workload import Workload

    name = planner or read_settings().planner
    load_planner(name)
    workload = Workload.poisson(problem.rates) if file is None else workload_of(file, problem)
    peaks = peak_rates(workload, seconds, seeds[0])
    check_rates(workload, peaks)
    for source in workload.sources:
        if source not in peaks and not problem.rates.get(source):
            raise ConfigError(
                f"the rate of {source!r} depends on its latency (closed-loop callers); give it a rate in the problem to"
                " plan for"
            )
    rates = {name: peaks.get(name, rate) if name in workload.sources else 0.0 for name, rate in problem.rates.items()}
    problem = msgspec.structs.replace(problem, rates=rates)
    kinds = tuple(kind.name for kind in problem.fleet)
    choices = [(kind,) for kind in kinds] + ([kinds] if len(kinds) > 1 else [])
    steps = [1 + (growth - 1) * n / (STEPS - 1) for n in range(STEPS)] if growth != 1 else [1.0]
    tasks = [
        SizingTask(
            problem=problem,
            workload=workload,
            planner=name,
            growth=step,
            kinds=choice,
            seconds=seconds,
            seeds=seeds,
        )
        for choice in choices
        for step in steps
    ]
    with task_pool(min(jobs, len(tasks))) as workers:
        fleets = collect_results("planning and simulating", workers.each(size_fleet, tasks), len(tasks))
        check_simulated([fleet.level for fleet in fleets], seconds)
        best = cheapest_result([fleet for fleet in fleets if fleet.growth == steps[-1]])
        capacity = None
        if best is not None:
            chosen = next(task for task in tasks if (task.growth, task.kinds) == (best.growth, best.kinds))
            capacity = search_capacity(
                chosen.grown_problem(), best.plan, workload.scaled(growth), seconds, seeds, workers
            )
    total = sum(problem.rates.values())
    if output.plot is not None:
        _draw(fleets, best, total, output.plot)
        print_written(output.plot)
    summary = growth_summary(fleets, best, capacity, total, len(seeds))
    if output.report is not None:
        write_report(
            output.report,
            title=f"Devices for {growth:g} times the rates",
            question=f"Which devices serve {growth:g} times these rates within all SLOs, and at which cost? Simulated.",
            answer=[summary],
            good=best is not None,
            sections=_sections(output, problem, fleets, best, total),
            files=input_files(*output.files),
        )
    if output.json:
        result = {
            "offers": [_plain(fleet) for fleet in fleets],
            "best": None if best is None else _plain(best),
            "capacity": capacity,
        }
        show_json(result)
    else:
        console.print(Group(fleet_table(fleets, best, total), Text(summary)))


def _sections(
    output: Output, problem: Problem, fleets: Sequence[SizingResult], best: SizingResult | None, total: float
) -> list[Section]:
    from cotenant.cli.reports import asked_section, listings, plan_listing
    from cotenant.render.page import Section, drawn

    picture = drawn(lambda path: _draw(fleets, best, total, path), "Cost or devices over the load, and attainment.")
    return [
        Section(heading="Fleets", parts=(picture, fleet_table(fleets, best, total))),
        asked_section(problem),
        *([] if best is None else [plan_listing(best.plan)]),
        listings(*output.files),
    ]


def _draw(fleets: Sequence[SizingResult], best: SizingResult | None, total: float, path: Path) -> None:
    from cotenant.render.charts import Series, save_growth

    cost = all(fleet.plan.cost_per_hour is not None for fleet in fleets if fleet.serves)
    lines = []
    for kinds in dict.fromkeys(fleet.kinds for fleet in fleets):
        serving = [fleet for fleet in fleets if fleet.kinds == kinds and fleet.serves]
        heights = [(fleet.plan.cost_per_hour or 0.0) if cost else float(fleet.plan.devices_used) for fleet in serving]
        if serving:
            lines.append(Series(label=_choice(serving[0]), x=[fleet.growth for fleet in serving], y=heights))
    last = best or fleets[-1]
    bars = [
        Series(
            label=name,
            x=[100 * attainment.mean],
            y=[100 * attainment.required],
            low=[100 * (attainment.mean - attainment.half)],
            high=[100 * (attainment.mean + attainment.half)],
        )
        for name, attainment in last.level.models.items()
    ]
    title = (
        f"{last.growth:.3g} × the rates: {describe_devices(counts(last.plan))}" if best else "the load cannot be served"
    )
    chosen = [] if best is None else [fleet for fleet in fleets if fleet.kinds == best.kinds and fleet.serves]
    save_growth(
        lines,
        bars,
        path,
        best="" if best is None else _choice(best),
        annotations=["\n".join(f"{count} {kind}" for kind, count in counts(fleet.plan).items()) for fleet in chosen],
        cost=cost,
        per_multiple=total,
        title=title,
    )


def _plain(fleet: SizingResult) -> dict[str, object]:
    return {
        "growth": fleet.growth,
        "kinds": fleet.kinds,
        "devices": counts(fleet.plan),
        "cost_per_hour": fleet.plan.cost_per_hour,
        "bound": fleet.plan.bound,
        "serves": fleet.serves,
        "unserved": fleet.plan.unserved,
        "level": fleet.level,
        "plan": msgspec.Raw(fleet.plan.to_json()),
    }


def fleet_table(fleets: Sequence[SizingResult], best: SizingResult | None, total: float) -> Table:
    """Tabulate every load and choice of kinds. fleets: of each choice, from today's load to the largest."""
    several = len({fleet.kinds for fleet in fleets}) > 1
    priced = any(fleet.plan.cost_per_hour is not None for fleet in fleets)
    headings = [">times the rates", ">requests /s", *(["kinds"] if several else []), "devices"]
    rows = table("fleet sizes", *headings, *([">cost /h"] if priced else []), "worst attainment, simulated")
    for fleet in sorted(fleets, key=lambda fleet: fleet.growth):
        cells = [f"{fleet.growth:.3g}", show_rate(total * fleet.growth)]
        cells += [_choice(fleet)] if several else []
        cells += [describe_devices(counts(fleet.plan))]
        cells += ["-" if fleet.plan.cost_per_hour is None else f"{fleet.plan.cost_per_hour:.2f}"] if priced else []
        rows.add_row(*map(escape, cells), _simulated(fleet), style="bold" if fleet is best else "")
    return rows


def growth_summary(
    fleets: Sequence[SizingResult], best: SizingResult | None, capacity: Capacity | None, total: float, seeds: int
) -> str:
    today, last = fleets[0].growth, fleets[-1].growth
    if best is None or capacity is None:
        failed = [fleet for fleet in fleets if fleet.growth == last]
        lacking = sorted({name for fleet in failed for name in fleet.plan.unserved}) or [failed[0].level.worst]
        return (
            f"No fleet of these devices serves {last:.3g} × the rates: the SLO of {', '.join(lacking)} is violated;"
            " relax `slo`, or add other devices."
        )
    cost = "" if best.plan.cost_per_hour is None else f", {best.plan.cost_per_hour:.2f} per hour"
    needed = describe_devices(counts(best.plan))
    text = f"{last:.3g} × the rates, {show_rate(total * last)} requests/s, need {needed}{cost}"
    first = [fleet for fleet in fleets if fleet.growth == today and fleet.kinds == best.kinds]
    if last != today and first[0].serves:
        text += f"; today's need {describe_devices(counts(first[0].plan))}"
    for fleet in fleets:
        if fleet.growth == last and fleet.serves and counts(fleet.plan) != counts(best.plan):
            text += f"; {_choice(fleet)} would need {describe_devices(counts(fleet.plan))}{_more(fleet, best)}"
    if capacity.multiple == float("inf"):
        return f"{text}. They sustain more than was simulated, {capacity.levels[-1].multiple:.3g} × that."
    return f"{text}. They sustain {capacity.multiple:.2f} × that{interval(capacity, seeds)}."


def _more(fleet: SizingResult, best: SizingResult) -> str:
    cost, lowest = fleet.plan.cost_per_hour, best.plan.cost_per_hour
    return "" if cost is None or not lowest else f", {cost / lowest - 1:+.0%}".replace("%", " %")


def _simulated(fleet: SizingResult) -> Text:
    if fleet.plan.unserved:
        return Text(f"unserved: {', '.join(fleet.plan.unserved)}", style="red")
    if not fleet.level.models:
        return Text("-")  # without requests
    worst = fleet.level.models[fleet.level.worst]
    text = Text(f"{worst.mean * 100:.2f} %", style="green" if fleet.level.slos_met else "red")
    return text.append(f" {fleet.level.worst}", style="default")


def _choice(fleet: SizingResult) -> str:
    return f"{fleet.kinds[0]} alone" if len(fleet.kinds) == 1 else "all kinds"
