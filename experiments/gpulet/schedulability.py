"""Find the largest rate that a system sustains in simulation: the paper's "SLO preserved max throughput" (section 5.2).

The paper raises the rate until more than 1 % of requests are late or dropped. Here the simulator replaces its servers,
with the true interference of `ground_truth` whatever the planner predicts. Planners assume evenly spaced requests, but
arrivals are random; so each system also plans for tighter targets, which adds headroom in every round, and for looser
ones, as it may overestimate interference. The plan that sustains the highest rate on one seed is chosen, and what it
sustains on other seeds counts: on its own seed the best of several plans is also the luckiest. No plan gets more than
the rate it was made for.

Geometry plans as `cotenant plan` does: for the largest rate it also plans for tighter targets and lower interference,
compares the quick planners, and takes what sustains most (`planners.largest_rate.largest_scale`). Here it is judged by
the simulator alone, as are the others. A system with `alone` leaves the quick planners out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem, portfolio
from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.largest_rate import largest_scale
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from experiments.gpulet import paper
from experiments.gpulet.ground_truth import true_environment
from experiments.gpulet.max_rates import Group, group_model_set, largest_multiple
from experiments.gpulet.model_sets import ModelSet
from experiments.gpulet.systems import System, plan_function, planner_problem

TOLERANCE = 0.01  # relative, of rates that are found
TARGET_SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.15)  # factors on the targets to plan for
PORTFOLIO_TARGET_SCALES = (1.0, 0.8, 1.15)  # for a planner that searches for headroom itself
REQUESTS = 20_000  # requests in one run
SCORING_SEEDS = 3  # those after the seed that plans are chosen by, counted together
SHORT_RUN = 4_000  # requests of a run that rejects rates far too high,
SHORT_RUN_ATTAINMENT = 0.98  # with an attainment below this


class SustainedRates(msgspec.Struct, frozen=True):
    """Hold rates of a group, in requests/s over all models.

    planned: the rate for which the system has a plan at the original targets, evenly spaced; sustained: what that plan
    sustains; best: what the best of its plans sustains, made for `target_scale` times the targets, both on the seed
    that it was chosen by; scored: what that best plan sustains on other seeds.
    """

    planned: float
    sustained: float
    best: float
    target_scale: float
    scored: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a group of models, and how many requests to simulate in one run."""

    group: Group
    requests: int = REQUESTS
    seed: int = 0


class _Candidate(msgspec.Struct, frozen=True):
    """Hold a plan, the multiple of the mix that it was made for, and the one that it sustains."""

    plan: Plan
    planned: float
    sustained: float
    target_scale: float


def sustained_rates(trial: Trial) -> SustainedRates:
    """Return the rates that a system plans and sustains for a group."""
    group = trial.group
    model_set = group_model_set(group)
    environment = true_environment(model_set, group.devices, trial.seed)
    unit = math.fsum(group.mix.values())
    first = best = None
    for target_scale in PORTFOLIO_TARGET_SCALES if group.system.searches else TARGET_SCALES:
        scaled = with_scaled_targets(model_set, target_scale)
        for candidate in _candidates(trial, scaled, environment, target_scale, best.sustained if best else 0.0):
            if target_scale == 1 and first is None:
                first = candidate
            if best is None or candidate.sustained > best.sustained:
                best = candidate
    if best is None:
        return SustainedRates(0.0, 0.0, 0.0, 1.0, 0.0)
    seeds = [trial.seed + 1 + n for n in range(SCORING_SEEDS)]
    scored = sustained_multiple(best.plan, environment, trial, 0.0, best.planned, seeds)
    return SustainedRates(
        planned=first.planned * unit if first else 0.0,
        sustained=first.sustained * unit if first else 0.0,
        best=best.sustained * unit,
        target_scale=best.target_scale,
        scored=scored * unit,
    )


def _candidates(
    trial: Trial, model_set: ModelSet, environment: Problem, target_scale: float, low: float
) -> Iterator[_Candidate]:
    """Yield the system's plans for some targets. low: multiple of the mix that is sustained already."""
    group = trial.group
    scale, plan = largest_plan(group.system, model_set, group.mix, group.devices, model_set.units[0])
    if plan is None:
        return
    if scale > low or group.system.searches:
        yield _Candidate(
            plan, scale, sustained_multiple(plan, environment, trial, low, scale, [trial.seed]), target_scale
        )
    if group.system.searches:
        plan = validated_plan(model_set, environment, trial)
        yield _Candidate(plan, plan.scale, plan.scale, target_scale)


