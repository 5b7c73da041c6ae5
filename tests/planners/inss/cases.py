"""Small problems for tests of InSS' planner."""

from __future__ import annotations

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem
from tests.planners.problems import MIB, linear

TENTHS = tuple(range(100, 1001, 100))


def two_devices(*, rates: tuple[float, ...] = (100.0, 50.0), slo: float = 0.1, memory: int = 1 << 40) -> Problem:
    """Return models `a`, `b`, … on two equal devices; a batch of n takes (2 + n) ms on the whole of one."""
    names = "abcdef"[: len(rates)]
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in names),
        rates=dict(zip(names, rates, strict=True)),
        fleet=(Kind(name="k", count=2, cuts=TENTHS, memory=memory),),
        profiles={(name, "k"): linear(name, "k", 0.002, 0.001, TENTHS, (1, 32), 4 * MIB) for name in names},
    )
