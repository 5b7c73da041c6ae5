"""A problem with a knee, and what is cut for it: what the tests of `elastic` and `elastic-plus` share."""

from __future__ import annotations

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from tests.planners.problems import profile

CUTS = (200, 400, 500, 600, 800, 1000)


def bent(rates: dict[str, float], slo: float = 0.090, **kind: object) -> Problem:
    """Models that gain from more share up to 40 % of a device, and nothing beyond; batch 1, 20 ms there."""
    latency = {(cut, 1): 0.020 * max(1.0, 400 / cut) for cut in CUTS}
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in rates),
        rates=rates,
        fleet=(msgspec.structs.replace(Kind(name="k", cuts=CUTS, count=4), **kind),),
        profiles={(name, "k"): profile(name, "k", latency) for name in rates},
    )


def shares(made: Plan) -> list[list[int]]:
    return [[cut.share for cut in device.partitions] for device in made.devices]