def sustained_multiple(
    plan: Plan, environment: Problem, trial: Trial, low: float, high: float, seeds: Sequence[int]
) -> float:
    """Return the largest multiple of the mix at which the plan meets the paper's SLO attainment, over all seeds.

    Searches up to `high`; returns `low` if no larger multiple does.
    """

    def sustains(x: float) -> bool:
        return meets_slo(plan, environment, trial, x, seeds)

    if sustains(high):
        return high
    step = low * (1 + TOLERANCE) or high * 0.9
    if low and (step >= high or not sustains(step)):
        return low
    # Attainment falls with the rate, apart from noise, so bisection applies.
    while not low and high > TOLERANCE:
        low, high, step = (step, high, step) if sustains(step) else (0.0, step, step * 0.8)
    while high - low > TOLERANCE * high and low:
        middle = (low + high) / 2
        low, high = (middle, high) if sustains(middle) else (low, middle)
    return low


def validated_plan(model_set: ModelSet, environment: Problem, trial: Trial) -> Plan:
    """Return the plan that `cotenant plan` returns if it validates plans in this environment."""
    group = trial.group
    problem = msgspec.structs.replace(
        planner_problem(group.system, model_set, group.devices), rates=dict(group.mix), objective="rate"
    )
    role = next(iter(group.mix))

    def sustains(plan: Plan, scaled: Problem) -> bool:
        return meets_slo(plan, environment, trial, scaled.rates[role] / group.mix[role], [trial.seed])

    choice = portfolio.choose_planner(group.system.planner, portfolio=not group.system.alone)
    return largest_scale(choice.plan, problem, quick=choice.quick, accept=sustains, sound=False)


def meets_slo(plan: Plan, environment: Problem, trial: Trial, x: float, seeds: Sequence[int]) -> bool:
    """Return whether a plan reaches the paper's SLO attainment at x times the mix, on average over some seeds."""
    short = msgspec.structs.replace(trial, requests=min(SHORT_RUN, trial.requests), seed=seeds[0])
    if attainment(plan, environment, short, x) < SHORT_RUN_ATTAINMENT:
        return False
    runs = [msgspec.structs.replace(trial, seed=seed) for seed in seeds]
    return fmean(attainment(plan, environment, run, x) for run in runs) >= paper.ATTAINMENT


def attainment(plan: Plan, environment: Problem, trial: Trial, x: float) -> float:
    """Simulate x times the mix; return the fraction of all requests within their targets.

    This is the paper's measure, over all models together. A request of an application is answered when all its models
    have answered.
    """
    group = trial.group
    rates = {role: weight * x for role, weight in group.mix.items()}
    seconds = trial.requests / math.fsum(rates.values())
    if group.application is not None:
        environment = msgspec.structs.replace(environment, applications=(group.application,))
        plan = msgspec.structs.replace(plan, split={group.application.name: group.targets})
        rates = {group.application.name: x}
    report = simulate(plan, environment, Workload.poisson(rates), seconds=seconds, seed=trial.seed)
    rows = [row for row in report.models if row.model in rates]
    offered = math.fsum(row.offered for row in rows)
    return math.fsum(row.goodput for row in rows) / offered if offered else 1.0


def largest_plan(
    system: System, model_set: ModelSet, mix: Mapping[str, float], devices: int, start: float
) -> tuple[float, Plan | None]:
    """Return the largest multiple of the mix that the system serves, evenly spaced, and its plan."""
    if system.searches:
        problem = msgspec.structs.replace(
            planner_problem(system, model_set, devices), rates=dict(mix), objective="rate"
        )
        plan = portfolio.choose_planner(system.planner, portfolio=not system.alone).plan(problem)
        return (plan.scale, plan) if plan.scale else (0.0, None)
    feasible_plans: dict[float, Plan] = {}
    plans = plan_function(system, model_set, devices)

    def feasible(rates: Mapping[str, float]) -> bool:
        plan = plans(rates)
        if plan is not None:
            feasible_plans[math.fsum(rates.values())] = plan
        return plan is not None

    scale = largest_multiple(feasible, mix, start)
    return (scale, feasible_plans[max(feasible_plans)]) if feasible_plans else (0.0, None)


def with_scaled_targets(model_set: ModelSet, target_scale: float) -> ModelSet:
    """Return the model set with scaled targets, in whole ms as the published program needs."""
    targets = {
        role: math.ceil(target * target_scale * 1e3 - ROUNDING_TOLERANCE) / 1e3
        for role, target in model_set.targets.items()
    }
    return msgspec.structs.replace(model_set, targets=targets)
