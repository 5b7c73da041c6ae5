"""Add headroom for random arrivals: plan models for more than their rate until the forecast meets their SLOs.

Planners decide for evenly spaced requests. Under Poisson arrivals a plan that is feasible for those may miss SLOs.
"""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners.candidates import with_provenance
from cotenant.planners.capacity import with_totals
from cotenant.planners.local_search import attainment_shortfall, improve_plan
from cotenant.planners.problem import Problem
from cotenant.planners.rates import at_rates, rescaled_plan
from cotenant.planners.registry import Planner

HEADROOM_STEP = 1.15  # factor on the planned rate, for each forecast that misses the SLO
MAX_STEPS = 12
REPLAN_STEPS = 4  # steps that may take the time limit together, where a plan is in force


def with_headroom(planner: Planner, problem: Problem, candidate: Plan | None = None) -> Plan:
    """Return a plan for the rates whose forecast meets every SLO, or comes as near to that as the devices allow.

    Each round improves the plan by local search; models whose SLO the forecast still misses are then planned for a
    larger rate. Rates that the candidate leaves unserved have no SLO: headroom is for what is served.

    candidate: a plan for the same rates to begin with, such as one made for targets that are easier to meet; by
    default, the planner's.
    """
    plan = planner(problem) if candidate is None else candidate
    bound, carried = plan.bound, plan.rates()
    served = at_rates(problem, {name: min(rate, carried.get(name, 0.0)) for name, rate in problem.rates.items()})
    factors = dict.fromkeys(problem.rates, 1.0)
    # A controller waits for the answer, and the plans for larger rates start from the one in force.
    limit = problem.time_limit / (1 if problem.current is None else REPLAN_STEPS)
    asked = msgspec.structs.replace(served, time_limit=limit)
    for _ in range(MAX_STEPS):
        plan = improve_plan(plan, served)
        missing = attainment_shortfall(plan, served)
        if not missing:
            break
        factors |= {name: factors[name] * HEADROOM_STEP for name in missing}
        larger = planner(at_rates(asked, {name: rate * factors[name] for name, rate in served.rates.items()}))
        if larger.unserved:
            break
        headroom = {name: round(factor, 6) for name, factor in factors.items() if factor > 1}
        plan = with_provenance(rescaled_plan(larger, served), headroom=headroom)
    # A bound that was proven for larger rates does not hold for these.
    return msgspec.structs.replace(with_totals(plan, problem), bound=bound)
