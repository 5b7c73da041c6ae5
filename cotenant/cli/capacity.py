"""`cotenant capacity`: how much traffic a plan bears, and how many of which devices more of it would need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.asked import planned_or_read, problem_of
from cotenant.cli.options import (
    Jobs,
    Json,
    PlannerName,
    PlotFile,
    ProblemFile,
    Repository,
    Seconds,
    Seed,
    Seeds,
    ServerSettings,
    WorkloadFile,
)
from cotenant.cli.show import aside, bars, console, show_json
from cotenant.cli.simulate import requests_of, without_failures, workload_of
from cotenant.core.plan import Plan
from cotenant.core.units import show_rate
from cotenant.errors import ConfigError
from cotenant.measure.table import table

if TYPE_CHECKING:
    from cotenant.measure.charts import Line
    from cotenant.planners import Problem
    from cotenant.sim.capacity import Capacity, Level, Offer
    from cotenant.sim.parallel import Processes
    from cotenant.workload import Workload

NEAR = 1.25  # times the multiple at which promises break, what a picture shows
STEPS = 5  # of growth that are shown, from today's traffic on


def capacity(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    repository: Repository = None,
    planner: PlannerName = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Ask of this plan instead of a new one.")] = None,
    growth: Annotated[
        float | None,
        typer.Option(
            "--growth", min=0.01, help="How many of which devices do so many times the rates need? Each kind is tried."
        ),
    ] = None,
    workload: WorkloadFile = None,
    seconds: Seconds = 60.0,
    seeds: Seeds = 5,
    seed: Seed = 0,
    jobs: Jobs = 2,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """The largest multiple of the rates that a plan bears, in the simulator; or the devices that more traffic needs."""
    from cotenant.measure.draw import drawable

    if plot is not None:
        drawable(plot)  # an error now, not after minutes
    without_failures(workload)
    runs = tuple(range(seed, seed + seeds))
    if growth is None:
        asked, answer = planned_or_read(plan_file, problem, settings, repository, planner)
        _bears(asked, answer, workload, seconds, runs, jobs, plot, json=json)
        return
    if plan_file is not None:
        raise ConfigError("--growth makes plans of its own; leave it out, or leave out --plan")
    asked = problem_of(problem, settings, repository)
    _grows(asked, workload, planner, growth, seconds, runs, jobs, plot, json=json)


def _bears(
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
    from cotenant.measure.charts import save_capacity
    from cotenant.sim.capacity import busiest
    from cotenant.sim.parallel import processes

    workload = requests_of(problem, plan, None, 1.0, file)
    # A plan for the largest rate serves a multiple of the problem's rates already.
    of = "the plan's rates" if file is None and problem.objective == "rate" else "the rates"
    rates = busiest(workload, seconds, seeds[0])
    _asks(workload, rates)
    total = sum(rates.values()) if rates.keys() >= workload.sources.keys() else None
    with processes(min(jobs, len(seeds))) as workers:
        found = _borne(problem, plan, workload, seconds, seeds, workers)
    _came(found.levels, seconds)
    if plot is not None:
        save_capacity(
            _curves(found),
            plot,
            promised=100 * max(model.attainment for model in problem.models),
            at=found.multiple,
            low=found.low,
            high=found.high,
            title=capacity_story(found, plan, total, len(seeds), of).split(";")[0],
        )
        aside.print(f"wrote {plot}", highlight=False, markup=False, soft_wrap=True)
    if json:
        show_json(msgspec.json.format(msgspec.json.encode({"plan": msgspec.Raw(plan.to_json()), "capacity": found})))
    else:
        console.print(capacity_view(found, plan, total, seconds, len(seeds), of))


def _curves(found: Capacity) -> list[Line]:
    """What each model attains, in percent, over the multiples that are not far from where promises break."""
    from cotenant.measure.charts import Line

    lines = []
    near = [it for it in found.levels if found.low / NEAR <= it.multiple <= found.high * NEAR] or found.levels
    for name in found.levels[0].models:
        levels = [it for it in near if name in it.models]
        attained = [it.models[name] for it in levels]
        lines.append(
            Line(
                label=name,
                x=[it.multiple for it in levels],
                y=[100 * it.mean for it in attained],
                low=[100 * (it.mean - it.half) for it in attained],
                high=[100 * min(it.mean + it.half, 1.0) for it in attained],
            )
        )
    return lines


def _draw_growth(offers: Sequence[Offer], best: Offer | None, total: float, path: Path) -> None:
    from cotenant.measure.charts import Line, save_growth

    cost = all(offer.plan.cost_per_hour is not None for offer in offers if offer.serves)
    lines = []
    for kinds in dict.fromkeys(offer.kinds for offer in offers):
        serving = [offer for offer in offers if offer.kinds == kinds and offer.serves]
        heights = [(offer.plan.cost_per_hour or 0.0) if cost else float(offer.plan.devices_used) for offer in serving]
        if serving:
            lines.append(Line(label=_choice(serving[0]), x=[offer.growth for offer in serving], y=heights))
    last = best or offers[-1]
    bars = [
        Line(
            label=name,
            x=[100 * it.mean],
            y=[100 * it.required],
            low=[100 * (it.mean - it.half)],
            high=[100 * (it.mean + it.half)],
        )
        for name, it in last.level.models.items()
    ]
    title = f"{last.growth:.3g} x the rates: {_named(_counts(last.plan))}" if best else "not all can be served"
    chosen = [] if best is None else [offer for offer in offers if offer.kinds == best.kinds and offer.serves]
    save_growth(
        lines,
        bars,
        path,
        best="" if best is None else _choice(best),
        told=["\n".join(f"{count} {kind}" for kind, count in _counts(offer.plan).items()) for offer in chosen],
        cost=cost,
        per_multiple=total,
        title=title,
    )


def _asks(workload: Workload, rates: Mapping[str, float]) -> None:
    """Raises ConfigError where nothing is asked for. rates: of those sources that have one."""
    if not any(rates.get(name, 1.0) for name in workload.sources):
        raise ConfigError("nothing is asked for: all rates are 0; give some model a rate")


def _came(levels: Sequence[Level], seconds: float) -> None:
    """Raises ConfigError where so little is asked for that nothing was simulated."""
    if not any(it.models for it in levels):
        raise ConfigError(f"not a single request came within {seconds:g} s; simulate longer, with --seconds")


def _borne(
    problem: Problem, plan: Plan, workload: Workload, seconds: float, seeds: Sequence[int], workers: Processes
) -> Capacity:
    """Bisection, with a word of what is looked at."""
    from cotenant.sim.capacity import Look, capacity, level, looked

    with bars("simulating", transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        task = progress.add_task("", total=None)

        def at(multiple: float) -> Level:
            progress.update(task, description=f"{multiple:.2f} x")
            scaled = workload.scaled(multiple)
            looks = [Look(problem=problem, plan=plan, workload=scaled, seconds=seconds, seed=seed) for seed in seeds]
            progress.advance(task)
            return level(multiple, workers.all(looked, looks))

        return capacity(at)


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
            style = "green" if it.surely_kept else "yellow" if it.kept else "red"
            text = Text(f"{worst.mean * 100:.2f} %", style=style)
            spread = f" ± {worst.half * 100:.2f} " if seeds > 1 else ""
            text.append(f"{spread} {it.worst}", style="default")
        rows.add_row(f"{it.multiple:.2f}", "-" if total is None else show_rate(total * it.multiple), text)
    return Group(rows, Text(capacity_story(found, plan, total, seeds, of)))


def capacity_story(found: Capacity, plan: Plan, total: float | None, seeds: int, of: str) -> str:
    devices = _named(_counts(plan))
    if found.multiple == 0:
        return f"{devices} keep no promise of {found.limit}, however little is asked."
    if found.multiple == float("inf"):
        return f"{devices} bear more than was looked at, {found.levels[-1].multiple:.3g} x {of}."
    told = f"{devices} bear {found.multiple:.2f} x {of}{_interval(found, seeds)}"
    if total is not None:
        told += f", {show_rate(total * found.multiple)} requests/s"
    return f"{told}; beyond, the promise of {found.limit} breaks first."


def _grows(
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
    from cotenant.planners import load
    from cotenant.sim.capacity import Purchase, bought, busiest, cheapest
    from cotenant.sim.parallel import processes
    from cotenant.workload import Workload

    name = planner or read_settings().planner
    load(name)
    workload = Workload.poisson(problem.rates) if file is None else workload_of(file, problem)
    known = busiest(workload, seconds, seeds[0])
    _asks(workload, known)
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
        Purchase(
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
    offers: dict[int, Offer] = {}
    with processes(min(jobs, len(wanted))) as workers:
        with bars("planning and simulating", transient=True) as progress:
            if aside.is_terminal:
                progress.start()
            task = progress.add_task("", total=len(wanted))
            for number, offer in workers.each(bought, wanted):
                offers[number] = offer
                progress.advance(task)
        found = [offers[number] for number in range(len(wanted))]
        _came([offer.level for offer in found], seconds)
        best = cheapest([offer for offer in found if offer.growth == steps[-1]])
        borne = None
        if best is not None:
            asked = next(it for it in wanted if (it.growth, it.kinds) == (best.growth, best.kinds)).asked()
            borne = _borne(asked, best.plan, workload.scaled(growth), seconds, seeds, workers)
    if plot is not None:
        _draw_growth(found, best, sum(problem.rates.values()), plot)
        aside.print(f"wrote {plot}", highlight=False, markup=False, soft_wrap=True)
    if json:
        result = {
            "offers": [_plain(offer) for offer in found],
            "best": None if best is None else _plain(best),
            "capacity": borne,
        }
        show_json(result)
    else:
        console.print(growth_view(found, best, borne, sum(problem.rates.values()), len(seeds)))


def _plain(offer: Offer) -> dict[str, object]:
    return {
        "growth": offer.growth,
        "kinds": offer.kinds,
        "devices": _counts(offer.plan),
        "cost_per_hour": offer.plan.cost_per_hour,
        "bound": offer.plan.bound,
        "serves": offer.serves,
        "unserved": offer.plan.unserved,
        "level": offer.level,
        "plan": msgspec.Raw(offer.plan.to_json()),
    }


def growth_view(
    offers: Sequence[Offer], best: Offer | None, borne: Capacity | None, total: float, seeds: int
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
        cells += [_named(_counts(offer.plan))]
        cells += ["-" if offer.plan.cost_per_hour is None else f"{offer.plan.cost_per_hour:.2f}"] if priced else []
        rows.add_row(*map(escape, cells), _simulated(offer), style="bold" if offer is best else "")
    return Group(rows, Text(growth_story(offers, best, borne, total, seeds)))


def growth_story(offers: Sequence[Offer], best: Offer | None, borne: Capacity | None, total: float, seeds: int) -> str:
    today, last = offers[0].growth, offers[-1].growth
    if best is None or borne is None:
        failed = [offer for offer in offers if offer.growth == last]
        lacking = sorted({name for offer in failed for name in offer.plan.unserved}) or [failed[0].level.worst]
        return (
            f"No number of these devices serves {last:.3g} x the rates: {', '.join(lacking)} cannot be kept; give more "
            f"time with `slo`, or other devices."
        )
    cost = "" if best.plan.cost_per_hour is None else f", {best.plan.cost_per_hour:.2f} per hour"
    told = f"{last:.3g} x the rates, {show_rate(total * last)} requests/s, need {_named(_counts(best.plan))}{cost}"
    first = [offer for offer in offers if offer.growth == today and offer.kinds == best.kinds]
    if last != today and first[0].serves:
        told += f"; today's need {_named(_counts(first[0].plan))}"
    for offer in offers:
        if offer.growth == last and offer.serves and _counts(offer.plan) != _counts(best.plan):
            told += f"; {_choice(offer)} would need {_named(_counts(offer.plan))}{_more(offer, best)}"
    if borne.multiple == float("inf"):
        return (
            f"{told}. In the simulator they bear more than was looked at, {borne.levels[-1].multiple:.3g} times that."
        )
    return f"{told}. In the simulator they bear {borne.multiple:.2f} times that{_interval(borne, seeds)}."


def _interval(found: Capacity, seeds: int) -> str:
    """Of a single seed nothing can be said."""
    return f" (95 %: {found.low:.2f} to {found.high:.2f})" if seeds > 1 else ""


def _more(offer: Offer, best: Offer) -> str:
    mine, least = offer.plan.cost_per_hour, best.plan.cost_per_hour
    return "" if mine is None or not least else f", {mine / least - 1:.0%} more".replace("%", " %")


def _simulated(offer: Offer) -> Text:
    if offer.plan.unserved:
        return Text(f"no place for {', '.join(offer.plan.unserved)}", style="red")
    if not offer.level.models:
        return Text("-")  # nobody asked while it ran
    worst = offer.level.models[offer.level.worst]
    text = Text(f"{worst.mean * 100:.2f} %", style="green" if offer.level.kept else "red")
    return text.append(f" {offer.level.worst}", style="default")


def _choice(offer: Offer) -> str:
    return f"{offer.kinds[0]} alone" if len(offer.kinds) == 1 else "all kinds"


def _counts(plan: Plan) -> dict[str, int]:
    kinds = [device.kind for device in plan.devices]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _named(counts: dict[str, int]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in counts.items()) or "no devices"
