"""What the benchmarks of a server that adapts share: one in this process, load from another, and what became of it.

Run as a program, this module is the load: `python -m benchmarks.adaptive ADDRESS`, with a list of `Segment`s as JSON on
standard input. It prints a line of cumulative counts a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from cotenant.app.backend import create_backend
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import running
from cotenant.app.running_server import RunningServer
from cotenant.app.startup import prepare_deployment, preparing
from cotenant.cli.client import bodies_for, fetch_status
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.config import ModelSettings, Settings, read_settings
from cotenant.core.model import Model
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem
from cotenant.planners.rates import at_rates
from cotenant.workload import Workload
from cotenant.workload.arrivals import Arrivals, generate_arrivals
from cotenant.zoo import ZOO, build_models

MODELS = ("digits", "lenet", "mobilenet_v2", "resnet18")
SHARE_OF_CAPACITY = 0.7
# Of the processors, kept for the server, as by default, and for the load generator, which is on the same machine.
SETTLING = 987  # the seed of the load meanwhile
RESERVE = read_settings().reserve + 0.1


class Segment(msgspec.Struct, frozen=True):
    """Poisson arrivals for some seconds. rates: requests/s by model, the same models in every segment."""

    seconds: float
    rates: dict[str, float]


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that have ended by `seconds` from the beginning: all whose caller stayed, those within their target,
    those that failed: answered by an error, or not at all, and those rejected on arrival. outcomes: by model, how they
    ended; "late" ones were served. lag: seconds, the 99th percentile of how late the load generator sent them.
    processor: seconds that it has used. models: their reports, at the end."""

    seconds: float
    stayed: int
    within_target: int
    failed: int
    rejected: int = 0
    outcomes: dict[str, dict[str, int]] = {}
    lag: float = 0.0
    processor: float = 0.0
    models: tuple[ModelReport, ...] = ()


class Served(msgspec.Struct, frozen=True):
    """A server, and the rates of 70 % of what its planner takes for its capacity. problem: with profiles as measured,
    whatever other programs took when the server started."""

    server: RunningServer
    rates: dict[str, float]
    problem: Problem

    @property
    def address(self) -> str:
        return self.server.addresses.http


