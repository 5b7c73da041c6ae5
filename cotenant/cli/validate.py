"""`cotenant validate`: the same plan and the same arrivals through the live server and through the simulator.

The server is a process of its own, as when it serves. Before anything is compared it is warmed up under some load, and
what the simulator cannot know is taken from that: what batches take beside the neighbours that they really have, and
how much that varies, by the server's event log; and what a request spends outside of the server.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import re
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

Took = Mapping[tuple[str, str], Mapping[int, Sequence[float]]]  # seconds of batches, by lane and model, by rows

LOADS = (0.3, 0.6, 0.9, 1.2)
LIGHT = 0.1  # times the planned rates: what a request spends outside of the server is seen where nothing queues
WARM_UP = 0.6  # times the planned rates: what neighbours cost is seen where they work
ASIDE = 1000  # added to the seed of the warm-up: it is not to be what is compared
CLOSE = 0.05
ENOUGH = 200  # requests; with fewer, chance moves a p99 by more than that
BUSY = 0.01  # seconds by which requests are sent late where something else uses the machine
PATIENCE = 10.0


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
    from cotenant.runtime.lanes import lanes_of
    from cotenant.sim.observed import durations, observed
    from cotenant.sim.run import simulate
    from cotenant.workload import Workload

    async with interruptible(), served(flags) as (plan, http, metrics, log):
        models = [model for model in problem.models if plan.rate(model.name)]
        rng = np.random.default_rng(seed)
        bodies = {model.name: await asyncio.to_thread(body_for, http, model.name, rng) for model in models}

        async def live(load: float, seconds: float, seed: int) -> tuple[Report, Took]:
            since = time.monotonic()
            rates = {name: rate * load for name, rate in plan.rates().items()}
            report = await under_load(http, models, bodies, rates, seconds=seconds, seed=seed, quiet=True)
            return report, durations(entries(_written(log), str(log)), since, time.monotonic())

        aside.print(f"warming up at {LIGHT:g} and {WARM_UP:g} x the planned rates, {warm_up:g} s", highlight=False)
        before = await asyncio.to_thread(_answered, metrics)
        report, _ = await live(LIGHT, warm_up / 2, seed + ASIDE)
        outside = _outside(report, before, await asyncio.to_thread(_answered, metrics))
        report, took = await live(WARM_UP, warm_up / 2, seed + ASIDE)
        if (report.lag or 0.0) > BUSY:
            tell("the machine is busy:", f"requests leave up to {show_seconds(report.lag or 0.0)} late; compare later")
        batches = observed(lanes_of(plan, {model.name: model for model in problem.models}, problem.profiles), took)
        found = []
        for load in loads:
            aside.print(f"{load:g} x the planned rates, {seconds:g} s", highlight=False)
            report, took_now = await live(load, seconds, seed)
            workload = Workload.poisson({model.name: plan.rate(model.name) * load for model in models})
            simulated = simulate(
                _closer(problem, outside), plan, workload, seconds=seconds, seed=seed, observed=batches
            )
            simulated = _farther(simulated, outside, [model.name for model in models])
            means = {row.model: _mean(took_now, row.model) / row.observed for row in simulated.models if row.observed}
            found.append(Comparison(load=load, simulated=simulated, live=report, batches=means))
    return Result(slowdowns=slowdowns(plan, problem, took), outside=outside, loads=tuple(found))


@asynccontextmanager
async def served(flags: Sequence[str]) -> AsyncIterator[tuple[Plan, str, str, Path]]:
    """`cotenant serve` in a process of its own: its plan, the addresses of HTTP and metrics, and its event log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "events.jsonl")
        async with _process([*flags, "--log", str(log)]) as up:
            addresses = up["addresses"]
            yield Plan.from_json(jsonlib.dumps(up["plan"])), addresses["http"], addresses["metrics"], log


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


def _written(log: Path) -> list[bytes]:
    """The lines that are whole: the server is still at it."""
    return log.read_bytes().split(b"\n")[:-1]


def slowdowns(plan: Plan, problem: Problem, took: Took) -> dict[str, float]:
    """What batches took over what was profiled, by model and share; over its lanes where it has several of a share."""
    from cotenant.runtime.lanes import lane_id

    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            for placement in partition.placements:
                curve = problem.profiles[placement.model, device.kind].curve(partition.share, placement.procs)
                key = f"{placement.model} {show_share(partition.share)}"
                for rows, seconds in took.get((lane_id(device, slot), placement.model), {}).items():
                    sums[key][0] += sum(seconds)
                    sums[key][1] += curve[rows - 1] * len(seconds)
    return {key: taken / alone for key, (taken, alone) in sums.items() if alone > 0}


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


def _mean(took: Took, model: str) -> float:
    own = [
        one for (_, name), by_rows in took.items() if name == model for seconds in by_rows.values() for one in seconds
    ]
    return statistics.fmean(own) if own else 0.0


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
