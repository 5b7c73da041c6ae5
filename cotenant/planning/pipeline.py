"""Turn a problem into a plan, in the same way for the command line, Python, the server and a controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Planner, Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.candidates import provenance_of, with_proof, with_provenance
from cotenant.planners.headroom import with_headroom
from cotenant.planners.job_placement import place_jobs
from cotenant.planners.largest_rate import largest_scale
from cotenant.planners.one_worker_each import one_worker_each
from cotenant.planners.portfolio import PlannerChoice, choose_planner
from cotenant.planners.scale_search import is_sound, largest_accepted_scale, meets_slos
from cotenant.planners.slo_budget import split_slo_budgets, with_slo_budget
from cotenant.planning.front_end import plan_with_front_end
from cotenant.planning.priority import keeps_priorities, plan_by_priority, plan_for_part
from cotenant.planning.stage_timer import StageTimer
from cotenant.planning.validator import Validator

MAX_RETRIES = 3  # plans for tighter targets, after one that misses an SLO in the simulator
RETRY_SLO_FACTOR = 0.9  # on the target of a model that missed it, for each retry


def plan(
    problem: Problem,
    planner: str = "geometry",
    *,
    validate: bool = True,
    portfolio: bool = True,
    clock: Callable[[], float] | None = time.thread_time,
) -> Plan:
    """Plan for a problem, in these stages:

    1. split the SLOs of applications over their stages;
    2. ask the planner and its portfolio for candidates: for the rates, or for their largest multiple; where rates are
       assumed, give each model one worker instead if that serves them;
    3. add headroom for random arrivals, by local search and by planning for larger rates, or lower the multiple, until
       the forecast meets every SLO;
    4. validate by simulation, and retry with tighter targets or lower rates where an SLO is missed;
    5. state a bound that holds for every split, and how the plan came about;
    6. place best-effort jobs on what is left idle.

    For evenly spaced requests (`arrivals`) stages 3 and 4 are left out: the planner's own plan serves them.

    Where the devices do not suffice for the rates, models of higher priority are served first; where they suffice for
    no multiple of them, some models are served at up to their rates, and the multiple is 0. No more is planned than the
    front end can read, and what that takes of the processors is left to it.

    planner: a name. validate: whether to simulate; else the plan is as good as its forecast. portfolio: whether other
    planners are tried beside one that has a portfolio. clock: ends a search after the problem's time limit on a machine
    that is too slow for it, so that the plan may differ from machine to machine; without one it never does. The
    default counts the thread's processor time, so that it does not matter what else runs; who has to answer by a
    certain time passes one that does not stop.

    Raises PlanError for an unknown planner, and for a problem that it has no plan for.
    """
    begun = time.perf_counter()
    choice = choose_planner(planner, portfolio=portfolio)
    observed = _ObservedPlanner(choice.plan)
    choice = msgspec.structs.replace(choice, plan=observed)
    problem = msgspec.structs.replace(problem, clock=problem.clock or clock)

    def solve(asked: Problem) -> Plan:
        made = _solve(choice, asked, validate=validate)
        if asked.objective == "devices" and made.unserved and not keeps_priorities(made, asked):
            best = plan_by_priority(lambda part: _solve(choice, part, validate=validate), asked)
            return with_provenance(best, proven=provenance_of(made).proven)
        if asked.objective == "rate" and not made.scale and any(asked.rates.values()):
            part = plan_for_part(
                lambda some: _solve(choice, some, validate=validate), lambda few: _quickly(choice, few), asked
            )
            if part is not None:
                return msgspec.structs.replace(part, objective="rate", bound=made.bound)
        return made

    made = solve(problem) if problem.front_end is None else plan_with_front_end(solve, problem, problem.front_end)
    # What is proven of one split of targets, or of what the front end leaves of them, says nothing of all plans.
    infeasible = provenance_of(made).proven == "infeasible" and not problem.applications and problem.front_end is None
    made = with_proof(made, infeasible=infeasible)
    if observed.cut_off:
        made = with_provenance(made, ended_by="clock")
    elif provenance_of(made).ended_by == "proof" and provenance_of(made).proven != "optimal":
        made = with_provenance(made, ended_by="work")  # what was proven is of the plan before headroom was added
    if problem.jobs:
        made = place_jobs(made, problem)
    return msgspec.structs.replace(made, solve_s=time.perf_counter() - begun)


class _ObservedPlanner:
    """Call a planner, and note whether the clock ended any of its searches: then that of the plan was not the same."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.cut_off = False

    def __call__(self, problem: Problem) -> Plan:
        plan = self._planner(problem)
        self.cut_off |= plan.provenance is not None and plan.provenance.ended_by == "clock"
        return plan


