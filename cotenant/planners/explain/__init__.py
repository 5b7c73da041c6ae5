"""Why a plan is as it is: what binds each placement, why a model is not served, and what a little more would buy."""

from __future__ import annotations

import msgspec

from cotenant.core.device_groups import group_devices
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.explain.gains import Gain, gain, probes
from cotenant.planners.explain.placement import PlacementExplanation, explain_placements
from cotenant.planners.explain.unserved import UnservedModel, explain_unserved

__all__ = ["Explanation", "Gain", "PlacementExplanation", "UnservedModel", "explain", "gain", "probes"]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    placements: tuple[PlacementExplanation, ...]
    unserved: tuple[UnservedModel, ...]
    gains: tuple[Gain, ...] = ()


def explain(plan: Plan, problem: Problem) -> Explanation:
    """Of a plan that violates nothing. `gains` is left to who has time to plan again."""
    lacks = [explain_unserved(problem, plan, model, rate) for model, rate in plan.unserved.items()]
    if problem.objective == "rate":
        # Less than the rates is served of all models alike; what matters is who keeps all others from being served.
        lacks = [lack for lack in lacks if plan.scale == 0 and lack.cause != "capacity"]
    return Explanation(
        placements=tuple(each for group in group_devices(plan) for each in explain_placements(group, plan, problem)),
        unserved=tuple(lacks),
    )
