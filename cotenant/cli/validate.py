"""`cotenant validate`: the same plan and the same arrivals through the live server and through the simulator.

The server is a process of its own, as when it serves. Before anything is compared it is warmed up under some load, and
what the simulator cannot know is taken from that: how much neighbours really slow batches on this machine, where a plan
only has a margin for it, and what a request spends outside of the server.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

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
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError
from cotenant.measure.report import ModelReport, Report
from cotenant.measure.table import table
from cotenant.predictors import Load

if TYPE_CHECKING:
    from cotenant.planners import Problem

LOADS = (0.3, 0.6, 0.9, 1.2)
LIGHT = 0.1  # times the planned rates: what a request spends outside of the server is seen where nothing queues
WARM_UP = 0.6  # times the planned rates: what neighbours cost is seen where they work
ASIDE = 1000  # added to the seed of the warm-up: it is not to be what is compared
CLOSE = 0.05
ENOUGH = 200  # requests; with fewer, chance moves a p99 by more than that
BUSY = 0.01  # seconds by which requests are sent late where something else uses the machine
PATIENCE = 10.0


class Lanes(msgspec.Struct, frozen=True):
    """Interference as it was observed: by model and share (‰), latency beside these neighbours over that profiled."""

    factors: dict[tuple[str, int], float]

    def slowdown(self, victim: Load, neighbours: Sequence[Load]) -> float:
        return self.factors.get((victim.model, victim.share), 1.0)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One load. batches: how long batches took live over how long they took simulated, by model."""

    load: float
    simulated: Report
    live: Report
    batches: dict[str, float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """slowdowns: observed, by model and share in percent. outside: seconds that a request spends outside the server."""

    slowdowns: dict[str, float]
    outside: dict[str, float]
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
    warm_up: Annotated[float, typer.Option("--warm-up", min=1.0, help="Seconds under load before that.")] = 20.0,
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
        show_json(msgspec.json.format(msgspec.json.encode(result), indent=2))
    else:
        console.print(result_view(result))


async def compared(
    problem: Problem, flags: Sequence[str], loads: Sequence[float], seconds: float, warm_up: float, seed: int
) -> Result:
    """flags: of `cotenant serve`, whose plan must be for this problem."""
    from cotenant.cli.client import body_for, under_load
    from cotenant.sim.run import simulate
    from cotenant.workload import Workload

    async with interruptible(), served(flags) as (plan, http, metrics):
        models = [model for model in problem.models if plan.rate(model.name)]
        rng = np.random.default_rng(seed)
        bodies = {model.name: await asyncio.to_thread(body_for, http, model.name, rng) for model in models}

        async def live(load: float, seconds: float, seed: int) -> tuple[Report, dict[tuple[str, str], Batches]]:
            before = await asyncio.to_thread(_batches, metrics)
            rates = {name: rate * load for name, rate in plan.rates().items()}
            report = await under_load(http, models, bodies, rates, seconds=seconds, seed=seed, quiet=True)
            after = await asyncio.to_thread(_batches, metrics)
            return report, {key: after[key] - before.get(key, Batches()) for key in after}

        aside.print(f"warming up at {LIGHT:g} and {WARM_UP:g} x the planned rates, {warm_up:g} s", highlight=False)
        before = await asyncio.to_thread(_answered, metrics)
        report, _ = await live(LIGHT, warm_up / 2, seed + ASIDE)
        outside = _outside(report, before, await asyncio.to_thread(_answered, metrics))
        report, batches = await live(WARM_UP, warm_up / 2, seed + ASIDE)
        if (report.lag or 0.0) > BUSY:
            tell("the machine is busy:", f"requests leave up to {show_seconds(report.lag or 0.0)} late; compare later")
        factors = slowdowns(plan, problem, batches)
        world = msgspec.structs.replace(problem, interference=Lanes(factors))
        found = []
        for load in loads:
            aside.print(f"{load:g} x the planned rates, {seconds:g} s", highlight=False)
            report, batches = await live(load, seconds, seed)
            workload = Workload.poisson({model.name: plan.rate(model.name) * load for model in models})
            simulated = simulate(_closer(world, outside), plan, workload, seconds=seconds, seed=seed)
            simulated = _farther(simulated, outside, [model.name for model in models])
            took = {row.model: _mean(batches, row.model) / row.observed for row in simulated.models if row.observed}
            found.append(Comparison(load=load, simulated=simulated, live=report, batches=took))
    shown = {f"{model} {share / 10:g} %": factor for (model, share), factor in factors.items()}
    return Result(slowdowns=shown, outside=outside, loads=tuple(found))


@asynccontextmanager
async def served(flags: Sequence[str]) -> AsyncIterator[tuple[Plan, str, str]]:
    """`cotenant serve` in a process of its own: its plan, and the addresses of HTTP and metrics."""
    command = [sys.executable, "-m", "cotenant", "serve", *flags, "--port", "0", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 26)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise ConfigError(f"the server did not start; see why with `cotenant serve {' '.join(flags)}`")
        up = jsonlib.loads(line)
        yield Plan.from_json(jsonlib.dumps(up["plan"])), up["addresses"]["http"], up["addresses"]["metrics"]
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()


class Batches(msgspec.Struct, frozen=True):
    """How many ran, and how long they were to take and took together, in seconds."""

    count: float = 0.0
    predicted: float = 0.0
    observed: float = 0.0

    def __sub__(self, other: Batches) -> Batches:
        return Batches(self.count - other.count, self.predicted - other.predicted, self.observed - other.observed)


_SAMPLE = re.compile(
    r'^cotenant_batch_(predicted|observed)_seconds_(sum|count)\{lane="([^"]*)",model="([^"]*)"\} (\S+)$'
)


def _batches(address: str) -> dict[tuple[str, str], Batches]:
    """By lane and model, since the server started."""
    from cotenant.cli.client import fetch

    sums: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in fetch(address, "/metrics").decode().splitlines():
        if match := _SAMPLE.match(line):
            name, part, lane, model, value = match.groups()
            sums[lane, model]["count" if part == "count" else name] = float(value)
    return {key: msgspec.convert(own, Batches) for key, own in sums.items()}


def slowdowns(plan: Plan, problem: Problem, batches: Mapping[tuple[str, str], Batches]) -> dict[tuple[str, int], float]:
    """What batches took over what was profiled, by model and share; over its lanes where it has several of a share.

    Profiles hold medians, and the simulator lets batches vary around them: the mean of that is no slowdown.
    """
    from cotenant.runtime.lanes import lane_id
    from cotenant.sim.service import Noise

    took: defaultdict[tuple[str, int], float] = defaultdict(float)
    alone: defaultdict[tuple[str, int], float] = defaultdict(float)
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            for placement in partition.placements:
                own = batches.get((lane_id(device, slot), placement.model))
                profile = problem.profile(placement.model, device.kind)
                if own is None or profile is None or not own.predicted:
                    continue
                planned = placement.latency / profile.latency(placement.batch, partition.share, placement.procs)
                took[placement.model, partition.share] += own.observed
                usual = Noise.at(profile, placement.batch, partition.share).mean
                alone[placement.model, partition.share] += own.predicted / planned * usual
    return {key: took[key] / alone[key] for key in took if alone[key] > 0}


_ANSWERED = re.compile(r'^nv_inference_request_(duration_us|success)\{model="([^"]*)"[^}]*\} (\S+)$', re.MULTILINE)


def _answered(address: str) -> dict[str, dict[str, float]]:
    """By model since the server started: µs from arrival to answer, and how many were answered."""
    from cotenant.cli.client import fetch

    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, model, value in _ANSWERED.findall(fetch(address, "/metrics").decode()):
        found[model][name] = float(value)
    return found


def _outside(
    report: Report, before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """By model, seconds that a request spends outside of the server, between sockets and in the load generator: what
    callers saw on average over what the server did."""
    outside = {}
    for row in report.models:
        was, now = before.get(row.model, {}), after.get(row.model, {})
        count = now.get("success", 0.0) - was.get("success", 0.0)
        if count and row.mean is not None:
            spent = (now["duration_us"] - was.get("duration_us", 0.0)) / 1e6
            outside[row.model] = max(0.0, row.mean - spent / count)
    return outside


def _closer(problem: Problem, outside: Mapping[str, float]) -> Problem:
    """The problem with targets less by what requests spend outside."""
    models = tuple(
        msgspec.structs.replace(model, slo=max(model.slo - outside.get(model.name, 0.0), 1e-6))
        for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def _farther(report: Report, outside: Mapping[str, float], names: Sequence[str]) -> Report:
    """The report of these models with latencies more by what requests spend outside, as their callers see them."""

    def seen(row: ModelReport) -> ModelReport:
        more = outside.get(row.model, 0.0)
        times = {name: getattr(row, name) for name in ("target", "mean", "p50", "p99", "p999")}
        later = {name: None if time is None else time + more for name, time in times.items()}
        return msgspec.structs.replace(row, **later)

    return msgspec.structs.replace(report, models=tuple(seen(row) for row in report.models if row.model in names))


def _mean(batches: Mapping[tuple[str, str], Batches], model: str) -> float:
    own = [it for (_, name), it in batches.items() if name == model]
    count = sum(it.count for it in own)
    return sum(it.observed for it in own) / count if count else 0.0


def result_view(result: Result) -> RenderableType:
    """A table for each load, and how far apart the two are at most."""
    parts: list[RenderableType] = []
    for it in result.loads:
        parts += [comparison_table(it), Text(verdict(it)), ""]
    slowdowns = ", ".join(f"{name} {factor:.2f}" for name, factor in result.slowdowns.items())
    outside = max(result.outside.values(), default=0.0)
    parts.append(Text(f"observed while warming up: batches over profile {slowdowns or '-'}"))
    parts.append(Text(f"outside of the server a request spends up to {show_seconds(outside)}"))
    return Group(*parts)


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
