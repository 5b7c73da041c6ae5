"""`cotenant validate`: the same plan and the same arrivals through the live server and through the simulator.

The server is a process of its own, as when it serves. Before and after each load that is compared, other arrivals of
the same load are sent as a rehearsal, and what the simulator cannot know is taken from that: what batches take beside
the neighbours that they really have, and how much that varies, by the server's event log; and what a request spends
outside of the server. Both depend on the load: caches grow cold where batches come seldom, and processors are short
where they come often. Both drift, too: on a shared machine batches take a tenth longer in some minutes.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.asked import read, site_of
from cotenant.cli.interrupt import interruptible
from cotenant.cli.options import Json, PlannerName, Repository, Seconds, Seed, SettingsFile
from cotenant.cli.show import aside, console, show_json, tell
from cotenant.core.plan import Plan
from cotenant.core.units import show_seconds, show_share
from cotenant.errors import ConfigError
from cotenant.measure.report import ModelReport, Report
from cotenant.measure.table import table
from cotenant.runtime.log import entries

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.sim.observed import Seen

LOADS = (0.3, 0.6, 0.9, 1.2)
ASIDE = 1000  # added to the seed of a rehearsal: it is not to be what is compared
CLOSE = 0.05
ENOUGH = 200  # requests; with fewer, chance moves a p99 by more than that
BUSY = 0.01  # seconds by which requests are sent late where something else uses the machine
PATIENCE = 10.0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One load.

    batches: how long batches took live over how long they took simulated, by model. Of the rehearsal, slowdowns: what
    batches took over their profile, by model and share in percent; outside: seconds that a request spends outside of
    the server, by model.
    """

    load: float
    simulated: Report
    live: Report
    batches: dict[str, float]
    slowdowns: dict[str, float]
    outside: dict[str, float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    loads: tuple[Comparison, ...]


def validate(
    settings: SettingsFile = None,
    repository: Repository = None,
    planner: PlannerName = None,
    load: Annotated[
        list[float] | None,
        typer.Option("--load", min=0.01, help="Multiple of the planned rates; several may be given. 0.3 to 1.2 else."),
    ] = None,
    seconds: Seconds = 60.0,
    warm_up: Annotated[
        float,
        typer.Option("--warm-up", min=1.0, help="Seconds of other arrivals, half before and half after each load."),
    ] = 20.0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Compare the simulator with the live server: same plan, same arrivals. Let nothing else run meanwhile."""
    import uvloop

    site = site_of(read(settings, repository, planner))
    flags = [str(settings)] if settings is not None else []
    flags += ["--repository", str(repository)] if repository is not None else []
    flags += ["--planner", planner] if planner is not None else []
    result = uvloop.run(compared(site.problem, flags, load or LOADS, seconds, warm_up, seed))
    if json:
        show_json(result)
    else:
        console.print(result_view(result))


async def compared(
    problem: Problem, flags: Sequence[str], loads: Sequence[float], seconds: float, warm_up: float, seed: int
) -> Result:
    """flags: of `cotenant serve`, whose plan must be for this problem."""
    from cotenant.cli.client import body_for, under_load
    from cotenant.runtime.lanes import lanes_of
    from cotenant.sim.observed import observed, seen
    from cotenant.sim.run import simulate
    from cotenant.workload import Workload

    async with interruptible(), served(flags) as (plan, http, log):
        models = [model for model in problem.models if plan.rate(model.name)]
        rng = np.random.default_rng(seed)
        bodies = {model.name: await asyncio.to_thread(body_for, http, model.name, rng) for model in models}

        lanes = list(lanes_of(plan, {model.name: model for model in problem.models}, problem.profiles))

        async def live(load: float, seconds: float, seed: int) -> tuple[Report, Seen]:
            since, written = time.monotonic(), log.stat().st_size
            rates = {name: rate * load for name, rate in plan.rates().items()}
            report = await under_load(http, models, bodies, rates, seconds=seconds, seed=seed, quiet=True)
            return report, seen(entries(_lines(log, written), str(log)), since, time.monotonic())

        found = []
        for load in loads:
            aside.print(
                f"{load:g} x the planned rates, {seconds:g} s, and {warm_up / 2:g} s before and after", highlight=False
            )
            first, known = await live(load, warm_up / 2, seed + ASIDE)
            if (first.lag or 0.0) > BUSY:
                late = show_seconds(first.lag or 0.0)
                tell("the machine is busy:", f"requests leave up to {late} late; compare later")
            report, told = await live(load, seconds, seed)
            last, known_after = await live(load, warm_up / 2, seed + 2 * ASIDE)
            outside = _both(outside_of(first, known), outside_of(last, known_after))
            known = known.and_also(known_after)
            batches = observed(lanes, known.batches)
            workload = Workload.poisson({model.name: plan.rate(model.name) * load for model in models})
            simulated = simulate(
                _closer(problem, outside), plan, workload, seconds=seconds, seed=seed, observed=batches
            )
            simulated = _farther(simulated, outside, [model.name for model in models])
            means = {row.model: _mean(told, row.model) / row.observed for row in simulated.models if row.observed}
            found.append(
                Comparison(
                    load=load,
                    simulated=simulated,
                    live=report,
                    batches=means,
                    slowdowns=slowdowns(plan, problem, known),
                    outside={name: spent.mean for name, spent in outside.items()},
                )
            )
    return Result(loads=tuple(found))


@asynccontextmanager
async def served(flags: Sequence[str]) -> AsyncIterator[tuple[Plan, str, Path]]:
    """`cotenant serve` in a process of its own: its plan, the address of HTTP, and its event log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "events.jsonl")
        async with _process([*flags, "--log", str(log)]) as up:
            yield Plan.from_json(jsonlib.dumps(up["plan"])), up["addresses"]["http"], log


@asynccontextmanager
async def _process(flags: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """What `cotenant serve` says once it is up."""
    command = [sys.executable, "-m", "cotenant", "serve", *flags, "--port", "0", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 26)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise ConfigError(f"the server did not start; see why with `cotenant serve {' '.join(flags)}`")
        yield jsonlib.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()


def _lines(log: Path, start: int) -> list[bytes]:
    """Those that were begun and ended since the log had `start` bytes: the server is still at it."""
    with log.open("rb") as file:
        file.seek(max(start - 1, 0))
        begun = file.read().split(b"\n")
    return begun[min(start, 1) : -1]


def slowdowns(plan: Plan, problem: Problem, seen: Seen) -> dict[str, float]:
    """What batches took over what was profiled, by model and share; over its lanes where it has several of a share."""
    from cotenant.runtime.lanes import lane_id

    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            for placement in partition.placements:
                curve = problem.profiles[placement.model, device.kind].curve(partition.share, placement.procs)
                key = f"{placement.model} {show_share(partition.share)}"
                for rows, seconds in seen.batches.get((lane_id(device, slot), placement.model), {}).items():
                    sums[key][0] += sum(seconds)
                    sums[key][1] += curve[rows - 1] * len(seconds)
    return {key: taken / alone for key, (taken, alone) in sums.items() if alone > 0}


class Outside(msgspec.Struct, frozen=True):
    """Seconds that requests of a model spend outside of the dispatcher: on sockets, being read and written, and in the
    load generator. What callers saw over what its event log tells of the same requests, by mean and by quantile: the
    few that wait long for a processor are late at the p99 and not at the median."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


def outside_of(report: Report, seen: Seen) -> dict[str, Outside]:
    """By model, of those that had answers. Few requests tell no p99: there it is the mean."""
    found = {}
    for row in report.models:
        inside = seen.requests.get(row.model)
        if not inside or row.mean is None or row.p50 is None or row.p99 is None:
            continue
        mean = max(0.0, row.mean - statistics.fmean(inside))
        p50, p99 = np.quantile(inside, (0.5, 0.99)).tolist()
        last = max(0.0, row.p99 - p99) if len(inside) >= ENOUGH else mean
        found[row.model] = Outside(mean=mean, p50=max(0.0, row.p50 - p50), p99=last)
    return found


def _both(one: Mapping[str, Outside], other: Mapping[str, Outside]) -> dict[str, Outside]:
    """What lies between two of each model, or the one that there is."""

    def between(a: Outside, b: Outside) -> Outside:
        return Outside(mean=(a.mean + b.mean) / 2, p50=(a.p50 + b.p50) / 2, p99=(a.p99 + b.p99) / 2)

    return {**one, **other} | {model: between(one[model], other[model]) for model in one.keys() & other.keys()}


def _closer(problem: Problem, outside: Mapping[str, Outside]) -> Problem:
    """The problem with targets less by what requests spend outside."""
    models = tuple(
        msgspec.structs.replace(model, slo=max(model.slo - outside.get(model.name, Outside()).mean, 1e-6))
        for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def _farther(report: Report, outside: Mapping[str, Outside], names: Sequence[str]) -> Report:
    """The report of these models with latencies more by what requests spend outside, as their callers see them."""

    def later(row: ModelReport) -> ModelReport:
        more = outside.get(row.model, Outside())
        times = {"target": more.mean, "mean": more.mean, "p50": more.p50, "p99": more.p99, "p999": more.p99}
        changed = {name: time + extra for name, extra in times.items() if (time := getattr(row, name)) is not None}
        return msgspec.structs.replace(row, **changed)

    return msgspec.structs.replace(report, models=tuple(later(row) for row in report.models if row.model in names))


def _mean(seen: Seen, model: str) -> float:
    own = [
        one
        for (_, name), by_rows in seen.batches.items()
        if name == model
        for seconds in by_rows.values()
        for one in seconds
    ]
    return statistics.fmean(own) if own else 0.0


def result_view(result: Result) -> RenderableType:
    """A table for each load, and how far apart the two are at most."""
    parts: list[RenderableType] = []
    for it in result.loads:
        slowdowns = ", ".join(f"{name} {factor:.2f}" for name, factor in it.slowdowns.items())
        outside = show_seconds(max(it.outside.values(), default=0.0))
        seen = f"before and after, batches over profile: {slowdowns or '-'}; outside of the server up to {outside}"
        parts += [comparison_table(it), Text(verdict(it)), Text(seen, style="dim"), ""]
    return Group(*parts[:-1])


def comparison_table(it: Comparison) -> RenderableType:
    headings = (">requests", ">p50", ">Δ", ">p99", ">Δ", ">in time", ">Δ", ">batches Δ")
    rows = table(f"{it.load:g} x the planned rates: simulated, and live from that", "model", *headings)
    for simulated, live in _pairs(it):
        took = it.batches.get(simulated.model)
        rows.add_row(
            escape(simulated.model),
            f"{_count(simulated)}",
            _duration(simulated.p50),
            _apart(simulated.p50, live.p50),
            _duration(simulated.p99),
            _apart(simulated.p99, live.p99),
            "-" if simulated.attainment is None else f"{simulated.attainment * 100:.2f} %",
            _points(simulated, live),
            "-" if took is None else f"{(took - 1) * 100:+.0f} %",
        )
    return rows


def verdict(it: Comparison) -> str:
    """How far apart simulator and server are at most, of models that were asked often enough to tell."""
    told = []
    pairs = [(a, b) for a, b in _pairs(it) if min(_count(a), _count(b)) >= ENOUGH]
    for name, field in (("p50", "p50"), ("p99", "p99")):
        apart = {
            a.model: abs(getattr(b, field) / getattr(a, field) - 1)
            for a, b in pairs
            if getattr(a, field) and getattr(b, field)
        }
        if apart:
            worst = max(apart, key=lambda model: apart[model])
            told.append(f"{name} within {apart[worst] * 100:.0f} % ({worst})")
    points = {a.model: abs((b.attainment or 0.0) - (a.attainment or 0.0)) for a, b in pairs}
    if points:
        worst = max(points, key=lambda model: points[model])
        told.append(f"in time within {points[worst] * 100:.1f} points ({worst})")
    if not told:
        return f"no model had {ENOUGH} requests; run longer with --seconds"
    lag = it.live.lag or 0.0
    busy = f". Not to be trusted: the machine was busy, requests were sent up to {show_seconds(lag)} late"
    return ", ".join(told) + (busy if lag > BUSY else "")


def _pairs(it: Comparison) -> list[tuple[ModelReport, ModelReport]]:
    live = {row.model: row for row in it.live.models}
    return [(row, live[row.model]) for row in it.simulated.models if row.model in live]


def _count(row: ModelReport) -> int:
    return sum(row.ends.values())


def _duration(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def _apart(a: float | None, b: float | None) -> Text:
    if not a or b is None:
        return Text("-")
    return Text(f"{(b / a - 1) * 100:+.0f} %", style="green" if abs(b / a - 1) <= CLOSE else "red")


def _points(a: ModelReport, b: ModelReport) -> Text:
    if a.attainment is None or b.attainment is None:
        return Text("-")
    apart = b.attainment - a.attainment
    return Text(f"{apart * 100:+.1f} pt", style="green" if abs(apart) <= CLOSE else "red")