def arguments(description: str | None, seconds: float, settle: float | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that these benchmarks share. seconds: the default duration. settle: the same of
    the load before anything is measured; None: there is none."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-repository", type=Path, default=Path("models"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--seed", type=int, default=0)
    if settle is not None:
        parser.add_argument("--settle", type=float, default=settle, help="seconds of load before anything is measured")
    parser.add_argument("--event-log", type=Path, help="write the server's event log here")
    parser.add_argument("--json", action="store_true")
    return parser


@asynccontextmanager
async def served(
    repository: Path,
    names: Sequence[str],
    *,
    adapt: bool,
    settle: float = 0.0,
    warm_workers: int = 1,
    event_log: Path | None = None,
    planned_for: Callable[[Problem], dict[str, float]] = lambda problem: problem.rates,
    lend: bool = True,
) -> AsyncIterator[Served]:
    """Serve example models at 70 % of capacity, of what the load generator leaves: measured, planned, and planned again
    for these rates. settle: seconds of load at these rates within which the server adapts to them. adapt: whether it
    still does afterwards. planned_for: returns the rates that the first plan is made for, from the problem at these.
    lend: see `Settings`."""
    build_models(repository, names)
    with tempfile.TemporaryDirectory() as folder:  # what an earlier run has learnt is not for this one
        most = msgspec.structs.replace(
            read_settings(),
            model_repository=repository,
            models=tuple(ModelSettings(name=name, slo=ZOO[name].slo, rate=ZOO[name].weight) for name in names),
            objective="rate",
            adapt=False,
            reserve=RESERVE,
            lend=lend,
            warm_workers=warm_workers,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            state=Path(folder) / "state.sqlite",
            event_log=event_log,
        )
        backend = create_backend(most)
        first = (await prepare_deployment(DeploymentBuilder(most, backend), names)).deployment
        capacity = first.plan.rates()
        rates = {name: rate * SHARE_OF_CAPACITY for name, rate in capacity.items()}
        settings = _at(most, planned_for(at_rates(first.problem, rates)), adapt=adapt or settle > 0)
        async with running(settings, backend, preparing(list(rates))) as server:
            tune_for_latency()
            if settle:
                await send(server.addresses.http, [Segment(settle, rates)], SETTLING)
            if settle and not adapt and server._server._adaptation is not None:
                await server._server._adaptation.stop()
            yield Served(server, rates, first.problem)


def _at(settings: Settings, rates: Mapping[str, float], *, adapt: bool) -> Settings:
    models = [
        msgspec.structs.replace(model, rate=rates[model.name]) for model in settings.models if model.name in rates
    ]
    return msgspec.structs.replace(settings, models=tuple(models), objective="devices", adapt=adapt)


async def send(address: str, segments: Sequence[Segment], seed: int) -> list[Tick]:
    """Send load from another process, and return what became of it, second by second."""
    return [tick async for tick in sending(address, segments, seed)]


async def sending(address: str, segments: Sequence[Segment], seed: int) -> AsyncIterator[Tick]:
    """Send load from another process; yield what has become of it so far about once a second, and at the end."""
    async for tick in ticks_of(("benchmarks.adaptive", address, str(seed)), msgspec.json.encode(segments)):
        yield tick


async def ticks_of(program: Sequence[str], given: bytes) -> AsyncIterator[Tick]:
    """Run a module that sends load, with its arguments and standard input; yield what it tells. Exits where it
    fails."""
    async for line in lines_of(program, given):
        yield msgspec.json.decode(line, type=Tick)


async def lines_of(program: Sequence[str], given: bytes) -> AsyncGenerator[bytes, None]:
    """Run a module that sends load; yield each line that it prints. Exits where it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *program), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(given)
        process.stdin.close()
        async for line in process.stdout:
            yield line
        if await process.wait():
            sys.exit("the load generator failed")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def attainment(ticks: Sequence[Tick], since: float, until: float, *, accepted: bool = False) -> float:
    """Return the fraction within the target of requests that ended between two moments; NaN where none did.
    accepted: of those that were not rejected on arrival."""
    before, after = _at_second(ticks, since), _at_second(ticks, until)
    stayed = after.stayed - before.stayed
    if accepted:
        stayed -= after.rejected - before.rejected
    return (after.within_target - before.within_target) / stayed if stayed else float("nan")


def _at_second(ticks: Sequence[Tick], seconds: float) -> Tick:
    return max((tick for tick in ticks if tick.seconds <= seconds), key=lambda tick: tick.seconds, default=NOTHING)


NOTHING = Tick(seconds=0.0, stayed=0, within_target=0, failed=0)


@contextlib.contextmanager
def foreign_programs(count: int, *, own_session: bool = False) -> Iterator[None]:
    """Keep so many processors busy within the block, by processes that are no children of this one: a server counts
    those as its own.

    own_session: each in a session of its own, as programs of other terminals and users are. Linux divides processors
    between sessions first, where it groups processes by them (``sched_autogroup_enabled``).
    """
    program = f'exec {"setsid " if own_session else ""}"$0" -c "while True: pass" >/dev/null'
    loops = [
        int(subprocess.check_output(["/bin/sh", "-c", f"({program}) & echo $!", sys.executable])) for _ in range(count)
    ]
    try:
        yield
    finally:
        for pid in loops:
            os.kill(pid, signal.SIGKILL)


def _arrivals(segments: Sequence[Segment], seed: int) -> Arrivals:
    begin = 0.0
    for number, segment in enumerate(segments):
        for times, sources in generate_arrivals(Workload.poisson(segment.rates), segment.seconds, seed + number):
            yield _later(times, begin), sources
        begin += segment.seconds


def _later(times: NDArray[np.float64], seconds: float) -> NDArray[np.float64]:
    return times + seconds


async def models_and_bodies(
    address: str, names: Sequence[str], seed: int
) -> tuple[list[Model], dict[str, RequestBody]]:
    """Return models of a server with their targets, and a request for each."""
    status = await asyncio.to_thread(fetch_status, address)
    models = [Model(name=name, slo=status.targets[name]) for name in names]
    return models, await bodies_for(address, models, seed)


async def generate(address: str, names: Sequence[str], arrivals: Arrivals, seconds: float, seed: int) -> None:
    """Send requests, and print what became of them as a `Tick` about once a second, and at the end."""
    models, bodies = await models_and_bodies(address, names, seed)
    begun, processor = time.monotonic(), time.process_time()

    def tell(report: Report, *, last: bool = False) -> None:
        rows = report.models
        tick = Tick(
            seconds=time.monotonic() - begun,
            stayed=sum(row.stayed for row in rows),
            within_target=sum(round((row.attainment or 0.0) * row.stayed) for row in rows),
            failed=sum(row.outcomes.get("failed", 0) for row in rows),
            rejected=sum(row.outcomes.get("rejected", 0) for row in rows),
            outcomes={row.model: _outcomes(row) for row in rows},
            lag=report.lag or 0.0,
            processor=time.process_time() - processor,
            models=tuple(rows) if last else (),
        )
        print(msgspec.json.encode(tick).decode(), flush=True)

    tune_for_latency()
    tell(await generate_load(address, models, bodies, arrivals, seconds, on_tick=tell), last=True)


def _outcomes(row: ModelReport) -> dict[str, int]:
    counts = {str(outcome): count for outcome, count in row.outcomes.items()}
    served = counts.pop("served", 0)
    within = round((row.attainment or 0.0) * row.stayed)
    return {"within_target": within, "late": served - within, **counts}


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Segment])
    number, whole = int(sys.argv[2]), sum(segment.seconds for segment in asked)
    uvloop.run(generate(sys.argv[1], list(asked[0].rates), _arrivals(asked, number), whole, number))
