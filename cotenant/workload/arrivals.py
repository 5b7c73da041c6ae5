"""When requests arrive: endless streams, in chunks of numpy arrays, so that a long run takes no more memory.

Each model draws from a stream of its own (`streams`): to change one model's rate, or to add a model, leaves the
arrivals of all others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.errors import ConfigError

Floats = NDArray[np.float64]
# Ascending times in seconds from the start, a chunk at a time. May end.
Times = Iterator[Floats]
# Chunks of (times, which source each came from), in the order of time.
Arrivals = Iterator[tuple[Floats, NDArray[np.intp]]]

CHUNK = 4096


def streams(seed: int, names: Iterable[str]) -> dict[str, np.random.Generator]:
    """One generator for each name, from one root seed. What a name draws depends on the seed and that name alone."""
    if seed < 0:
        raise ConfigError(f"seed {seed} is negative; take 0 or more")
    return {name: np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))) for name in names}


def poisson(rate: float, rng: np.random.Generator) -> Times:
    """Independent callers, `rate` a second on average."""
    return _renewal(rate, lambda: rng.standard_exponential(CHUNK))


def gamma(rate: float, cv: float, rng: np.random.Generator) -> Times:
    """Gaps from a gamma distribution. cv is their coefficient of variation: 1 is Poisson, above 1 comes in bursts."""
    if not (math.isfinite(cv) and cv > 0):
        raise ConfigError(f"cv {cv:g} of the gaps between arrivals must lie above 0")
    return _renewal(rate, lambda: rng.gamma(cv**-2, cv**2, CHUNK))


def uniform(rate: float, rng: np.random.Generator) -> Times:
    """One every 1/rate seconds, the first at a random moment within the first gap."""
    phase = rng.random()
    gaps = np.ones(CHUNK)
    return _renewal(rate, lambda: gaps, first=phase - 1)


def varying(rates: Floats, step: float, rng: np.random.Generator) -> Times:
    """Poisson at `rates[n]` requests/s from n · step to (n + 1) · step seconds, and then no more."""
    if not (np.isfinite(rates).all() and (rates >= 0).all()):
        raise ConfigError("not all rates are finite numbers of 0 or more")
    counts = rng.poisson(rates * step).tolist()
    # Given their number, the arrivals of a Poisson process are spread evenly over the interval.
    return (np.sort(n * step + rng.random(count) * step) for n, count in enumerate(counts))


def independent(rates: Mapping[str, float], seconds: float, seed: int, cv: float = 1.0) -> Arrivals:
    """What the models of `rates` (requests/s) are asked for, each on its own: Poisson, or gamma where `cv` is not 1.

    The same seed gives the same arrivals to the simulator and to a live server.
    """
    rngs = streams(seed, rates)
    return merge(
        [poisson(rate, rngs[name]) if cv == 1 else gamma(rate, cv, rngs[name]) for name, rate in rates.items()],
        seconds,
    )


def merge(sources: Sequence[Times], seconds: float) -> Arrivals:
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


def _renewal(rate: float, gaps: Callable[[], Floats], first: float = 0.0) -> Times:
    """Gaps are in units of 1/rate; `first` is where the gap before the first arrival begins, in the same units."""
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(f"a rate of {rate:g} requests/s is none; take 0 or more")
    return _accumulate(rate, gaps, first) if rate else iter(())


def _accumulate(rate: float, gaps: Callable[[], Floats], first: float) -> Times:
    last = first / rate
    while True:
        times = last + np.cumsum(gaps()) / rate
        last = float(times[-1])
        yield times
