"""Show the capacity of a plan in the simulator: in a sentence, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cotenant.cli.output import aside, console, print_written, progress_bars, show_json
from cotenant.cli.report_file import write_report
from cotenant.cli.simulate import workload_for_plan
from cotenant.core.plan import Plan
from cotenant.core.units import show_rate
from cotenant.errors import ConfigError
from cotenant.render.table import table

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.render.charts import Series
    from cotenant.render.page import Section
    from cotenant.sim.capacity import Capacity, LoadLevel
    from cotenant.sim.parallel import TaskPool
    from cotenant.workload import Workload

FIGURE_RANGE = 1.25  # times the capacity, up and down: the multiples that a figure shows


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Say where an answer goes. plot, report: files, where they are wanted. files: that the question was read from: the
    problem's or settings', the plan's, the workload's."""

    plot: Path | None
    report: Path | None
    files: tuple[Path | None, ...]
    json: bool


def report_capacity(
    problem: Problem,
    plan: Plan,
    file: Path | None,
    seconds: float,
    seeds: Sequence[int],
    jobs: int,
    output: Output,
    *,
    lend: bool = False,
) -> None:
    """Find and show the capacity of a plan: `capacity` without --growth. file: of a workload. lend: idle share of
    processors."""
    from cotenant.cli.reports import input_files
    from cotenant.render.charts import save_capacity
    from cotenant.sim.capacity import peak_rates
    from cotenant.sim.parallel import task_pool

    workload = workload_for_plan(problem, plan, None, 1.0, file)
    # A plan for the largest rate serves a multiple of the problem's rates already.
    unit = "the plan's rates" if file is None and problem.objective == "rate" else "the rates"
    rates = peak_rates(workload, seconds, seeds[0])
    check_rates(workload, rates)
    total = sum(rates.values()) if rates.keys() >= workload.sources.keys() else None
    with task_pool(min(jobs, len(seeds))) as workers:
        capacity = search_capacity(problem, plan, workload, seconds, seeds, workers, lend=lend)
    check_simulated(capacity.levels, seconds)
    summary = capacity_summary(capacity, plan, total, len(seeds), unit)
    levels = level_table(capacity, total, seconds, len(seeds), unit)

    def draw(path: Path) -> None:
        save_capacity(
            _curves(capacity),
            path,
            required=100 * max(model.attainment for model in problem.models),
            capacity=capacity.multiple,
            low=capacity.low,
            high=capacity.high,
            title=summary.split(";")[0],
        )

    if output.plot is not None:
        draw(output.plot)
        print_written(output.plot)
    if output.report is not None:
        write_report(
            output.report,
            title=f"Capacity of {describe_devices(counts(plan))}",
            question="Which multiple of the rates does the plan sustain within all SLOs? Simulated"
            + (", with idle share of processors lent." if lend else "."),
            answer=[summary],
            good=capacity.multiple >= 1,
            sections=_sections(output, plan, problem, levels, draw),
            files=input_files(*output.files),
        )
    if output.json:
        show_json(msgspec.json.format(msgspec.json.encode({"plan": msgspec.Raw(plan.to_json()), "capacity": capacity})))
    else:
        console.print(Group(levels, Text(summary)))


def _sections(
    output: Output, plan: Plan, problem: Problem, levels: RenderableType, draw: Callable[[Path], None]
) -> list[Section]:
    from cotenant.cli.reports import asked_section, listings, plan_listing, plan_section
    from cotenant.render.page import Section, drawn

    shows = "SLO attainment of each model over the load, with its 95 % interval."
    return [
        Section(heading="Loads", parts=(drawn(draw, shows), levels)),
        plan_section(plan, problem),
        asked_section(problem),
        plan_listing(plan),
        listings(*output.files),
    ]


