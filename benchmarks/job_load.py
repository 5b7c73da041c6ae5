"""Send the load of `jobs`: without a pause, in turns whose requests are counted apart.

Run as a program: `python -m benchmarks.job_load ADDRESS`, with a `Load` as JSON on standard input. It prints a `Begun`,
and at the end a list of `ModelReport`s for each kind of turn.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import uvloop

from cotenant.cli.client import bodies_for, fetch_status
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.core.model import Model
from cotenant.live.load_generator import generate_load
from cotenant.measure.report import ModelReport
from cotenant.workload import Workload
from cotenant.workload.arrivals import Arrivals, generate_arrivals

SETTLING = "settling"  # requests that do not count


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals for some seconds. kind: what their requests are counted under; seed: of the arrivals."""

    kind: str
    seconds: float
    seed: int


class Load(msgspec.Struct, frozen=True):
    """Turns one after the other. rates: requests/s by model."""

    rates: dict[str, float]
    turns: tuple[Turn, ...]


class Begun(msgspec.Struct, frozen=True):
    """Say when the first turn began, by the monotonic clock that all processes share."""

    at: float


class Sender:
    """A process that sends a load. begun: see `Begun`."""

    def __init__(self, process: asyncio.subprocess.Process, begun: float) -> None:
        self._process = process
        self.begun = begun

    async def reports(self) -> dict[str, tuple[ModelReport, ...]]:
        """Wait for the end, and return the reports of models by kind of turn. Exits where the process fails."""
        assert self._process.stdout is not None
        output = await self._process.stdout.read()
        if await self._process.wait():
            sys.exit("the load generator failed")
        return msgspec.json.decode(output, type=dict[str, tuple[ModelReport, ...]])


@asynccontextmanager
async def sending(address: str, load: Load) -> AsyncIterator[Sender]:
    """Send a load within the block, from a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.job_load", address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(load))
        process.stdin.close()
        line = await process.stdout.readline()
        if not line:
            sys.exit("the load generator failed")
        yield Sender(process, msgspec.json.decode(line, type=Begun).at)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _arrivals(load: Load, kind: str) -> Arrivals:
    """Yield the arrivals of the turns of a kind."""
    begin = 0.0
    for turn in load.turns:
        if turn.kind == kind:
            for times, sources in generate_arrivals(Workload.poisson(load.rates), turn.seconds, turn.seed):
                yield times + begin, sources
        begin += turn.seconds


async def _send(address: str, load: Load) -> None:
    status = await asyncio.to_thread(fetch_status, address)
    models = [Model(name=name, slo=status.targets[name]) for name in load.rates]
    bodies = await bodies_for(address, models, load.turns[0].seed)
    tune_for_latency()
    kinds = sorted({turn.kind for turn in load.turns})
    seconds = sum(turn.seconds for turn in load.turns)
    _print(Begun(time.monotonic()))
    loads = (generate_load(address, models, bodies, _arrivals(load, kind), seconds) for kind in kinds)
    reports = await asyncio.gather(*loads)
    _print({kind: report.models for kind, report in zip(kinds, reports, strict=True)})


def _print(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(_send(sys.argv[1], msgspec.json.decode(sys.stdin.buffer.read(), type=Load)))
