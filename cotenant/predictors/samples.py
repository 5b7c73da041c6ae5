"""Runs beside neighbours, as they were measured: what predictors are fitted to and judged by."""

from __future__ import annotations

import msgspec

from cotenant.predictors import Load


class Sample(msgspec.Struct, frozen=True):
    """A victim beside neighbours. alone, together: seconds that its batch takes without them, and with them."""

    victim: Load
    neighbours: tuple[Load, ...]
    alone: float
    together: float

    @property
    def slowdown(self) -> float:
        """As measured: noise may leave it a little below 1."""
        return self.together / self.alone
