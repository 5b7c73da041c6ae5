"""When requests arrive: endless streams, in chunks of numpy arrays, so that a long run takes no more memory.

Each name draws from a stream of its own (`random_streams`): to change one source, or to add one, leaves the
arrivals of all others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cotenant.errors import ConfigError

if TYPE_CHECKING:
    from cotenant.workload import Workload

Floats = NDArray[np.float64]
# Ascending times in seconds from the start, a chunk at a time. May end.
Times = Iterator[Floats]
# Chunks of (times, which source each came from), in the order of time.
Arrivals = Iterator[tuple[Floats, NDArray[np.intp]]]

CHUNK = 4096


def random_streams(seed: int, names: Iterable[str]) -> dict[str, np.random.Generator]:
    """One generator for each name, from one root seed. What a name draws depends on the seed and that name alone."""
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative; take 0 or more")
    return {name: np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))) for name in names}


def generate_arrivals(workload: Workload, seconds: float, seed: int) -> Arrivals:
    """What each name of the workload is asked for before `seconds`; sources count as they stand in it.

    The same seed gives the same arrivals to the simulator and to a live server.
    """
    rngs = random_streams(seed, workload.sources)
    return merge_arrivals([source.times(rngs[name]) for name, source in workload.sources.items()], seconds)


def merge_arrivals(sources: Sequence[Times], seconds: float) -> Arrivals:
    """All arrivals before `seconds`, in the order of time."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{seconds:g} s is no time to run for; take more than 0")
    held = [np.empty(0) for _ in sources]
    running = set(range(len(sources)))
    start = 0.0
    while start < seconds:
        for index in sorted(running):
            while not held[index].size and index in running:
                chunk = next(sources[index], None)
                if chunk is None:
                    running.discard(index)
                else:
                    held[index] = chunk
        # Beyond the last time that is known of some source, it may still have earlier arrivals than the others.
        known = min((float(held[index][-1]) for index in running), default=math.inf)
        counts = [int(np.searchsorted(times, known, side="right")) for times in held]
        times = np.concatenate([times[:count] for times, count in zip(held, counts, strict=True)] or [np.empty(0)])
        held = [times[count:] for times, count in zip(held, counts, strict=True)]
        order = np.argsort(times, kind="stable")
        order = order[: np.searchsorted(times, seconds, sorter=order)]
        if order.size:
            yield times[order], np.repeat(np.arange(len(sources)), counts)[order]
        start = known
