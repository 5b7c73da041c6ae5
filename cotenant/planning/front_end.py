"""Plan no more than the server's front end can read, and leave it the processors that it takes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.profile import slowed_profiles
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.capacity import with_totals
from cotenant.planners.front_end import FrontEnd
from cotenant.planners.local_search import with_same_batches
from cotenant.planners.rates import at_scale

Solve = Callable[[Problem], Plan]


def plan_with_front_end(solve: Solve, problem: Problem, front_end: FrontEnd) -> Plan:
    """Return the plan of `solve` for as much of the rates as the front end can read; the rest is unserved.

    What the front end takes beyond its reserve makes batches longer: plans are made for such batches, and stated with
    the latencies of the problem.
    """
    total = sum(problem.rates.values())
    if total == 0:
        return solve(problem)
    limit = front_end.max_rate / total
    if problem.objective == "devices":
        readable = problem if limit >= 1 else at_scale(problem, limit)
        return with_totals(_slowed(solve, readable, front_end.slowdown(total * min(limit, 1.0))), problem)
    made = solve(problem)
    if made.scale > limit:
        made = _slowed(solve, at_scale(problem, limit), front_end.slowdown(front_end.max_rate))
        return msgspec.structs.replace(with_totals(made, problem), objective="rate", bound=limit)
    if (slowdown := front_end.slowdown(total * made.scale)) == 1.0:
        return made
    return with_totals(_slowed(solve, problem, slowdown), problem)


def _slowed(solve: Solve, problem: Problem, slowdown: float) -> Plan:
    """Return the plan for batches that take so many times as long, stated with the latencies of the problem."""
    if slowdown == 1.0:
        return solve(problem)
    models = {model.name: slowdown for model in problem.models}
    made = solve(msgspec.structs.replace(problem, profiles=slowed_profiles(problem.profiles, models)))
    stated = with_same_batches(made, without_applications(problem, made.split))
    if stated is None:
        raise PlanError("batches that are faster than planned miss a target: the interference predictor is at fault")
    return stated
