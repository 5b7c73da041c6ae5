"""Describe workloads: a source of requests for each model or application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from cotenant.workload.arrivals import Times
from cotenant.workload.sources import Poisson


class Source(Protocol):
    """Generate the arrivals of requests for one model or application."""

    @property
    def rate(self) -> float | None:
        """The mean requests/s; None where it depends on response times."""

    def times(self, rng: np.random.Generator) -> Times:
        """Return the arrival times. The same state of `rng` gives the same times."""

    def scaled(self, factor: float) -> Source:
        """Return the same pattern with a multiple of the requests."""


class Workload(msgspec.Struct, frozen=True):
    """Map models and applications to the sources of their requests.

    timeouts: seconds after which a name's requests expire, where that is not its latency target.
    """

    sources: Mapping[str, Source]
    timeouts: Mapping[str, float] = {}

    @classmethod
    def poisson(cls, rates: Mapping[str, float]) -> Workload:
        """Return independent Poisson sources with these requests/s."""
        return cls({name: Poisson(rate) for name, rate in rates.items()})

    def scaled(self, factor: float) -> Workload:
        """Return the workload with a multiple of the requests of every source."""
        sources = {name: source.scaled(factor) for name, source in self.sources.items()}
        return msgspec.structs.replace(self, sources=sources)
