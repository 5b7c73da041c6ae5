"""Draw the service times of batches: latency, times noise, plus the server's own overhead."""

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

_BLOCK = 1024  # random draws at a time: one numpy call per batch would cost more than the dispatcher

_PROBABILITIES = (0.1, 0.5, 0.9, 0.99)  # of the quantiles in a profile

# A placement at run time: its lane and its model.
Key = tuple[LaneId, str]


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Quantify what the server adds to profiled latencies, as measured live.

    per_batch, per_request: seconds. bandwidth: bytes/s of the link over which requests reach a device. sizes: bytes of
    one row, by model; 0 if absent.
    """

    per_batch: float = 0.0
    per_request: float = 0.0
    bandwidth: float = math.inf
    sizes: Mapping[str, float] = {}

    def per_row(self, model: str) -> float:
        """Return the seconds that a row of a model takes on the link."""
        return self.sizes.get(model, 0.0) / self.bandwidth


class Noise(msgspec.Struct, frozen=True):
    """Describe the distribution of batch latency over its median.

    cv: standard deviation over median. quantiles: measured values at `probabilities`, between which the distribution is
    interpolated; without them it is lognormal.
    """

    cv: float = 0.0
    quantiles: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = _PROBABILITIES

    @classmethod
    def of(cls, features: Mapping[str, float], latency: float) -> Noise:
        """Build the distribution from the features of a profile point (``cv_pct``, ``p10_ms``, ``p90_ms``, ``p99_ms``)
        and its latency in seconds."""
        relative = [features.get(f"p{percent}_ms", math.nan) / (1e3 * latency) for percent in (10, 90, 99)]
        quantiles = () if any(map(math.isnan, relative)) else (relative[0], 1.0, *relative[1:])
        return cls(features.get("cv_pct", 0.0) / 100, quantiles)

    def draws(self, rng: np.random.Generator) -> Iterator[float]:
        """Draw factors on the median, without end."""
        if not self.cv:
            yield from itertools.repeat(1.0)
        # A lognormal of median 1 has a deviation of sqrt((v - 1) v) with v = exp(sigma^2).
        sigma = math.sqrt(math.log((1 + math.sqrt(1 + 4 * self.cv**2)) / 2))
        while True:
            if self.quantiles:
                yield from np.interp(rng.random(_BLOCK), self.probabilities, self.quantiles).tolist()
            else:
                yield from rng.lognormal(0.0, sigma, _BLOCK).tolist()


class BatchTimes(msgspec.Struct, frozen=True):
    """Hold true batch latencies. latencies: median seconds of 1, 2, … rows. noise: around the median."""

    latencies: tuple[float, ...]
    noise: Noise


class RecordedBatches(msgspec.Struct, frozen=True):
    """Batches of a recorded run, to replay under the same arrivals: slow where they were slow then.

    latencies: median seconds of 1, 2, … rows. starts: seconds, ascending. rows, factors: of the batches that started
    then; a factor is over the median.
    """

    latencies: tuple[float, ...]
    starts: tuple[float, ...]
    rows: tuple[int, ...]
    factors: tuple[float, ...]

    def takes(self, rows: int, now: float) -> float:
        """Return the seconds of a batch, scaled like the recorded batch before or after `now`: one with the same rows
        if there is one, then the nearer in time."""
        after = bisect.bisect(self.starts, now)
        near = range(max(after - 1, 0), min(after + 1, len(self.starts)))
        _, _, nearest = min([(self.rows[n] != rows, abs(self.starts[n] - now), n) for n in near])
        return self.latencies[rows - 1] * self.factors[nearest]


class Service:
    """Draw service times, each placement from its own random stream.

    batches: true latencies by lane and model; those that the lane predicts if absent.
    """

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
        self.slowdown = 1.0  # of every batch that starts now, by whatever no profile knows
        self._records: dict[Key, RecordedBatches] = {}
        self._placements: dict[Key, tuple[tuple[float, ...], tuple[float, ...], Iterator[float], float]] = {}
        self.open(lanes, batches or {})

    def open(self, lanes: Iterable[LaneSpec], batches: Mapping[Key, BatchTimes | RecordedBatches]) -> None:
        """Add lanes, or change their latencies from now on; the noise of known placements continues."""
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
        """Return the rows of a batch, its predicted seconds, and its true seconds."""
        predicted, latencies, noise, per_row = self._placements[run.lane, run.model]
        requests = run.requests
        rows = 0
        for request in requests:
            rows += request.size
        if self._records and (record := self._records.get((run.lane, run.model))) is not None:
            return rows, predicted[rows - 1], record.takes(rows, now)
        extra = self._per_batch + self._per_request * len(requests) + per_row * rows
        return rows, predicted[rows - 1], latencies[rows - 1] * self.slowdown * next(noise) + extra


def _stream(key: Key) -> str:
    """Return the name of a placement's random stream."""
    lane, model = key
    return f"service {lane} {model}"
