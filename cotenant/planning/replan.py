"""Answer a controller's `Solve`: keep the plan in force if it serves the new rates, else retune it, else plan anew.

What a controller needs at once comes first: a step is taken only where the one before does not do (InSS, section 4.4,
changes batches first and shares only where that fails). Meant for a process of its own, beside the server's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from cotenant.control.adaptation import Cause, Solve, Solved, SolveStep
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import diff_plans, renumber_devices
from cotenant.core.profile import slowed_profiles
from cotenant.core.units import show_rate
from cotenant.errors import CotenantError, PlanError
from cotenant.planners import Problem
from cotenant.planners.applications import carried_rates, overlong_paths, slo_of, without_applications
from cotenant.planners.candidates import without_proof
from cotenant.planners.capacity import ROUNDING_TOLERANCE, with_totals
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.geometry import may_serve
from cotenant.planners.idle_models import with_idle_models
from cotenant.planners.local_search import rebatched_plan
from cotenant.planners.rates import at_rates, at_scale, rescaled_plan
from cotenant.planning.front_end import planned_problem
from cotenant.planning.pipeline import plan as plan_problem
from cotenant.planning.plan_scores import part_in_time, sustained_rates

ENOUGH_IN_TIME = 0.99  # of what is offered, with batches that vary, from which on no other plan is looked for
PARTS_OF_THE_REST = (1.0, 0.8, 0.6, 0.4)  # of what all devices serve of the rates asked for, tried beside those offered

TOO_SLOW = "batches are too slow for every target; answers are late until other programs leave more"

Answer = tuple[SolveStep, Plan]


class Replanner:
    """Solve for a problem whose rates, devices and slowdowns change.

    problem: models, profiles, predictor, and the devices that can be had. planner: a name. time_limit: seconds that it
    may search. validate: whether plans are simulated before they are given, which takes seconds. timed: whether a
    search also ends by the clock, as where callers wait; a simulation gives the same plans on every machine without.
    """

    def __init__(
        self,
        problem: Problem,
        planner: str = "geometry",
        *,
        time_limit: float = 1.0,
        validate: bool = False,
        timed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._problem = msgspec.structs.replace(problem, time_limit=time_limit, bounded=False, current=None)
        self._planner = planner
        self._validate = validate
        self._timed = timed
        self._clock = clock

    def __call__(self, solve: Solve) -> Solved:
        """Return the answer to a `Solve`; it raises nothing, since a controller has to hear of every end."""
        begun = self._clock()
        try:
            solved = self._solved(solve)
        except CotenantError as error:
            solved = Solved(number=solve.number, error=str(error))
        return msgspec.structs.replace(solved, seconds=self._clock() - begun)

    def _solved(self, solve: Solve) -> Solved:
        """Return the answer, without slowdowns where they leave nobody served: late answers are better than none, and
        where no batch runs nobody would see that the machine is as fast as it was."""
        solved = self._with_room(solve)
        if not solve.slowdowns or solved.plan is None:
            return solved
        served = carried_rates(solved.plan, self._problem)
        wanted = [name for name, rate in solve.offered.items() if rate] or list(solve.rates)
        if any(served.get(name) for name in wanted):
            return solved
        unslowed = self._best(self._problem, msgspec.structs.replace(solve, slowdowns={}))
        late = msgspec.structs.replace(unslowed, slowed=False)
        return late if late.plan is None else msgspec.structs.replace(late, short=late.short or TOO_SLOW)

    def _with_room(self, solve: Solve) -> Solved:
        """Return the answer without room for noise where batches have become slower, since the noise is in what was
        observed already. Where such a plan has a target without a millisecond to spare, and misses it as soon as
        batches vary, return the one with room if more is in time by that."""
        if not solve.slowdowns:
            return self._best(self._problem, solve)
        roomy_problem = msgspec.structs.replace(
            self._problem, profiles=slowed_profiles(self._problem.profiles, solve.slowdowns)
        )
        tight_problem = _without_noise(roomy_problem)
        tight = self._best(tight_problem, solve)
        if tight.plan is None:
            return tight
        offered = at_rates(tight_problem, _known(tight_problem, solve.offered))
        kept = part_in_time(tight.plan, offered)
        if kept >= ENOUGH_IN_TIME:
            return tight
        roomy = self._best(roomy_problem, solve)
        return roomy if roomy.plan is not None and part_in_time(roomy.plan, offered) > kept else tight

    def _best(self, problem: Problem, solve: Solve) -> Solved:
        """Return the answer where batches take as long as the problem says."""
        asked = at_rates(problem, _known(problem, solve.rates))
        there = with_devices(asked, Counter(device.kind for device in solve.devices))
        if not there.fleet:
            return Solved(number=solve.number, error="no device is left", devices=_counts(self._plan(asked, solve)))
        if solve.fill:
            filled = self._filled(there, solve)
            return self._answer(solve, SolveStep.REPLAN, filled, there, _counts(filled))
        small = self._in_place(there, solve)
        if small is not None:
            return self._answer(solve, *small, there, _counts(small[1]))
        problem, wanted = self._with_headroom(asked, solve)
        counts = {} if wanted.unserved else _counts(wanted)
        if there.fleet != asked.fleet and (wanted.unserved or not _fits(wanted, solve)):
            problem, wanted = self._with_headroom(there, solve)
        return self._answer(solve, SolveStep.REPLAN, wanted, problem, counts or _counts(wanted))

    def _filled(self, there: Problem, solve: Solve) -> Plan:
        """Return a plan for the largest multiple of the rates that the devices which are there serve."""
        most = self._plan(msgspec.structs.replace(there, objective="rate"), solve)
        return msgspec.structs.replace(most, objective=there.objective, bound=None)

    def _with_headroom(self, problem: Problem, solve: Solve) -> tuple[Problem, Plan]:
        """Return a plan for the rates that are asked for; where that leaves some unserved, one for as much of them as
        all devices serve, but of none less than is offered now; or, with one device or where there is no such plan,
        one for the rates offered now, with what nobody asks for now as far as there is room. With it the problem that
        it solves.

        To find out that a plan is impossible takes longest. So none is searched for where the relaxation tells, and the
        plan for less comes first where batches have become slower, since then even that may be impossible.
        """
        offered = {name: min(rate, solve.offered.get(name, rate)) for name, rate in problem.rates.items()}
        least, smaller = at_rates(problem, offered), None
        if solve.slowdowns and offered != problem.rates:
            smaller = self._plan(least, solve)
            if smaller.unserved or not attains(smaller, without_applications(least, smaller.split)):
                return _with_idle(smaller, least, problem)  # there is no headroom to be had
        larger = self._plan(problem, solve) if offered == problem.rates or _may_serve(problem) else None
        if larger is not None and offered == problem.rates:
            return problem, larger
        if larger is not None and not larger.unserved:
            spread = solve.bursts or solve.cause is Cause.SLO
            return (self._spread(problem, larger, solve) if spread else None) or (problem, larger)
        # On one device the plan for less has all of it, too, and takes a fraction of the time.
        if solve.bursts or len(solve.devices) > 1:
            filled = self._filled(problem, solve)
            between = at_scale(problem, min(1.0, filled.scale))
            if not _lacks(between, offered):
                return between, _at(filled, between)
            smaller = smaller or self._plan(least, solve)
            if not smaller.unserved and (beside := self._beside(between, offered, solve)) is not None:
                return beside
        return _with_idle(smaller or self._plan(least, solve), least, problem)

    def _spread(self, problem: Problem, larger: Plan, solve: Solve) -> tuple[Problem, Plan] | None:
        """Return a plan that gives all of its devices to the rates in proportion, and the problem that it solves: the
        devices of `larger`, and where an SLO is missed no fewer than now. None where it serves less."""
        devices = Counter(_counts(larger))
        if solve.cause is Cause.SLO:
            devices |= Counter(_counts(solve.current))
        filled = self._filled(with_devices(problem, devices), solve)
        return None if filled.scale < 1.0 else (problem, _at(filled, problem))

    def _beside(self, problem: Problem, offered: Mapping[str, float], solve: Solve) -> tuple[Problem, Plan] | None:
        """Return a plan for the rates that are offered, and as large a part of the problem's as fits beside them, and
        the problem that it solves; None where less than all that is offered is served. Those whose rates have not
        risen yet are asked for a moment later where bursts come together, and devices that bursts need are not given
        back in one of them."""
        for part in PARTS_OF_THE_REST:
            rates = {name: max(offered[name], part * rate) for name, rate in problem.rates.items()}
            beside = at_rates(problem, rates)
            if _may_serve(beside) and (filled := self._filled(beside, solve)).scale >= 1.0:
                return beside, _at(filled, beside)
        return None

    def _in_place(self, problem: Problem, solve: Solve) -> Answer | None:
        """Return the plan in force where it serves the rates, perhaps with other batches; None where it does not."""
        current = solve.current
        if solve.step is SolveStep.REPLAN or not {device.id for device in current.devices} <= set(solve.devices):
            return None
        if problem.applications and overlong_paths(current, problem):
            return None  # it does not serve them all
        models = without_applications(problem, current.split)
        if any(rate and not current.rate(name) for name, rate in models.rates.items()):
            return None
        rescaled = without_proof(rescaled_plan(current, models))
        if solve.step is SolveStep.KEEP and not solve.slowdowns and _serves(rescaled, models):
            return SolveStep.KEEP, rescaled
        retuned = rebatched_plan(rescaled, models)
        if retuned is None or not _serves(retuned, models):
            return None
        return (SolveStep.REPLAN if diff_plans(current, retuned).workers_started else SolveStep.RETUNE), retuned

    def _plan(self, problem: Problem, solve: Solve) -> Plan:
        problem = msgspec.structs.replace(problem, current=solve.current)
        search_clock = self._clock if self._timed else None
        return plan_problem(problem, self._planner, validate=self._validate, clock=search_clock)

    def _answer(self, solve: Solve, step: SolveStep, plan: Plan, problem: Problem, devices: dict[str, int]) -> Solved:
        plan = renumber_devices(plan, solve.current, solve.devices)
        # An application whose stage is unloaded comes back with it.
        plan = msgspec.structs.replace(plan, split=solve.current.split | plan.split)
        plan = with_totals(plan, without_applications(problem, plan.split))
        violations = check(plan, problem)
        if violations:
            raise PlanError(f"the plan violates {violations[0]}")
        return Solved(
            number=solve.number,
            step=step,
            plan=plan,
            devices=devices,
            rates=problem.rates,
            sustained=sustained_rates(plan, problem),
            short=_short(plan, at_rates(problem, _known(problem, solve.offered))),
        )


def with_devices(problem: Problem, counts: Mapping[str, int]) -> Problem:
    """Return the problem with so many devices of each kind, and without the kinds of which there are none."""
    fleet = [msgspec.structs.replace(kind, count=counts[kind.name]) for kind in problem.fleet if counts.get(kind.name)]
    return msgspec.structs.replace(problem, fleet=tuple(fleet))


def _at(filled: Plan, problem: Problem) -> Plan:
    """Return a plan for a multiple of the problem's rates at these rates."""
    return without_proof(rescaled_plan(filled, without_applications(problem, filled.split)))


