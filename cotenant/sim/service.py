"""How long a batch takes in the simulator: as its lane predicts, times noise, plus what the server itself costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from cotenant.runtime.events import LaneSpec, Run
from cotenant.workload.arrivals import streams

_BLOCK = 1024  # draws at a time: a call of numpy for each batch would cost more than the dispatcher

# A placement at run time: its lane and its model.
Key = tuple[str, str]


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


class Service:
    """Callable: a `Run` → (rows, seconds that its lane predicts, seconds until it is `Finished`).

    cv: coefficient of variation of a batch's duration, by lane and model; 0 where absent. The noise is lognormal, from
    a stream for each lane and model; its median is 1, as profiles hold medians.
    slower: what a batch really takes over what its lane predicts, noise apart, where that is not 1.
    """

    def __init__(
        self,
        lanes: Iterable[LaneSpec] = (),
        seed: int = 0,
        cv: Mapping[Key, float] | None = None,
        overhead: Overhead | None = None,
    ) -> None:
        self._seed = seed
        self._overhead = overhead or Overhead()
        self._placements: dict[Key, tuple[tuple[float, ...], float, Iterator[float], float]] = {}
        self.open(lanes, cv or {}, {})

    def open(self, lanes: Iterable[LaneSpec], cv: Mapping[Key, float], slower: Mapping[Key, float]) -> None:
        """There are these lanes, too, or they have other latencies from now on; noise goes on where it was."""
        latencies = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
        rngs = streams(self._seed, [f"service {lane} {model}" for lane, model in latencies])
        for (key, curve), rng in zip(latencies.items(), rngs.values(), strict=True):
            noise = self._placements[key][2] if key in self._placements else _noise(cv.get(key, 0.0), rng)
            self._placements[key] = (curve, slower.get(key, 1.0), noise, self._overhead.per_row(key[1]))

    def __call__(self, run: Run) -> tuple[int, float, float]:
        latencies, slower, noise, per_row = self._placements[run.lane, run.model]
        requests = run.requests
        rows = sum([request.size for request in requests])
        predicted = latencies[rows - 1]
        overhead = self._overhead
        extra = overhead.per_batch + overhead.per_request * len(requests) + per_row * rows
        return rows, predicted, predicted * slower * next(noise) + extra


def _noise(cv: float, rng: np.random.Generator) -> Iterator[float]:
    if cv == 0:
        return itertools.repeat(1.0)
    # A lognormal of median 1 has a deviation of sqrt((v - 1) v) with v = exp(sigma^2).
    v = (1 + math.sqrt(1 + 4 * cv * cv)) / 2
    return _draws(rng, math.sqrt(math.log(v)))


def _draws(rng: np.random.Generator, sigma: float) -> Iterator[float]:
    while True:
        yield from rng.lognormal(0.0, sigma, _BLOCK).tolist()