def _quickly(choice: PlannerChoice, problem: Problem) -> Plan:
    """Return a plan that is not validated, for evenly spaced requests."""
    asked = msgspec.structs.replace(problem, arrivals="even", bounded=False)
    return _solve(choice, asked, validate=False)


def _solve(choice: PlannerChoice, problem: Problem, *, validate: bool) -> Plan:
    timer = StageTimer()
    with timer.stage("slo_budget"):
        split = split_slo_budgets(choice.plan, problem)
    asked = without_applications(problem, split)
    if problem.arrivals == "even":
        with timer.stage("candidates"):
            even = _planned_for_even_arrivals(choice, asked)
        with timer.stage("slo_budget"):
            even = with_slo_budget(choice.plan, problem, even, split)
        return with_provenance(even, stage_s=timer.rounded())
    validator = Validator(problem, split, timer)
    ask = timer.timed("candidates", choice.plan)
    with timer.stage("headroom"):
        made = _one_worker_each(choice.name, asked, validator, validate=validate) if problem.assumed else None
        if made is None:
            made = _planned(choice, ask, problem, asked, validator, timer, validate=validate)
    with timer.stage("slo_budget"):
        made = with_slo_budget(choice.plan, problem, made, split)
    return with_provenance(made, validation=validator.record(made), stage_s=timer.rounded())


def _planned_for_even_arrivals(choice: PlannerChoice, asked: Problem) -> Plan:
    """Return the planner's own plan: for evenly spaced requests it needs no headroom."""
    if asked.objective == "devices":
        return with_provenance(choice.plan(asked))
    return largest_scale(choice.plan, asked, accept=is_sound)


def _one_worker_each(planner: str, asked: Problem, validator: Validator, *, validate: bool) -> Plan | None:
    """Return the plan with one worker for each model; None where it misses an SLO."""
    made = one_worker_each(asked, planner)
    if made is None or not meets_slos(made, asked) or (validate and not validator.validate(made).passed):
        return None
    return made


def _planned(
    choice: PlannerChoice,
    ask: Planner,
    problem: Problem,
    asked: Problem,
    validator: Validator,
    timer: StageTimer,
    *,
    validate: bool,
) -> Plan:
    """Return the plan of the planner and its portfolio. ask: that planner, timed."""
    if problem.objective == "devices":
        made = with_headroom(ask, asked, with_provenance(ask(asked)))
    else:
        quick = {name: timer.timed("candidates", other) for name, other in choice.quick.items()}
        validated = validator.passes_quickly if validate else None
        made = largest_scale(ask, asked, quick=quick, validate=validated)
    if not validate:
        return made
    retried = _with_tighter_targets if problem.objective == "devices" else _with_lower_rates
    return retried(made, ask, problem, asked, validator)


def _with_tighter_targets(plan: Plan, ask: Planner, problem: Problem, asked: Problem, validator: Validator) -> Plan:
    """Return the plan where it passes; else the plan for tighter targets that passes, or misses least."""
    best, tighter = plan, asked
    least = shortfall = validator.validate(plan).shortfall
    models = {application.name: application.models() for application in problem.applications}
    for _ in range(MAX_RETRIES):
        if not shortfall:
            break
        tighter = _tightened(tighter, set().union(*(models.get(name, {name}) for name in shortfall)))
        plan = with_headroom(ask, tighter, plan)
        plan = with_provenance(plan, slo_factors=_slo_factors(tighter, asked))
        shortfall = validator.validate(plan).shortfall
        if sum(shortfall.values()) < sum(least.values()):
            best, least = plan, shortfall
    return best


def _with_lower_rates(plan: Plan, ask: Planner, problem: Problem, asked: Problem, validator: Validator) -> Plan:
    """Return the plan at the largest multiple of the rates, up to its own, that passes."""
    if not plan.scale:
        return plan

    def passes(lowered: Plan, scaled: Problem) -> bool:
        return meets_slos(lowered, scaled) and validator.validate(lowered, all_verdicts=False).passed

    lowered = largest_accepted_scale(plan, asked, accept=passes)
    return msgspec.structs.replace(lowered, objective="rate", bound=plan.bound)


def _tightened(problem: Problem, names: Collection[str]) -> Problem:
    models = tuple(
        msgspec.structs.replace(model, slo=model.slo * RETRY_SLO_FACTOR) if model.name in names else model
        for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def _slo_factors(tighter: Problem, asked: Problem) -> dict[str, float]:
    factors = {model.name: model.slo / asked.model(model.name).slo for model in tighter.models}
    return {name: round(factor, 6) for name, factor in factors.items() if factor < 1}
