"""How many of which devices more traffic needs: each kind alone and all together, planned and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.capacity_report import (
    check_asks,
    check_simulated,
    counts,
    describe_devices,
    interval,
    search_capacity,
)
from cotenant.cli.output import collect_results, console, print_written, show_json
from cotenant.cli.simulate import workload_of
from cotenant.core.units import show_rate
from cotenant.errors import ConfigError
from cotenant.render.table import table

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.planning.fleet_sizing import SizingResult
    from cotenant.sim.capacity import Capacity

STEPS = 5  # of growth that are shown, from today's traffic on


def report_growth(
    problem: Problem,
    file: Path | None,
    planner: str | None,
    growth: float,
    seconds: float,
    seeds: tuple[int, ...],
    jobs: int,
    plot: Path | None,
    *,
    json: bool,
) -> None:
    """With --growth. file: of a workload, whose highest rates are then planned for."""
    from cotenant.config import read_settings
    from cotenant.planners import load_planner
    from cotenant.planning.fleet_sizing import SizingTask, cheapest_result, size_fleet
    from cotenant.sim.capacity import peak_rates
    from cotenant.sim.parallel import task_pool
    from cotenant.workload import Workload

    name = planner or read_settings().planner
    load_planner(name)
    workload = Workload.poisson(problem.rates) if file is None else workload_of(file, problem)
    known = peak_rates(workload, seconds, seeds[0])
    check_asks(workload, known)
    for it in workload.sources:
        if it not in known and not problem.rates.get(it):
            raise ConfigError(
                f"how often {it!r} is asked for depends on how fast it answers; give it a rate in the problem, so that "
                "devices can be planned for that"
            )
    planned_for = {it: known.get(it, rate) if it in workload.sources else 0.0 for it, rate in problem.rates.items()}
    problem = msgspec.structs.replace(problem, rates=planned_for)
    kinds = tuple(kind.name for kind in problem.fleet)
    choices = [(kind,) for kind in kinds] + ([kinds] if len(kinds) > 1 else [])
    steps = [1 + (growth - 1) * n / (STEPS - 1) for n in range(STEPS)] if growth != 1 else [1.0]
    wanted = [
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
    with task_pool(min(jobs, len(wanted))) as workers:
        found = collect_results("planning and simulating", workers.each(size_fleet, wanted), len(wanted))
        check_simulated([offer.level for offer in found], seconds)
        best = cheapest_result([offer for offer in found if offer.growth == steps[-1]])
        borne = None
        if best is not None:
            asked = next(it for it in wanted if (it.growth, it.kinds) == (best.growth, best.kinds)).grown_problem()
            borne = search_capacity(asked, best.plan, workload.scaled(growth), seconds, seeds, workers)
    if plot is not None:
        _draw(found, best, sum(problem.rates.values()), plot)
        print_written(plot)
    if json:
        result = {
            "offers": [_plain(offer) for offer in found],
            "best": None if best is None else _plain(best),
            "capacity": borne,
        }
        show_json(result)
    else:
        console.print(growth_view(found, best, borne, sum(problem.rates.values()), len(seeds)))


def _draw(offers: Sequence[SizingResult], best: SizingResult | None, total: float, path: Path) -> None:
    from cotenant.render.charts import Series, save_growth

    cost = all(offer.plan.cost_per_hour is not None for offer in offers if offer.serves)
    lines = []
    for kinds in dict.fromkeys(offer.kinds for offer in offers):
        serving = [offer for offer in offers if offer.kinds == kinds and offer.serves]
        heights = [(offer.plan.cost_per_hour or 0.0) if cost else float(offer.plan.devices_used) for offer in serving]
        if serving:
            lines.append(Series(label=_choice(serving[0]), x=[offer.growth for offer in serving], y=heights))
    last = best or offers[-1]
    bars = [
        Series(
            label=name,
            x=[100 * it.mean],
            y=[100 * it.required],
            low=[100 * (it.mean - it.half)],
            high=[100 * (it.mean + it.half)],
        )
        for name, it in last.level.models.items()
    ]
    title = f"{last.growth:.3g} x the rates: {describe_devices(counts(last.plan))}" if best else "not all can be served"
    chosen = [] if best is None else [offer for offer in offers if offer.kinds == best.kinds and offer.serves]
    save_growth(
        lines,
        bars,
        path,
        best="" if best is None else _choice(best),
        annotations=["\n".join(f"{count} {kind}" for kind, count in counts(offer.plan).items()) for offer in chosen],
        cost=cost,
        per_multiple=total,
        title=title,
    )


def _plain(offer: SizingResult) -> dict[str, object]:
    return {
        "growth": offer.growth,
        "kinds": offer.kinds,
        "devices": counts(offer.plan),
        "cost_per_hour": offer.plan.cost_per_hour,
        "bound": offer.plan.bound,
        "serves": offer.serves,
        "unserved": offer.plan.unserved,
        "level": offer.level,
        "plan": msgspec.Raw(offer.plan.to_json()),
    }


def growth_view(
    offers: Sequence[SizingResult], best: SizingResult | None, borne: Capacity | None, total: float, seeds: int
) -> RenderableType:
    """A line for each traffic and choice of kinds; and the answer in words. offers: of each choice from today's traffic
    to that which is asked about."""
    several = len({offer.kinds for offer in offers}) > 1
    priced = any(offer.plan.cost_per_hour is not None for offer in offers)
    headings = [">times the rates", ">requests /s", *(["kinds"] if several else []), "devices"]
    rows = table("devices for more traffic", *headings, *([">cost /h"] if priced else []), "worst, simulated")
    for offer in sorted(offers, key=lambda it: it.growth):
        cells = [f"{offer.growth:.3g}", show_rate(total * offer.growth)]
        cells += [_choice(offer)] if several else []
        cells += [describe_devices(counts(offer.plan))]
        cells += ["-" if offer.plan.cost_per_hour is None else f"{offer.plan.cost_per_hour:.2f}"] if priced else []
        rows.add_row(*map(escape, cells), _simulated(offer), style="bold" if offer is best else "")
    return Group(rows, Text(growth_summary(offers, best, borne, total, seeds)))


def growth_summary(
    offers: Sequence[SizingResult], best: SizingResult | None, borne: Capacity | None, total: float, seeds: int
) -> str:
    today, last = offers[0].growth, offers[-1].growth
    if best is None or borne is None:
        failed = [offer for offer in offers if offer.growth == last]
        lacking = sorted({name for offer in failed for name in offer.plan.unserved}) or [failed[0].level.worst]
        return (
            f"No number of these devices serves {last:.3g} x the rates: {', '.join(lacking)} cannot be kept; give more "
            f"time with `slo`, or other devices."
        )
    cost = "" if best.plan.cost_per_hour is None else f", {best.plan.cost_per_hour:.2f} per hour"
    needed = describe_devices(counts(best.plan))
    told = f"{last:.3g} x the rates, {show_rate(total * last)} requests/s, need {needed}{cost}"
    first = [offer for offer in offers if offer.growth == today and offer.kinds == best.kinds]
    if last != today and first[0].serves:
        told += f"; today's need {describe_devices(counts(first[0].plan))}"
    for offer in offers:
        if offer.growth == last and offer.serves and counts(offer.plan) != counts(best.plan):
            told += f"; {_choice(offer)} would need {describe_devices(counts(offer.plan))}{_more(offer, best)}"
    if borne.multiple == float("inf"):
        return (
            f"{told}. In the simulator they bear more than was looked at, {borne.levels[-1].multiple:.3g} times that."
        )
    return f"{told}. In the simulator they bear {borne.multiple:.2f} times that{interval(borne, seeds)}."


def _more(offer: SizingResult, best: SizingResult) -> str:
    mine, least = offer.plan.cost_per_hour, best.plan.cost_per_hour
    return "" if mine is None or not least else f", {mine / least - 1:.0%} more".replace("%", " %")


def _simulated(offer: SizingResult) -> Text:
    if offer.plan.unserved:
        return Text(f"no place for {', '.join(offer.plan.unserved)}", style="red")
    if not offer.level.models:
        return Text("-")  # nobody asked while it ran
    worst = offer.level.models[offer.level.worst]
    text = Text(f"{worst.mean * 100:.2f} %", style="green" if offer.level.slos_met else "red")
    return text.append(f" {offer.level.worst}", style="default")


def _choice(offer: SizingResult) -> str:
    return f"{offer.kinds[0]} alone" if len(offer.kinds) == 1 else "all kinds"
