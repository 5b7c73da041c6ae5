"""Generate arrivals of requests: endless streams in chunks of numpy arrays, so that long runs need no more memory.

Each name draws from a random stream of its own (`random_streams`): to change or add one source leaves the arrivals of
all others unchanged.
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
# Ascending times in seconds from the start, in chunks. May end.
Times = Iterator[Floats]
# Chunks of (times, index of each one's source), in the order of time.
Arrivals = Iterator[tuple[Floats, NDArray[np.intp]]]

CHUNK = 4096


def random_streams(seed: int, names: Iterable[str]) -> dict[str, np.random.Generator]:
    """Return one generator for each name. Its stream depends on the seed and that name alone.

    Raises ConfigError for a negative seed.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative; use 0 or more")
    return {name: np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))) for name in names}


def generate_arrivals(workload: Workload, seconds: float, seed: int) -> Arrivals:
    """Generate the arrivals of a workload before `seconds`; sources are numbered in its order.

    The same seed gives the same arrivals in the simulator and on a live server.
    """
    rngs = random_streams(seed, workload.sources)
    return merge_arrivals([source.times(rngs[name]) for name, source in workload.sources.items()], seconds)


def merge_arrivals(sources: Sequence[Times], seconds: float) -> Arrivals:
    """Merge the arrivals of several sources before `seconds`, in the order of time.

    Raises ConfigError for a duration that is not above 0.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"a run of {seconds:g} s must be finite and longer than 0 s")
    pending = [np.empty(0) for _ in sources]
    running = set(range(len(sources)))
    start = 0.0
    while start < seconds:
        for index in sorted(running):
            while not pending[index].size and index in running:
                chunk = next(sources[index], None)
                if chunk is None:
                    running.discard(index)
                else:
                    pending[index] = chunk
        # Beyond a source's last generated time, it may still have earlier arrivals than the others.
        horizon = min((float(pending[index][-1]) for index in running), default=math.inf)
        counts = [int(np.searchsorted(times, horizon, side="right")) for times in pending]
        times = np.concatenate([times[:count] for times, count in zip(pending, counts, strict=True)] or [np.empty(0)])
        pending = [times[count:] for times, count in zip(pending, counts, strict=True)]
        order = np.argsort(times, kind="stable")
        order = order[: np.searchsorted(times, seconds, sorter=order)]
        if order.size:
            yield times[order], np.repeat(np.arange(len(sources)), counts)[order]
        start = horizon
