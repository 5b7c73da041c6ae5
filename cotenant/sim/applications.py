"""Applications in the simulator: their fan-outs are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from cotenant.core.application import Application, Fanout
from cotenant.runtime.applications import Fanned
from cotenant.runtime.events import ApplicationSpec
from cotenant.workload.arrivals import streams

_BLOCK = 1024  # draws at a time


def drawn(applications: Iterable[Application], seed: int) -> Fanned:
    """Each stage draws from a stream of its own, when the application's request arrives: whatever the plan, the n-th
    request becomes the same."""
    stages = [(application, number) for application in applications for number in range(len(application.order))]
    rngs = streams(seed, (f"fan-out {it.name} {it.order[number].name}" for it, number in stages))
    counts = {
        (it.name, number): _counts(it.order[number].fanout, rng)
        for (it, number), rng in zip(stages, rngs.values(), strict=True)
    }

    def fanned(spec: ApplicationSpec, number: int, times: int) -> Sequence[int]:
        return list(islice(counts[spec.name, number], times))

    return fanned


def _counts(fanout: Fanout, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from fanout.draw(rng, _BLOCK).tolist()
