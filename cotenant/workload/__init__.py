"""Who asks for what, and when: a source of requests for each name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from cotenant.workload.arrivals import Times
from cotenant.workload.sources import Poisson


class Source(Protocol):
    """Who asks for one name, and when."""

    @property
    def rate(self) -> float | None:
        """Requests per second on average; None where that depends on how fast they are answered."""

    def times(self, rng: np.random.Generator) -> Times:
        """When they arrive. The same state of `rng` gives the same times."""

    def scaled(self, factor: float) -> Source:
        """The same pattern with so many times the requests."""


class Workload(msgspec.Struct, frozen=True):
    """sources: by the name that is asked for, a model's or an application's.

    timeouts: seconds within which a name's requests are to be answered, where that is not the target of what they ask.
    """

    sources: Mapping[str, Source]
    timeouts: Mapping[str, float] = {}

    @classmethod
    def poisson(cls, rates: Mapping[str, float]) -> Workload:
        """Independent callers, at `rates` in requests per second."""
        return cls({name: Poisson(rate) for name, rate in rates.items()})

    def scaled(self, factor: float) -> Workload:
        """So many times the requests of every source."""
        sources = {name: source.scaled(factor) for name, source in self.sources.items()}
        return msgspec.structs.replace(self, sources=sources)
