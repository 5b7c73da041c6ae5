"""Send the load of `jobs`: without a pause, in turns whose requests are counted apart.

Run as a program: `python -m benchmarks.job_load ADDRESS`, with a `Load` as JSON on standard input. It prints a `Begun`,
and at the end `Reports`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator

import msgspec
import uvloop

from benchmarks.adaptive import lines_of, models_and_bodies
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.live.load_generator import generate_load
from cotenant.measure.report import ModelReport
from cotenant.workload import Workload
from cotenant.workload.arrivals import Arrivals, generate_arrivals

Reports = dict[str, tuple[ModelReport, ...]]  # of models, by kind of turn

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


def sending(address: str, load: Load) -> AsyncGenerator[bytes, None]:
    """Send a load from a process of its own, until the generator is closed; yield the two lines that it prints."""
    return lines_of(("benchmarks.job_load", address), msgspec.json.encode(load))


def _arrivals(load: Load, kind: str) -> Arrivals:
    """Yield the arrivals of the turns of a kind."""
    begin = 0.0
    for turn in load.turns:
        if turn.kind == kind:
            for times, sources in generate_arrivals(Workload.poisson(load.rates), turn.seconds, turn.seed):
                yield times + begin, sources
        begin += turn.seconds


async def _send(address: str, load: Load) -> None:
    models, bodies = await models_and_bodies(address, list(load.rates), load.turns[0].seed)
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