def _lacks(problem: Problem, offered: Mapping[str, float]) -> bool:
    return any(problem.rates[name] < rate for name, rate in offered.items())


def _with_idle(plan: Plan, problem: Problem, asked: Problem) -> tuple[Problem, Plan]:
    """Return the plan with what has a rate in `asked` alone, as far as there is room, and the problem that it solves.

    problem: the one that `plan` was made for.
    """
    idle = {name: asked.rates[name] for name, rate in problem.rates.items() if not rate and asked.rates[name]}
    while True:
        wanted = at_rates(problem, problem.rates | idle)
        made = with_idle_models(plan, without_applications(wanted, plan.split))
        served = carried_rates(made, wanted)
        # Where one of an application's models has no place, the others need none for it.
        if not (lacking := {each.name for each in problem.applications if each.name in idle and not served[each.name]}):
            break
        idle = {name: rate for name, rate in idle.items() if name not in lacking}
    fitting = at_rates(problem, problem.rates | {name: served[name] for name in idle})
    return fitting, _without_surplus(made, without_applications(fitting, plan.split))


def _without_surplus(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with no model at more than its rate: those of an application may have got different parts."""
    over = {name: rate for name, rate in problem.rates.items() if plan.rate(name) > rate}
    return rescaled_plan(plan, at_rates(problem, over)) if over else plan


def _without_noise(problem: Problem) -> Problem:
    """Return the problem without room for noise in batches."""
    if problem.front_end is None:
        return problem
    return msgspec.structs.replace(problem, front_end=msgspec.structs.replace(problem.front_end, noise=1.0))


def _may_serve(problem: Problem) -> bool:
    # What applications leave to each model is known once they are planned for.
    return bool(problem.applications) or may_serve(planned_problem(problem))


def _known(problem: Problem, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of what a problem has."""
    return {name: rates.get(name, 0.0) for name in problem.rates}


def _serves(plan: Plan, problem: Problem) -> bool:
    return not plan.unserved and not check(plan, problem) and attains(plan, problem)


def _fits(plan: Plan, solve: Solve) -> bool:
    there = Counter(device.kind for device in solve.devices)
    return all(there[kind] >= count for kind, count in _counts(plan).items())


def _counts(plan: Plan) -> dict[str, int]:
    return dict(Counter(device.kind for device in plan.devices))


def _short(plan: Plan, offered: Problem) -> str:
    """Return what a plan leaves unserved of the rates that are offered, in words."""
    served = carried_rates(plan, offered)
    priorities = {name: slo_of(offered, name).priority for name in offered.rates}
    differ = len(set(priorities.values())) > 1
    missing = [
        f"{name} {show_rate(rate - served[name])} of {show_rate(rate)}/s"
        + (f" (priority {priorities[name]})" if differ else "")
        for name, rate in sorted(offered.rates.items())
        if rate > served[name] * (1 + ROUNDING_TOLERANCE)
    ]
    return f"the devices that are there leave unserved: {', '.join(missing)}" if missing else ""
