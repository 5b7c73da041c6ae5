"""Split the SLO of an application into budgets of its stages, so that its models need the fewest devices.

The longer a model's budget, the larger its batches and the smaller its partitions may be, and the less device time a
request costs: a decreasing step function (`budget_levels`). Which levels to take, with every path within the target, is
a small integer program, solved exactly; Nexus (SOSP 2019, section 6.2) does the same for trees by dynamic programming.
Remaining time goes to all stages in proportion: headroom for random arrivals and for sharing partitions.

The program sees full partitions of one model each, not how models share partitions and devices. So its solutions for
several assumed slowdowns are compared by the planner itself (`best_budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import highspy
import msgspec
import numpy as np

from cotenant.core.application import Application
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE, show_seconds
from cotenant.errors import PlanError
from cotenant.planners import Planner, Problem
from cotenant.planners.applications import Split, without_applications
from cotenant.planners.candidates import objective_value
from cotenant.planners.capacity import latency_curve
from cotenant.planners.largest_rate import largest_scale
from cotenant.planners.local_search import attainment_shortfall
from cotenant.planners.scale_search import is_sound

MIN_RATE = 1e-6  # requests/s assumed for a model without requests, so that a cheaper level still costs less
BUDGET_STEP = 0.25  # relative changes of the budget of one stage
MAX_SPLITS = 9  # number of splits to compare
ASSUMED_SLOWDOWNS = (1.0, 1.3, 1.8)  # factors on the latency of a batch alone, for sharing partitions and devices
MAX_LEVELS = 60  # budget levels of one model
COST_TOLERANCE = 1e-9  # relative: by which a level must be cheaper than a shorter one to count

Cost = tuple[float, ...]


class BudgetLevel(msgspec.Struct, frozen=True):
    """Describe a budget level.

    needs: seconds of target that a model must have; costs: device time (times its price) for one request.
    """

    needs: float
    costs: float


def budget_levels(problem: Problem, model: str, slower: float = 1.0) -> list[BudgetLevel]:
    """Return what a request of a model costs by its budget: ascending budgets, descending costs.

    slower: the assumed slowdown, times the latency alone.
    """
    limit = _longest(problem, model)
    points = [
        BudgetLevel(2 * slower * seconds, (kind.price or 1.0) * share / WHOLE * seconds / rows)
        for kind in problem.fleet
        for share in kind.cuts
        for rows, seconds in enumerate(latency_curve(problem, model, kind.name, share), 1)
        if 2 * slower * seconds <= limit
    ]
    levels: list[BudgetLevel] = []
    for level in sorted(points, key=lambda point: (point.needs, point.costs)):
        if not levels or level.costs < levels[-1].costs * (1 - COST_TOLERANCE):
            levels.append(level)
    return (
        levels if len(levels) <= MAX_LEVELS else [levels[round(i)] for i in np.linspace(0, len(levels) - 1, MAX_LEVELS)]
    )


def split_slo_budgets(planner: Planner, problem: Problem) -> Split:
    """Return the split of the applications' targets for which the planner needs least; {} without applications.

    Raises PlanError for a target that no split can meet.
    """
    return best_budget(problem, lambda asked: _cost(planner, asked)) if problem.applications else {}


def with_slo_budget(planner: Planner, problem: Problem, plan: Plan, split: Split) -> Plan:
    """Return a plan that was made for this split, with a bound that holds for every split."""
    if not split:
        return plan
    return msgspec.structs.replace(plan, split=split, bound=plan.bound and bound_of(planner, problem))


def _cost(planner: Planner, problem: Problem) -> Cost:
    """Return what is left unserved, what the devices cost, and the forecast shortfall: evenly spaced requests first."""
    plan = planner(problem)
    if problem.objective == "rate":
        if plan.objective != "rate":
            plan = largest_scale(planner, problem, accept=is_sound)
        return (-plan.scale,)
    asked = sum(problem.rates.values())
    return (
        sum(plan.unserved.values()) / asked if asked else 0.0,
        objective_value(plan),
        sum(attainment_shortfall(plan, problem).values()),
    )


def best_budget(problem: Problem, cost: Callable[[Problem], Cost]) -> Split:
    """Return the split whose problem of models costs least: of `candidate_budgets`, then of those near the best.

    cost: of a problem without applications. Raises PlanError where a target is too short for any split.
    """
    tried = candidate_budgets(problem)
    costs = [cost(_quick(problem, split, len(tried))) for split in tried]
    least = min(costs)
    split = tried[costs.index(least)]
    improved = True
    while improved and len(tried) < MAX_SPLITS:
        improved = False
        for near in _near(problem, split):
            if near in tried or len(tried) == MAX_SPLITS:
                continue
            tried.append(near)
            other = cost(_quick(problem, near, MAX_SPLITS))
            if other < least:
                split, least, improved = near, other, True
                break
    return split


def _quick(problem: Problem, split: Split, tries: int) -> Problem:
    return msgspec.structs.replace(without_applications(problem, split), time_limit=problem.time_limit / tries)


def bound_of(planner: Planner, problem: Problem) -> float | None:
    """Return a bound that holds for every split: the planner's, with each stage's budget the largest of any split."""
    return planner(_quick(problem, loosest_budgets(problem), MAX_SPLITS)).bound


def loosest_budgets(problem: Problem) -> Split:
    """Return the largest budget of each stage in any split that serves all models. It is not a split itself."""
    budgets = {}
    for application in problem.applications:
        least = {stage.name: budget_levels(problem, stage.model)[0].needs for stage in application.stages}
        ends, rest = application.finish_times(least), application.remainder(least)
        budgets[application.name] = {
            name: application.slo - (ends[name] - least[name]) - rest[name] for name in application.visits
        }
    return budgets


def _near(problem: Problem, split: Split) -> Iterator[Split]:
    """Yield splits with one stage's budget changed."""
    for application in problem.applications:
        if not any(stage.after for stage in application.stages):
            continue  # parallel stages: each has all of it
        for stage in application.stages:
            for factor in (1 + BUDGET_STEP, 1 / (1 + BUDGET_STEP)):
                seconds = dict(split[application.name])
                seconds[stage.name] *= factor
                yield {**split, application.name: stretched_budget(application, seconds)}


