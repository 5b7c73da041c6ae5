"""How long a batch takes in the simulator: as its lane predicts, times noise, plus what the server itself costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from cotenant.runtime.events import LaneSpec, Run
from cotenant.workload.arrivals import streams

_BLOCK = 1024  # draws at a time: a call of numpy for each batch would cost more than the dispatcher


class Service:
    """Callable: a `Run` → (rows, seconds that its lane predicts, seconds until it is `Finished`).

    cv: coefficient of variation of a batch's duration, by lane and model; 0 where absent. The noise is lognormal with
    mean 1, from a stream for each lane and model. per_batch, per_request: seconds that the server adds, measured live.
    """

    def __init__(
        self,
        lanes: Iterable[LaneSpec],
        seed: int = 0,
        cv: Mapping[tuple[str, str], float] | None = None,
        *,
        per_batch: float = 0.0,
        per_request: float = 0.0,
    ) -> None:
        cv = cv or {}
        latencies = {(lane.id, model.model): model.latencies for lane in lanes for model in lane.models}
        rngs = streams(seed, (f"service {lane} {model}" for lane, model in latencies))
        self._placements = {
            key: (latencies[key], _noise(cv.get(key, 0.0), rng))
            for key, rng in zip(latencies, rngs.values(), strict=True)
        }
        self._per_batch = per_batch
        self._per_request = per_request

    def __call__(self, run: Run) -> tuple[int, float, float]:
        latencies, noise = self._placements[run.lane, run.model]
        rows = sum([request.size for request in run.requests])
        predicted = latencies[rows - 1]
        took = predicted * next(noise) + self._per_batch + self._per_request * len(run.requests)
        return rows, predicted, took


def _noise(cv: float, rng: np.random.Generator) -> Iterator[float]:
    if cv == 0:
        return itertools.repeat(1.0)
    variance = math.log1p(cv * cv)
    return _draws(rng, -variance / 2, math.sqrt(variance))


def _draws(rng: np.random.Generator, mu: float, sigma: float) -> Iterator[float]:
    while True:
        yield from rng.lognormal(mu, sigma, _BLOCK).tolist()
