"""How much traffic a plan bears, simulated: the answer in words, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from cotenant.cli.output import aside, console, print_written, progress_bars, show_json
from cotenant.cli.simulate import workload_for_plan
from cotenant.core.plan import Plan
from cotenant.core.units import show_rate
from cotenant.errors import ConfigError
from cotenant.render.table import table

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.render.charts import Series
    from cotenant.sim.capacity import Capacity, LoadLevel
    from cotenant.sim.parallel import TaskPool
    from cotenant.workload import Workload

NEAR = 1.25  # times the multiple at which promises break, what a picture shows


def report_capacity(
    problem: Problem,
    plan: Plan,
    file: Path | None,
    seconds: float,
    seeds: Sequence[int],
    jobs: int,
    plot: Path | None,
    *,
    json: bool,
) -> None:
    """Without --growth. file: of a workload."""
    from cotenant.render.charts import save_capacity
    from cotenant.sim.capacity import peak_rates
    from cotenant.sim.parallel import task_pool

    workload = workload_for_plan(problem, plan, None, 1.0, file)
    # A plan for the largest rate serves a multiple of the problem's rates already.
    of = "the plan's rates" if file is None and problem.objective == "rate" else "the rates"
    rates = peak_rates(workload, seconds, seeds[0])
    check_asks(workload, rates)
    total = sum(rates.values()) if rates.keys() >= workload.sources.keys() else None
    with task_pool(min(jobs, len(seeds))) as workers:
        found = search_capacity(problem, plan, workload, seconds, seeds, workers)
    check_simulated(found.levels, seconds)
    if plot is not None:
        save_capacity(
            _curves(found),
            plot,
            required=100 * max(model.attainment for model in problem.models),
            capacity=found.multiple,
            low=found.low,
            high=found.high,
            title=capacity_summary(found, plan, total, len(seeds), of).split(";")[0],
        )
        print_written(plot)
    if json:
        show_json(msgspec.json.format(msgspec.json.encode({"plan": msgspec.Raw(plan.to_json()), "capacity": found})))
    else:
        console.print(capacity_view(found, plan, total, seconds, len(seeds), of))


def _curves(found: Capacity) -> list[Series]:
    """What each model attains, in percent, over the multiples that are not far from where promises break."""
    from cotenant.render.charts import Series

    lines = []
    near = [it for it in found.levels if found.low / NEAR <= it.multiple <= found.high * NEAR] or found.levels
    for name in found.levels[0].models:
        levels = [it for it in near if name in it.models]
        attained = [it.models[name] for it in levels]
        lines.append(
            Series(
                label=name,
                x=[it.multiple for it in levels],
                y=[100 * it.mean for it in attained],
                low=[100 * (it.mean - it.half) for it in attained],
                high=[100 * min(it.mean + it.half, 1.0) for it in attained],
            )
        )
    return lines


def check_asks(workload: Workload, rates: Mapping[str, float]) -> None:
    """Raises ConfigError where nothing is asked for. rates: of those sources that have one."""
    if not any(rates.get(name, 1.0) for name in workload.sources):
        raise ConfigError("nothing is asked for: all rates are 0; give some model a rate")


def check_simulated(levels: Sequence[LoadLevel], seconds: float) -> None:
    """Raises ConfigError where so little is asked for that nothing was simulated."""
    if not any(it.models for it in levels):
        raise ConfigError(f"not a single request came within {seconds:g} s; simulate longer, with --duration")


def search_capacity(
    problem: Problem, plan: Plan, workload: Workload, seconds: float, seeds: Sequence[int], workers: TaskPool
) -> Capacity:
    """Bisection, with a word of what is looked at."""
    from cotenant.sim.capacity import SimulationTask, attainment_at, find_capacity, run_simulation

    with progress_bars("simulating", transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        task = progress.add_task("", total=None)

        def at(multiple: float) -> LoadLevel:
            progress.update(task, description=f"{multiple:.2f} x")
            scaled = workload.scaled(multiple)
            looks = [
                SimulationTask(problem=problem, plan=plan, workload=scaled, seconds=seconds, seed=seed)
                for seed in seeds
            ]
            progress.advance(task)
            return attainment_at(multiple, workers.all(run_simulation, looks))

        return find_capacity(at)


def capacity_view(
    found: Capacity, plan: Plan, total: float | None, seconds: float, seeds: int, of: str
) -> RenderableType:
    """What was looked at, a line for each multiple, and the answer in words. total: requests/s, None where that depends
    on how fast they are answered; of: what multiples are of."""
    title = f"simulated, {seeds} x {seconds:.4g} s at each multiple"
    rows = table(title, f">times {of}", ">requests /s", "worst")
    for it in found.levels:
        text = Text("-")  # nobody asked while it ran
        if it.models:
            worst = it.models[it.worst]
            style = "green" if it.surely_met else "yellow" if it.slos_met else "red"
            text = Text(f"{worst.mean * 100:.2f} %", style=style)
            spread = f" ± {worst.half * 100:.2f} " if seeds > 1 else ""
            text.append(f"{spread} {it.worst}", style="default")
        rows.add_row(f"{it.multiple:.2f}", "-" if total is None else show_rate(total * it.multiple), text)
    return Group(rows, Text(capacity_summary(found, plan, total, seeds, of)))


def capacity_summary(found: Capacity, plan: Plan, total: float | None, seeds: int, of: str) -> str:
    devices = describe_devices(counts(plan))
    if found.multiple == 0:
        return f"{devices} keep no promise of {found.limit}, however little is asked."
    if found.multiple == float("inf"):
        return f"{devices} bear more than was looked at, {found.levels[-1].multiple:.3g} x {of}."
    told = f"{devices} bear {found.multiple:.2f} x {of}{interval(found, seeds)}"
    if total is not None:
        told += f", {show_rate(total * found.multiple)} requests/s"
    return f"{told}; beyond, the promise of {found.limit} breaks first."


def interval(found: Capacity, seeds: int) -> str:
    """Of a single seed nothing can be said."""
    return f" (95 %: {found.low:.2f} to {found.high:.2f})" if seeds > 1 else ""


def counts(plan: Plan) -> dict[str, int]:
    kinds = [device.kind for device in plan.devices]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def describe_devices(counts: dict[str, int]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in counts.items()) or "no devices"
