"""Measure simulated requests per CPU-second with the production dispatcher: eight models on four lanes, 80 % load.

    python -m benchmarks.simulator [--fleet SECONDS] [--overload]

Best of three runs, since other work on the machine can only slow them down. With `--fleet SECONDS`, also 64 devices of
two partitions, each with two of twenty models, 20,000 requests/s, for a quarter of the seconds and for all of them:
speed and peak memory of the process. With `--overload`, goodput of a lane of two models, one with ten times the rate of
the other, at up to three times its capacity.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Mapping, Sequence

from benchmarks.harness import show
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Model
from cotenant.measure.report import Report
from cotenant.runtime.dispatcher import COMPILED
from cotenant.runtime.events import LaneModel, LaneSpec
from cotenant.sim.run import simulate_lanes
from cotenant.sim.service import BatchTimes, Noise, Service
from cotenant.workload import Workload

SECONDS = 60.0
RATES = {"a": 400.0, "b": 240.0, "c": 400.0, "d": 240.0, "e": 400.0, "f": 240.0, "g": 400.0, "h": 240.0}
PAIRS = ("ab", "cd", "ef", "gh")
LATENCIES = tuple(0.004 + 0.001 * rows for rows in range(1, 17))

SHARED = {"a": 650.0, "b": 65.0}  # about the capacity of one of the four lanes
TIMES = (0.9, 1.0, 1.2, 1.5, 2.0, 3.0)

MODELS = [f"m{number}" for number in range(20)]
FLEET = dict.fromkeys(MODELS, 1000.0)
LANES = 128
SLOWER = 4.0  # than LATENCIES: lanes are busy for 78 % of their time when all batches are full


def lanes(placed: Sequence[Sequence[str]], slower: float = 1.0) -> tuple[LaneSpec, ...]:
    """Return a lane for each group of models."""
    latencies = tuple(seconds * slower for seconds in LATENCIES)
    return tuple(
        LaneSpec(
            id=LaneId(DeviceId("gpu", number // 2), number % 2),
            models=tuple(LaneModel(model=name, latencies=latencies) for name in names),
        )
        for number, names in enumerate(placed)
    )


def once(specs: tuple[LaneSpec, ...], rates: Mapping[str, float], slo: float, seconds: float) -> tuple[float, Report]:
    """Simulate; return CPU seconds of this thread (BLAS has idle threads that spin), and the report."""
    models = [Model(name=name, slo=slo) for name in rates]
    varied = {
        (spec.id, model.model): BatchTimes(model.latencies, Noise(0.05)) for spec in specs for model in spec.models
    }
    service = Service(specs, 0, varied)
    start = time.thread_time()
    report = simulate_lanes(specs, models, Workload.poisson(rates), service, seconds=seconds)
    return time.thread_time() - start, report


def figures(spent: float, report: Report) -> tuple[str, dict[str, float]]:
    """Return a result as text and as numbers."""
    ended = sum(sum(row.outcomes.values()) for row in report.models)
    served = sum(row.outcomes["served"] for row in report.models)
    batches = sum(row.outcomes["served"] / row.batch for row in report.models if row.batch)
    text = f"{ended / spent:,.0f} requests/s ({ended:,} requests, {served / batches:.1f} a batch"
    return f"{text}, {served / ended:.1%} served)", {
        "rate": ended / spent,
        "rows": served / batches,
        "served": served / ended,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--overload", action="store_true")
    given = parser.parse_args()
    spent, report = min((once(lanes(PAIRS), RATES, 0.1, SECONDS) for _ in range(3)), key=lambda result: result[0])
    text, measured = figures(spent, report)
    text = f"{'compiled' if COMPILED else 'pure Python'}, per CPU-second: {text}"
    if given.fleet:
        placed = [(MODELS[number % 20], MODELS[(number + 7) % 20]) for number in range(LANES)]
        for part in (0.25, 1.0):
            spent, report = once(lanes(placed, SLOWER), FLEET, 0.4, part * given.fleet)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            line, fleet = figures(spent, report)
            text += f"; a fleet for {part * given.fleet:,.0f} s: {line}, peak memory {peak:.1f} MiB"
            measured |= {f"fleet_{name}": value for name, value in fleet.items()} | {f"peak_mib_{part:g}": peak}
    if given.overload:
        for times in TIMES:
            rates = {name: rate * times for name, rate in SHARED.items()}
            _, report = once(lanes(PAIRS[:1]), rates, 0.1, SECONDS)
            goodput = sum(row.outcomes["served"] for row in report.models) / SECONDS
            expired = sum(row.outcomes["expired"] for row in report.models) / SECONDS
            text += f"; at {times:g} times the capacity, goodput {goodput:,.0f}/s, expired {expired:,.0f}/s"
            measured[f"overload_{times:g}"] = goodput
    show("simulator", text, **measured)


if __name__ == "__main__":
    main()
