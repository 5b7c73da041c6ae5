"""Why a plan is as it is: what binds each placement, why a model is not served, and what a little more would buy."""

from __future__ import annotations

import msgspec

from cotenant.core.alike import alike
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.explain.gains import Gain, gain, probes
from cotenant.planners.explain.missing import Missing, missing
from cotenant.planners.explain.placed import Explained, explained

__all__ = ["Explained", "Explanation", "Gain", "Missing", "explain", "gain", "probes"]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    placements: tuple[Explained, ...]
    unserved: tuple[Missing, ...]
    gains: tuple[Gain, ...] = ()


def explain(plan: Plan, problem: Problem) -> Explanation:
    """Of a plan that violates nothing. `gains` is left to who has time to plan again."""
    lacks = [missing(problem, plan, model, rate) for model, rate in plan.unserved.items()]
    if problem.objective == "rate":
        # Less than the rates is served of all models alike; what matters is who keeps all others from being served.
        lacks = [lack for lack in lacks if plan.scale == 0 and lack.cause != "capacity"]
    return Explanation(
        placements=tuple(each for group in alike(plan) for each in explained(group, plan, problem)),
        unserved=tuple(lacks),
    )
