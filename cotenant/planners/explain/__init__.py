"""Explain a plan: the bottleneck of each placement, why a model is unserved, and what relaxing constraints gains."""

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
    """Explain a sound plan. `gains` is left to the caller, since each requires planning again."""
    unserved = [explain_unserved(problem, plan, model, rate) for model, rate in plan.unserved.items()]
    if problem.objective == "rate":
        # Models are served the same multiple of their rates; only those that limit it to 0 matter.
        unserved = [model for model in unserved if plan.scale == 0 and not plan.rate(model.model)]
    return Explanation(
        placements=tuple(one for group in group_devices(plan) for one in explain_placements(group, plan, problem)),
        unserved=tuple(unserved),
    )