def _curves(capacity: Capacity) -> list[Series]:
    """Return each model's attainment, in percent, over the multiples around the capacity."""
    from cotenant.render.charts import Series

    lines = []
    lowest, highest = capacity.low / FIGURE_RANGE, capacity.high * FIGURE_RANGE
    near = [level for level in capacity.levels if lowest <= level.multiple <= highest] or capacity.levels
    for name in capacity.levels[0].models:
        levels = [level for level in near if name in level.models]
        attained = [level.models[name] for level in levels]
        lines.append(
            Series(
                label=name,
                x=[level.multiple for level in levels],
                y=[100 * attainment.mean for attainment in attained],
                low=[100 * (attainment.mean - attainment.half) for attainment in attained],
                high=[100 * min(attainment.mean + attainment.half, 1.0) for attainment in attained],
            )
        )
    return lines


def check_rates(workload: Workload, rates: Mapping[str, float]) -> None:
    """Raise ConfigError where no model has requests. rates: of those sources that have one."""
    if not any(rates.get(name, 1.0) for name in workload.sources):
        raise ConfigError("no requests: all rates are 0; give some model a rate")


def check_simulated(levels: Sequence[LoadLevel], seconds: float) -> None:
    """Raise ConfigError where rates are so low that no request was simulated."""
    if not any(level.models for level in levels):
        raise ConfigError(f"no request arrived within {seconds:g} s; simulate longer, with --duration")


def search_capacity(
    problem: Problem,
    plan: Plan,
    workload: Workload,
    seconds: float,
    seeds: Sequence[int],
    workers: TaskPool,
    *,
    lend: bool = False,
) -> Capacity:
    """Bisect for the capacity, showing progress."""
    from cotenant.sim.capacity import SimulationTask, attainment_at, find_capacity, run_simulation

    with progress_bars("simulating", transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        task = progress.add_task("", total=None)

        def at(multiple: float) -> LoadLevel:
            progress.update(task, description=f"{multiple:.2f} x")
            scaled = workload.scaled(multiple)
            tasks = [
                SimulationTask(problem=problem, plan=plan, workload=scaled, seconds=seconds, seed=seed, lend=lend)
                for seed in seeds
            ]
            progress.advance(task)
            return attainment_at(multiple, workers.all(run_simulation, tasks))

        return find_capacity(at)


def level_table(capacity: Capacity, total: float | None, seconds: float, seeds: int, unit: str) -> Table:
    """Tabulate every multiple that was simulated. total: requests/s; None for closed-loop callers, whose rate depends
    on latency. unit: what multiples are of."""
    title = f"simulated, {seeds} x {seconds:.4g} s at each multiple"
    rows = table(title, f">times {unit}", ">requests /s", "worst attainment")
    for level in capacity.levels:
        text = Text("-")  # without requests
        if level.models:
            worst = level.models[level.worst]
            style = "green" if level.surely_met else "yellow" if level.slos_met else "red"
            text = Text(f"{worst.mean * 100:.2f} %", style=style)
            spread = f" ± {worst.half * 100:.2f} " if seeds > 1 else ""
            text.append(f"{spread} {level.worst}", style="default")
        rows.add_row(f"{level.multiple:.2f}", "-" if total is None else show_rate(total * level.multiple), text)
    return rows


def capacity_summary(capacity: Capacity, plan: Plan, total: float | None, seeds: int, unit: str) -> str:
    devices = f"{describe_devices(counts(plan))} {'sustains' if len(plan.devices) == 1 else 'sustain'}"
    if capacity.multiple == 0:
        return f"SLO violated: {capacity.limit}, even at the lowest load."
    if capacity.multiple == float("inf"):
        return f"{devices} more than was simulated, {capacity.levels[-1].multiple:.3g} × {unit}."
    text = f"{devices} {capacity.multiple:.2f} × {unit}{interval(capacity, seeds)}"
    if total is not None:
        text += f", {show_rate(total * capacity.multiple)} requests/s"
    return f"{text}; beyond, the SLO of {capacity.limit} is violated first."


def interval(capacity: Capacity, seeds: int) -> str:
    """Return the confidence interval of the capacity; none for a single seed."""
    return f" (95 %: {capacity.low:.2f} to {capacity.high:.2f})" if seeds > 1 else ""


def counts(plan: Plan) -> dict[str, int]:
    kinds = [device.kind for device in plan.devices]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def describe_devices(counts: dict[str, int]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in counts.items()) or "no devices"
