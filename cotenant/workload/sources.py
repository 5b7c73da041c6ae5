"""Sources of requests, as values: each says when requests come, given a generator to draw from."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.workload.arrivals import CHUNK, Floats, Times


class Poisson(msgspec.Struct, frozen=True):
    """Independent callers, `rate` a second on average."""

    rate: float

    def __post_init__(self) -> None:
        _known(self.rate)

    def times(self, rng: np.random.Generator) -> Times:
        return _renewal(self.rate, lambda: rng.standard_exponential(CHUNK))

    def scaled(self, factor: float) -> Poisson:
        return Poisson(self.rate * factor)


class Gamma(msgspec.Struct, frozen=True):
    """Gaps from a gamma distribution. cv is their coefficient of variation: 1 is Poisson, above 1 comes in bursts."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _known(self.rate)
        if not (math.isfinite(self.cv) and self.cv > 0):
            raise ConfigError(f"cv {self.cv:g} of the gaps between arrivals must lie above 0")

    def times(self, rng: np.random.Generator) -> Times:
        return _renewal(self.rate, lambda: rng.gamma(self.cv**-2, self.cv**2, CHUNK))

    def scaled(self, factor: float) -> Gamma:
        return Gamma(self.rate * factor, self.cv)


class Uniform(msgspec.Struct, frozen=True):
    """One every 1/rate seconds, the first at a random moment within the first gap."""

    rate: float

    def __post_init__(self) -> None:
        _known(self.rate)

    def times(self, rng: np.random.Generator) -> Times:
        phase = rng.random()
        gaps = np.ones(CHUNK)
        return _renewal(self.rate, lambda: gaps, first=phase - 1)

    def scaled(self, factor: float) -> Uniform:
        return Uniform(self.rate * factor)


def _known(rate: float) -> None:
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(f"a rate of {rate:g} requests/s is none; take 0 or more")


def _renewal(rate: float, gaps: Callable[[], Floats], first: float = 0.0) -> Times:
    """Gaps are in units of 1/rate; `first` is where the gap before the first arrival begins, in the same units."""
    if not rate:
        return
    last = first / rate
    while True:
        times = last + np.cumsum(gaps()) / rate
        last = float(times[-1])
        yield times