def candidate_budgets(problem: Problem) -> list[Split]:
    """Return distinct splits to compare, one for each assumed slowdown. Raises PlanError where no split is feasible."""
    splits: list[Split] = []
    for slower in ASSUMED_SLOWDOWNS:
        chosen = _cheapest(problem, slower)
        if chosen is not None:
            split = {
                application.name: stretched_budget(
                    application, {stage.name: chosen[stage.model] for stage in application.stages}
                )
                for application in problem.applications
            }
            if split not in splits:
                splits.append(split)
    if not splits:
        raise PlanError(_hopeless(problem))
    return splits


def _cheapest(problem: Problem, slower: float) -> dict[str, float] | None:
    """Return the targets of the applications' models, in seconds, at which all uses together cost least; None where
    there are none."""
    rates = without_applications(problem, _whole(problem)).rates
    program = highspy.Highs()  # type: ignore[no-untyped-call]
    program.setOptionValue("output_flag", False)
    program.setOptionValue("threads", 1)
    chosen, needs = {}, {}
    for model in sorted(set().union(*(application.models() for application in problem.applications))):
        steps = budget_levels(problem, model, slower)
        if not steps:
            return None
        price = max(rates[model], MIN_RATE)
        chosen[model] = [(step.needs, program.addBinary(obj=price * step.costs)) for step in steps]
        needs[model] = sum(seconds * taken for seconds, taken in chosen[model])
        program.addConstr(sum(taken for _, taken in chosen[model]) == 1)
    for application in problem.applications:
        ends = {stage.name: program.addVariable(lb=0.0, ub=application.slo) for stage in application.stages}
        for stage in application.stages:
            begins = [ends[other] for other in stage.after] or [0.0]
            for begin in begins:
                program.addConstr(ends[stage.name] - begin - needs[stage.model] >= 0.0)
    program.run()
    if program.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = program.getSolution().col_value
    return {
        model: next(seconds for seconds, taken in steps if values[taken.index] > 0.5) for model, steps in chosen.items()
    }


def _whole(problem: Problem) -> Split:
    """Return budgets that give each stage the whole target."""
    return {
        application.name: {stage.name: application.slo for stage in application.stages}
        for application in problem.applications
    }


def _longest(problem: Problem, model: str) -> float:
    """Return the longest budget that a model can get, in seconds."""
    return without_applications(problem, _whole(problem)).model(model).slo


def _hopeless(problem: Problem) -> str:
    """Return the message for a target that no split can meet."""
    for application in problem.applications:
        least = {}
        for stage in application.stages:
            steps = budget_levels(problem, stage.model)
            if not steps:
                return (
                    f"application {application.name!r}: stage {stage.name!r}: no share of the devices runs a batch of"
                    f" {stage.model!r} twice within {show_seconds(_longest(problem, stage.model))}; raise its target"
                )
            least[stage.name] = steps[0].needs
        length = application.length(least)
        if length > application.slo:
            return (
                f"application {application.name!r}: no split of {show_seconds(application.slo)} meets its target: on"
                f" whole devices its stages need {show_seconds(length)}; raise its target"
            )
    return "the targets of the applications cannot be met together; raise them"


def stretched_budget(application: Application, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the budgets, stretched until each stage is on a path that takes the whole target.

    All are stretched by the same factor first, then each by what its paths have left.
    """
    factor = application.slo / application.length(seconds)
    budgets = {name: value * factor for name, value in seconds.items()}
    for stage in application.order:
        ends, rest = application.finish_times(budgets), application.remainder(budgets)
        budgets[stage.name] += max(0.0, application.slo - ends[stage.name] - rest[stage.name])
    return budgets
