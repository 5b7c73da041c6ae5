"""How long a batch takes in the simulator: as its lane predicts, times noise, plus what the server itself costs."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from cotenant.core.identity import LaneId
from cotenant.runtime.events import LaneSpec, Run
from cotenant.workload.arrivals import random_streams

_BLOCK = 1024  # draws at a time: a call of numpy for each batch would cost more than the dispatcher

_PARTS = (0.1, 0.5, 0.9, 0.99)  # of a profile

# A placement at run time: its lane and its model.
Key = tuple[LaneId, str]


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the server adds to what was profiled, as measured live.

    per_batch, per_request: seconds. bandwidth: bytes/s of the link that requests come to a device by; sizes: bytes of
    one row, by model, 0 where absent.
    """

    per_batch: float = 0.0
    per_request: float = 0.0
    bandwidth: float = math.inf
    sizes: Mapping[str, float] = {}

    def per_row(self, model: str) -> float:
        """Seconds that a row of a model takes on the link."""
        return self.sizes.get(model, 0.0) / self.bandwidth


class Noise(msgspec.Struct, frozen=True):
    """How much batches vary, around a median of 1, since profiles hold medians.

    cv: standard deviation over median. levels: what these `parts` of all do not exceed, where that was measured; the
    distribution then goes through these. Else it is lognormal.
    """

    cv: float = 0.0
    levels: tuple[float, ...] = ()
    parts: tuple[float, ...] = _PARTS

    @classmethod
    def of(cls, features: Mapping[str, float], latency: float) -> Noise:
        """From the features of a profile's point (``cv_pct``, ``p10_ms``, ``p90_ms``, ``p99_ms``), and its latency in
        seconds."""
        known = [features.get(f"p{percent}_ms", math.nan) / (1e3 * latency) for percent in (10, 90, 99)]
        levels = () if any(map(math.isnan, known)) else (known[0], 1.0, *known[1:])
        return cls(features.get("cv_pct", 0.0) / 100, levels)

    def draws(self, rng: np.random.Generator) -> Iterator[float]:
        if not self.cv:
            yield from itertools.repeat(1.0)
        # A lognormal of median 1 has a deviation of sqrt((v - 1) v) with v = exp(sigma^2).
        sigma = math.sqrt(math.log((1 + math.sqrt(1 + 4 * self.cv**2)) / 2))
        while True:
            if self.levels:
                yield from np.interp(rng.random(_BLOCK), self.parts, self.levels).tolist()
            else:
                yield from rng.lognormal(0.0, sigma, _BLOCK).tolist()


class BatchTimes(msgspec.Struct, frozen=True):
    """What batches really take. latencies: seconds of 1, 2, … rows, the median of each; noise: around that."""

    latencies: tuple[float, ...]
    noise: Noise


class RecordedBatches(msgspec.Struct, frozen=True):
    """Batches as they ran once, to run again with the same arrivals: slow ones where they were slow then.

    latencies: seconds of 1, 2, … rows, the median of each. starts: seconds, ascending; rows and factors (over their
    latency) of the batches that started then.
    """

    latencies: tuple[float, ...]
    starts: tuple[float, ...]
    rows: tuple[int, ...]
    factors: tuple[float, ...]

    def takes(self, rows: int, now: float) -> float:
        """As long as the nearer in time of the batches before and after, rather of one with as many rows."""
        after = bisect.bisect(self.starts, now)
        near = range(max(after - 1, 0), min(after + 1, len(self.starts)))
        _, _, nearest = min([(self.rows[n] != rows, abs(self.starts[n] - now), n) for n in near])
        return self.latencies[rows - 1] * self.factors[nearest]


class Service:
    """batches: what they take, by lane and model; what the lane predicts where absent. Each has random numbers of its
    own."""

    def __init__(
        self,
        lanes: Iterable[LaneSpec] = (),
        seed: int = 0,
        batches: Mapping[Key, BatchTimes | RecordedBatches] | None = None,
        overhead: Overhead | None = None,
    ) -> None:
        self._seed = seed
        self._overhead = overhead or Overhead()
        self._per_batch = self._overhead.per_batch
        self._per_request = self._overhead.per_request
        self._records: dict[Key, RecordedBatches] = {}
        self._placements: dict[Key, tuple[tuple[float, ...], tuple[float, ...], Iterator[float], float]] = {}
        self.open(lanes, batches or {})

    def open(self, lanes: Iterable[LaneSpec], batches: Mapping[Key, BatchTimes | RecordedBatches]) -> None:
        """There are these lanes, too, or they have other latencies from now on; noise goes on where it was."""
        predicted = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
        rngs = random_streams(self._seed, map(_stream, predicted))
        for key, curve in predicted.items():
            own = batches.get(key, BatchTimes(curve, Noise()))
            if isinstance(own, RecordedBatches):
                self._records[key] = own
                own = BatchTimes(own.latencies, Noise())
            draws = self._placements[key][2] if key in self._placements else own.noise.draws(rngs[_stream(key)])
            self._placements[key] = (curve, own.latencies, draws, self._overhead.per_row(key[1]))

    def takes(self, run: Run, now: float) -> tuple[int, float, float]:
        """Rows, seconds that the lane predicts, seconds until it is `Finished`."""
        predicted, latencies, noise, per_row = self._placements[run.lane, run.model]
        requests = run.requests
        rows = 0
        for request in requests:
            rows += request.size
        if self._records and (record := self._records.get((run.lane, run.model))) is not None:
            return rows, predicted[rows - 1], record.takes(rows, now)
        extra = self._per_batch + self._per_request * len(requests) + per_row * rows
        return rows, predicted[rows - 1], latencies[rows - 1] * next(noise) + extra


def _stream(key: Key) -> str:
    """What a placement's noise is drawn by."""
    lane, model = key
    return f"service {lane} {model}"
