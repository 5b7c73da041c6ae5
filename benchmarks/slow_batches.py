"""What does a lane still serve in time when its batches take longer than planned?

`python -m benchmarks.slow_batches [--seconds S] [--seeds N] [--json]`

Lanes of three or four models of unequal length, in virtual time, by the dispatcher and the admission of the server.
`step` is the plan of `benchmarks.step`; `three` and `tight` are more than a lane can carry by a few per cent, so that
their rates are near what it serves at all. Batches vary by 15 %. For each slowdown of all batches: the percentage of
requests within their target, rejected on arrival, and admitted but late or expired.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import msgspec

from benchmarks.harness import show_result
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Model
from cotenant.runtime.events import LaneModel, LaneSpec
from cotenant.sim.run import simulate_lanes
from cotenant.sim.service import BatchTimes, Noise, Service
from cotenant.workload import Workload

SLOWDOWNS = (0.8, 1.0, 1.2, 1.4, 1.6, 2.0, 3.0)
VARIATION = 0.15
LANE = LaneId(DeviceId("cpu"), 0)


class Served(NamedTuple):
    """A model: milliseconds of a batch of one row and of the largest, rows of that, target in seconds, requests/s."""

    first: float
    full: float
    batch: int
    target: float
    rate: float

    @property
    def latencies(self) -> tuple[float, ...]:
        step = (self.full - self.first) / max(self.batch - 1, 1)
        return tuple((self.first + step * row) / 1e3 for row in range(self.batch))


LANES = {
    "step": {
        "digits": Served(0.3, 0.42, 16, 0.05, 245.0),
        "lenet": Served(0.44, 0.89, 16, 0.05, 123.0),
        "mobilenet_v2": Served(7.6, 16.2, 3, 0.25, 49.6),
        "resnet18": Served(24.7, 24.7, 1, 0.8, 12.4),
    },
    "three": {
        "short": Served(5.0, 12.0, 8, 0.04, 200.0),
        "middle": Served(5.0, 12.0, 8, 0.08, 200.0),
        "long": Served(20.0, 30.0, 2, 0.4, 20.0),
    },
    "tight": {
        "short": Served(2.0, 4.0, 4, 0.03, 300.0),
        "middle": Served(10.0, 14.0, 4, 0.08, 80.0),
        "long": Served(15.0, 15.0, 1, 0.1, 12.0),
    },
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Percentages of all requests."""

    lane: str
    slowdown: float
    in_time: float
    rejected: float
    late: float


def measure(name: str, slowdown: float, seconds: float, seeds: int) -> Row:
    served = LANES[name]
    lane = LaneSpec(
        id=LANE, models=tuple(LaneModel(model=model, latencies=it.latencies) for model, it in served.items())
    )
    models = [Model(name=model, slo=it.target) for model, it in served.items()]
    batches = {(LANE, model): BatchTimes(it.latencies, Noise(VARIATION)) for model, it in served.items()}
    everything = in_time = rejected = 0.0
    for seed in range(seeds):
        service = Service([lane], seed, batches)
        service.slowdown = slowdown
        workload = Workload.poisson({model: it.rate for model, it in served.items()})
        for row in simulate_lanes([lane], models, workload, service, seconds=seconds, seed=seed).models:
            everything += row.stayed
            in_time += (row.attainment or 0.0) * row.stayed
            rejected += row.outcomes.get("rejected", 0)
    late = everything - in_time - rejected
    return Row(
        lane=name,
        slowdown=slowdown,
        in_time=100 * in_time / everything,
        rejected=100 * rejected / everything,
        late=100 * late / everything,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, slowdown, args.seconds, args.seeds) for name in LANES for slowdown in SLOWDOWNS]
    lines = [
        f"{row.lane:5} batches x {row.slowdown}: {row.in_time:6.2f} % in time, {row.rejected:5.2f} rejected, "
        f"{row.late:5.2f} late"
        for row in rows
    ]
    show_result(rows, "\n".join(lines))


if __name__ == "__main__":
    main()
