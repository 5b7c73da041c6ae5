"""Measure what planners make of problems: the distance to a proven bound, attainment in simulation, work, and churn.

All plan alike: for evenly spaced requests at the rates over `SATURATION`, since room for random arrivals is what most
papers' planners leave by such a factor, if at all. The plan is then simulated with Poisson arrivals at the rates
themselves. Nothing else is added to any planner's plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from cotenant.core.plan import Plan
from cotenant.core.plan_diff import diff_plans, renumber_devices
from cotenant.errors import PlanError
from cotenant.planners import Planner, Problem, geometry, load_planner
from cotenant.planners.check import check
from cotenant.planners.largest_rate import largest_scale
from cotenant.planners.rates import at_rates, at_scale
from cotenant.planners.scale_search import is_sound
from cotenant.sim.capacity import interval_half_width
from cotenant.sim.run import simulate

SATURATION = 0.8  # of what is planned for, that is offered
NEIGHBOUR = 0.1  # by which each model's rate is higher or lower in the neighbouring problem
BOUND_TOLERANCE = 1e-6  # relative, of devices and costs


class StudyTask(msgspec.Struct, frozen=True):
    """Describe one measurement: a planner on a problem at a seed. seconds: of arrivals in the simulation."""

    planner: str
    name: str
    seed: int
    problem: Problem
    seconds: float


class StudyRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold one measurement.

    error: why the planner has no plan; the other fields are then meaningless. value: devices, cost per hour or multiple
    of the rates, as the objective counts; bound: what is proven of it, where the planner proves any. unserved: fraction
    of the requests/s to plan for that the plan leaves. missed: fraction of simulated requests that were rejected or
    late; None where there were none. cpu_s: processor seconds of one plan. churn: workers started of all, when the plan
    for neighbouring rates follows. faults: what `check` says.
    """

    planner: str
    problem: str
    seed: int
    seconds: float
    objective: str
    error: str = ""
    value: float = 0.0
    bound: float | None = None
    integral: bool = False
    unserved: float = 0.0
    missed: float | None = None
    cpu_s: float = 0.0
    churn: float | None = None
    faults: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, int, float]:
        """Return what tells a measurement from others."""
        return (self.planner, self.problem, self.seed, self.seconds)


class Estimate(msgspec.Struct, frozen=True):
    """Hold a mean over seeds, and half the width of its 95 % confidence interval."""

    mean: float
    half: float


class StudySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summarise a planner on a problem, or on all. planned, of: measurements with a plan, and all. distance: from the
    best bound that any planner proved, as a fraction of it, where everything is served; None where never."""

    planner: str
    problem: str
    planned: int
    of: int
    distance: Estimate | None
    unserved: Estimate | None
    missed: Estimate | None
    cpu_s: Estimate | None
    churn: Estimate | None
    errors: tuple[str, ...] = ()


def measure(task: StudyTask) -> StudyRow:
    """Plan, simulate and plan again for neighbouring rates."""
    row = StudyRow(
        planner=task.planner,
        problem=task.name,
        seed=task.seed,
        seconds=task.seconds,
        objective=task.problem.objective,
    )
    planner = load_planner(task.planner)
    begun = time.process_time()
    try:
        plan, wanted = _planned(planner, task.problem)
    except PlanError as error:
        return msgspec.structs.replace(row, error=str(error))
    spent = time.process_time() - begun
    rate = task.problem.objective == "rate"
    priced = any(kind.price is not None for kind in task.problem.fleet)
    asked = sum(wanted.rates.values())
    return msgspec.structs.replace(
        row,
        value=plan.scale if rate else plan.cost_per_hour or 0.0 if priced else float(plan.devices_used),
        bound=None if plan.bound is None else _bound(plan.bound, task.problem if rate else wanted),
        integral=not rate and not priced,
        unserved=0.0 if rate or not asked else sum(plan.unserved.values()) / asked,
        missed=_missed(plan, at_scale(wanted, SATURATION), task),
        cpu_s=spent,
        churn=None if rate else _churn(planner, plan, wanted, task.seed),
        faults=tuple(str(fault) for fault in check(plan, wanted if not rate else task.problem)),
    )


def _planned(planner: Planner, problem: Problem) -> tuple[Plan, Problem]:
    """Return a planner's plan, and the problem at the rates that it is for."""
    if problem.objective == "rate":
        plan = largest_scale(planner, problem, accept=is_sound)
        return plan, at_scale(problem, plan.scale)
    wanted = at_scale(problem, 1 / SATURATION)
    return planner(wanted), wanted


