"""Plans that the simulator has agreed to.

The forecast, which `planners.solve` goes by, knows nothing of batches that take longer at times, and where models share
a partition it is up to two points too hopeful. So each plan is simulated before it is given, and made anew where that
breaks a promise.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem, load
from cotenant.planners.applications import carried, plain
from cotenant.planners.solve import divided, holds, largest_scale, promised, solve, split_of
from cotenant.sim.run import simulate
from cotenant.workload import Workload

# How much the simulator looks at, at most, and how many plans after the first; what becomes of the targets of models
# that are late.
LOOK_SECONDS = 300.0
LOOK_REQUESTS = 30_000
LOOKS = 3
TIGHTER = 0.9


def judged(planner: str, problem: Problem) -> Plan:
    """The plan of a named planner that keeps promises in the simulator, or comes nearest to it."""
    if problem.objective == "rate":
        split = split_of(load(planner), problem)

        def kept(plan: Plan, scaled: Problem) -> bool:
            looks = (LOOK_REQUESTS / 6, LOOK_REQUESTS)  # a short look tells most of those apart that are far off
            whole = msgspec.structs.replace(plan, split=split)
            return holds(plan, scaled) and not any(_late(whole, problem, look) for look in looks)

        plan = largest_scale(load(planner), plain(problem, split), accept=kept)
        return divided(load(planner), problem, plan, split)
    plan = solve(planner, problem)
    late = _late(plan, problem, LOOK_REQUESTS)
    return _in_time(planner, problem, plan, late) if late else plan


def _in_time(planner: str, problem: Problem, plan: Plan, late: dict[str, float]) -> Plan:
    """For models that are late in the simulator, or whose application is, the plan is made anew with tighter targets.
    That with least late."""
    best, least, asked = plan, late, plain(problem, plan.split)
    models = {application.name: application.models() for application in problem.applications}
    for _ in range(LOOKS):
        asked = _tighter(asked, set().union(*(models.get(name, {name}) for name in late)))
        plan = msgspec.structs.replace(promised(load(planner), asked, plan), split=plan.split)
        late = _late(plan, problem, LOOK_REQUESTS)
        if sum(late.values()) < sum(least.values()):
            best, least = plan, late
        if not late:
            break
    return best


def _late(plan: Plan, problem: Problem, requests: float) -> dict[str, float]:
    """By how much models and applications miss the fraction promised in the simulator, at the rates that are served;
    those that miss it by more than chance would have it."""
    rates = carried(plan, problem)
    if not any(rates.values()):
        return {}
    seconds = min(LOOK_SECONDS, requests / sum(plan.rates().values()))
    report = simulate(problem, plan, Workload.poisson(rates), seconds=seconds)
    return {
        row.model: row.required - row.attainment for row in report.models if row.attainment is not None and not row.kept
    }


def _tighter(problem: Problem, names: Collection[str]) -> Problem:
    models = (msgspec.structs.replace(it, slo=it.slo * TIGHTER) if it.name in names else it for it in problem.models)
    return msgspec.structs.replace(problem, models=tuple(models))
