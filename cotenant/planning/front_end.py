"""Plan no more than the server's front end can read, and leave room for what serving costs beside the batches."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.profile import slowed_profiles
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.applications import carried_rates, without_applications
from cotenant.planners.candidates import with_provenance
from cotenant.planners.capacity import with_totals
from cotenant.planners.front_end import FrontEnd
from cotenant.planners.local_search import with_same_batches
from cotenant.planners.rates import at_rates, at_scale

Solve = Callable[[Problem], Plan]


def plan_with_front_end(solve: Solve, problem: Problem, front_end: FrontEnd) -> Plan:
    """Return the plan of `solve` for as much of the rates as the front end can read; the rest is unserved.

    Plans are made for shorter targets, since a request passes through the front end, and for batches that take longer:
    by noise, and by the processors that the front end takes beyond its reserve. They are stated with the targets and
    latencies of the problem. Where that leaves a model without any place, or no plan at all, the plan does without this
    room: better tight than not at all. Raises PlanError where there is none even then.
    """
    try:
        made = _planned(solve, problem, front_end)
    except PlanError:
        made = None
    if made is None or any(rate and not made.rate(name) for name, rate in made.unserved.items()):
        try:
            tight = _planned(solve, problem, msgspec.structs.replace(front_end, latency=0.0, noise=1.0))
        except PlanError:
            if made is None:
                raise
            tight = made
        if made is None or sum(tight.unserved.values()) < sum(made.unserved.values()):
            made = tight
    return with_provenance(made, request_s=front_end.seconds)


def _planned(solve: Solve, problem: Problem, front_end: FrontEnd) -> Plan:
    total = sum(problem.rates.values())
    if total == 0:
        return _with_room(solve, problem, front_end, 0.0)
    limit = front_end.max_rate / total
    if problem.objective == "devices":
        readable = problem if limit >= 1 else at_scale(problem, limit)
        return _totalled(_with_room(solve, readable, front_end, total * min(limit, 1.0)), problem)
    made = _with_room(solve, problem, front_end, 0.0)
    # Not the multiple: it is 0 where only some of the models can be served together.
    carried = carried_rates(made, problem)
    rate = sum(carried.values())
    if rate > front_end.max_rate:
        readable = at_rates(problem, {name: each * front_end.max_rate / rate for name, each in carried.items()})
        made = _with_room(solve, readable, front_end, front_end.max_rate)
        return msgspec.structs.replace(_totalled(made, problem), objective="rate", bound=limit)
    if front_end.slowdown(rate) == front_end.noise:
        return made
    return _totalled(_with_room(solve, problem, front_end, rate), problem)


def _totalled(made: Plan, problem: Problem) -> Plan:
    return with_totals(made, without_applications(problem, made.split))


def _with_room(solve: Solve, problem: Problem, front_end: FrontEnd, rate: float) -> Plan:
    """Return the plan that leaves room for the front end at so many requests/s, stated without that room."""
    if front_end.slowdown(rate) == 1.0 and not front_end.latency:
        return solve(problem)
    made = solve(_with_less(problem, front_end, rate))
    stated = with_same_batches(made, without_applications(problem, made.split))
    if stated is None:
        raise PlanError("batches that are faster than planned miss a target: the interference predictor is at fault")
    return stated


def _with_less(problem: Problem, front_end: FrontEnd, rate: float) -> Problem:
    """Return the problem with what the front end leaves of targets and processors at so many requests/s."""
    slowdown = front_end.slowdown(rate)
    return msgspec.structs.replace(
        problem,
        profiles=slowed_profiles(problem.profiles, {model.name: slowdown for model in problem.models}),
        models=tuple(msgspec.structs.replace(model, slo=front_end.target(model.slo)) for model in problem.models),
        applications=tuple(
            msgspec.structs.replace(application, slo=front_end.target(application.slo))
            for application in problem.applications
        ),
    )


def planned_problem(problem: Problem) -> Problem:
    """Return the problem that planners see: with what the front end leaves, where there is one."""
    if problem.front_end is None:
        return problem
    return _with_less(problem, problem.front_end, sum(problem.rates.values()))