def _bound(proven: float, problem: Problem) -> float:
    """Return the tighter of a bound without interference and one at the least of it that any plan has."""
    slowed = geometry.bound_with_interference(problem) if problem.interference.interferes else None
    if slowed is None:
        return proven
    return min(proven, slowed) if problem.objective == "rate" else max(proven, slowed)


def _missed(plan: Plan, offered: Problem, task: StudyTask) -> float | None:
    """Return the fraction of requests that are rejected or late; None where none are offered."""
    report = simulate(plan, offered, seconds=task.seconds, seed=task.seed)
    stayed = sum(model.stayed for model in report.models)
    return sum(model.missed for model in report.models) / stayed if stayed else None


def _churn(planner: Planner, plan: Plan, wanted: Problem, seed: int) -> float | None:
    """Return the fraction of the next plan's workers that are not those of this one."""
    signs = np.random.default_rng([seed, 1]).choice([-1.0, 1.0], len(wanted.rates))
    factors = dict(zip(wanted.rates, (1 + NEIGHBOUR * signs).tolist(), strict=True))
    rates = {name: rate * factors[name] for name, rate in wanted.rates.items()}
    try:
        following = planner(msgspec.structs.replace(at_rates(wanted, rates), current=plan))
    except PlanError:
        return None
    difference = diff_plans(plan, renumber_devices(following, plan))
    workers = difference.workers_started + difference.workers_kept
    return difference.workers_started / workers if workers else 0.0


def summarise(rows: Sequence[StudyRow]) -> list[StudySummary]:
    """Summarise each planner on each problem; the planners in their order, then the problems in theirs."""
    bounds = best_bounds(rows)
    groups: dict[tuple[str, str], list[StudyRow]] = {}
    for row in rows:
        groups.setdefault((row.planner, row.problem), []).append(row)
    return [_summary(planner, problem, group, bounds) for (planner, problem), group in groups.items()]


def summarise_planners(rows: Sequence[StudyRow]) -> list[StudySummary]:
    """Summarise each planner over all problems, the nearest to the bounds first; those that leave more unserved, or
    have no plan for more, come after those that serve more."""
    bounds = best_bounds(rows)
    planners = dict.fromkeys(row.planner for row in rows)
    made = [_summary(name, "all", [row for row in rows if row.planner == name], bounds) for name in planners]

    def rank(each: StudySummary) -> tuple[float, ...]:
        unserved = math.inf if each.unserved is None else round(each.unserved.mean, 3)
        distance = math.inf if each.distance is None else each.distance.mean
        return (each.of - each.planned, unserved, distance)

    return sorted(made, key=rank)


def best_bounds(rows: Iterable[StudyRow]) -> dict[tuple[str, int], float]:
    """Return the best bound that any planner proves, by problem and seed: the largest of devices and costs, which no
    plan goes below, and the least of rates. A number of devices is rounded up."""
    bounds: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.bound is not None and not row.error:
            at = (row.problem, row.seed)
            bound = math.ceil(row.bound - BOUND_TOLERANCE) if row.integral else row.bound
            pick = min if row.objective == "rate" else max
            bounds[at] = pick(bounds.get(at, bound), bound)
    return bounds


def distance_to_bound(row: StudyRow, bound: float | None) -> float | None:
    """Return how much more than a bound a plan takes, or how much more than its rate the bound is, as a fraction; None
    without a bound, and where it does not serve everything."""
    if row.error or not bound or row.unserved > BOUND_TOLERANCE or not row.value:
        return None
    ratio = bound / row.value if row.objective == "rate" else row.value / bound
    return max(0.0, ratio - 1)


def _summary(
    planner: str, problem: str, rows: Sequence[StudyRow], bounds: dict[tuple[str, int], float]
) -> StudySummary:
    planned = [row for row in rows if not row.error]
    distances = [distance_to_bound(row, bounds.get((row.problem, row.seed))) for row in planned]
    return StudySummary(
        planner=planner,
        problem=problem,
        planned=len(planned),
        of=len(rows),
        distance=_estimate(distances),
        unserved=_estimate([row.unserved for row in planned]),
        missed=_estimate([row.missed for row in planned]),
        cpu_s=_estimate([row.cpu_s for row in planned]),
        churn=_estimate([row.churn for row in planned]),
        errors=tuple(dict.fromkeys(row.error for row in rows if row.error)),
    )


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return Estimate(float(np.mean(known)), interval_half_width(known)) if known else None
