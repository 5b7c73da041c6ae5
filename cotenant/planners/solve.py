"""What the planners themselves leave out: the largest rate a fleet can serve, and room for chance.

The planners are deterministic: they answer whether a fleet serves given rates, evenly spaced. Under random arrivals
such a plan may break promises that it keeps on paper, so what users ask for goes through here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import PlanError
from cotenant.planners import QUICK, Planner, Problem, load_planner
from cotenant.planners.applications import Split, without_applications
from cotenant.planners.capacity import with_totals
from cotenant.planners.check import check
from cotenant.planners.forecast import attains
from cotenant.planners.local_search import attainment_shortfall, improve_plan
from cotenant.planners.slo_budget import best_budget, bound_of
from cotenant.predictors import Interference, Load, NoInterference

Accept = Callable[[Plan, Problem], bool]

CLOSE = 1.005  # how near the largest multiple of the rates is found
COARSE = 1.02  # the same, of each plan, where a judge is asked
MORE = 1.15  # times its rate, what a model is planned for whose promise chance would break
WIDER = 12  # times that more is planned for, at most
# What is planned for as well: parts of the targets, and of what neighbours are said to cost. Half of the targets leaves
# room for neighbours and for chance at once.
ROOMS = ((0.8, 1.0), (0.65, 1.0), (0.65, 0.0), (0.5, 0.0))
QUICK_ROOMS = ((0.8, 0.5), (0.6, 0.0), (0.5, 0.0))  # the same, of the quick planners
PARTS = (1.0, 0.96, 0.92, 0.84, 0.68, 0.36)  # of what a plan carries, tried in turn


class ScaledInterference(msgspec.Struct, frozen=True):
    """Neighbours that cost a part of what they are said to."""

    of: Interference
    part: float

    @property
    def interferes(self) -> bool:
        return self.part > 0 and self.of.interferes

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 1.0 + self.part * (self.of.slowdown(victim, colocated) - 1.0)


def meets_slos(plan: Plan, problem: Problem) -> bool:
    """Whether a plan is sound, and the forecast sees every promise kept."""
    return not check(plan, problem) and attains(plan, problem)


def solve(name: str, problem: Problem) -> Plan:
    """The plan of a named planner for either objective, with room for Poisson arrivals where the fleet has it."""
    planner = load_planner(name)
    split = slo_budget_of(planner, problem)
    asked = without_applications(problem, split)
    plan = (with_headroom if problem.objective == "devices" else largest_scale)(planner, asked)
    return with_slo_budget(planner, problem, plan, split)


def with_slo_budget(planner: Planner, problem: Problem, plan: Plan, split: Split) -> Plan:
    """A plan for a problem whose targets were split so. What it proves of this split it says of every one."""
    if not split:
        return plan
    return msgspec.structs.replace(plan, split=split, bound=plan.bound and bound_of(planner, problem))


def slo_budget_of(planner: Planner, problem: Problem) -> Split:
    """How the targets of the applications are best split over their stages, for this planner; nothing where there are
    none. Raises PlanError for a target that no split can meet."""
    return best_budget(problem, lambda asked: _cost(planner, asked)) if problem.applications else {}


def _cost(planner: Planner, problem: Problem) -> tuple[float, ...]:
    """What is left unserved, what it takes, and by how much promises would be broken: evenly spaced requests first."""
    plan = planner(problem)
    if problem.objective == "rate":
        most = plan if plan.objective == "rate" else largest_scale(planner, problem, accept=_sound)
        return (-most.scale,)
    asked = sum(problem.rates.values())
    takes = float(plan.devices_used) if plan.cost_per_hour is None else plan.cost_per_hour
    return (
        sum(plan.unserved.values()) / asked if asked else 0.0,
        takes,
        sum(attainment_shortfall(plan, problem).values()),
    )


def with_headroom(planner: Planner, problem: Problem, begin: Plan | None = None) -> Plan:
    """A plan for the rates asked for whose forecast keeps the promises, by planning models that would break theirs for
    more than is asked. Where there is no room for more: as near as it came.

    What is left unserved is nobody's promise: the room is for chance at the rates that are served.
    begin: a plan for the same rates to begin with, such as one that was made for targets that are easier to hold.
    """
    plan = planner(problem) if begin is None else begin
    bound, carried = plan.bound, plan.rates()
    served = _at(problem, {name: min(rate, carried.get(name, 0.0)) for name, rate in problem.rates.items()})
    room = dict.fromkeys(problem.rates, 1.0)
    for _ in range(WIDER):
        plan = improve_plan(plan, served)
        missing = attainment_shortfall(plan, served)
        if not missing:
            break
        room |= {name: room[name] * MORE for name in missing}
        wider = planner(_at(problem, {name: rate * room[name] for name, rate in served.rates.items()}))
        if wider.unserved:
            break
        plan = _carrying(wider, served)
    # What was proven of larger rates does not hold for these.
    return msgspec.structs.replace(with_totals(plan, problem), bound=bound)


def largest_scale(
    planner: Planner, problem: Problem, *, accept: Accept = meets_slos, judge: Accept | None = None, sound: bool = True
) -> Plan:
    """The plan for the largest multiple of the rates that `accept` takes, and the judge where there is one, to 0.5 %.

    That for evenly spaced requests comes first, and is lowered until chance has room. A planner that answers the
    objective itself goes to the very limit of the targets, and is asked for tighter ones, too, and with neighbours that
    cost less: shorter rounds may leave more room, and so may a plan of the quick planners. Another is asked for
    multiples in between, with room for chance in each.

    accept: given a plan and the problem at those rates; by default, whether it is sound and its forecast keeps every
    promise. judge: the same of what was accepted, and dear: it is asked about the likeliest plans first. sound: whether
    no other plan is accepted. Who takes those that are not has a better judge than the prediction of what neighbours
    cost, and so the most that is sound is not all that may be had.
    """
    endless = next((kind.name for kind in problem.fleet if kind.count is None), None)
    if endless is not None:
        raise PlanError(f"the largest rate of endless devices is endless: give kind {endless!r} a count")
    if not any(problem.rates.values()):
        return msgspec.structs.replace(planner(_at(problem, problem.rates)), objective="rate")

    most = planner(problem)
    if most.objective == "rate" and most.scale == 0:
        return most  # some model cannot be served at all; the others are, as far as they ask
    if most.objective == "rate":
        best = _with_room(most, planner, problem, accept, judge, sound=sound)
    else:
        best = _by_multiples(planner, problem, _both(accept, judge), _nothing(most, problem))
    if judge is not None and best.scale:
        best = _finer(best, problem, _both(accept, judge))
    return msgspec.structs.replace(best, planner=most.planner, objective="rate", bound=most.bound)


def _both(accept: Accept, judge: Accept | None) -> Accept:
    return accept if judge is None else lambda plan, problem: accept(plan, problem) and judge(plan, problem)


def _finer(plan: Plan, problem: Problem, accept: Accept) -> Plan:
    """The plan for a little more than a coarse search found."""

    def attempt(scaled: Problem) -> Plan:
        return improve_plan(_carrying(plan, scaled), scaled)

    return _largest(attempt, problem, accept, above=plan, below=plan.scale * COARSE)


def _with_room(
    most: Plan, planner: Planner, problem: Problem, accept: Accept, judge: Accept | None, *, sound: bool
) -> Plan:
    """The largest multiple that is kept, of a planner whose own answer to that is `most`."""
    best = largest_accepted_scale(most, problem, accept=accept)
    stands = best.scale * CLOSE >= most.scale and (judge is None or judge(best, _times(problem, best.scale)))
    if sound and stands:
        return best  # where chance takes nothing, nothing is to be won
    rooms = [room for room in ROOMS if room[1] == 1 or problem.interference.interferes]
    others = (planner(_roomier(problem, part, beside)) for part, beside in rooms)
    if judge is None:
        for other in others:
            if other.scale > best.scale:
                best = largest_accepted_scale(other, problem, accept=accept, above=best)
    else:
        likely = [best, *(largest_accepted_scale(other, problem, accept=accept) for other in others)]
        best = best if stands else _nothing(most, problem)
        accept = _both(accept, judge)
        for other in sorted(likely, key=lambda plan: -plan.scale):
            if other.scale > best.scale * CLOSE:
                best = largest_accepted_scale(other, problem, accept=accept, above=best, close=COARSE)
    close = CLOSE if judge is None else COARSE
    # The most that is served on paper may leave so little room that a simpler plan keeps more.
    for name in QUICK:
        best = _by_multiples(load_planner(name), problem, accept, best, close)
        for part, beside in QUICK_ROOMS if problem.interference.interferes else ():
            most = _largest(load_planner(name), _roomier(problem, part, beside), _served, above=best, below=math.inf)
            if most.scale > best.scale * CLOSE:
                best = largest_accepted_scale(most, problem, accept=accept, above=best, close=close)
    return best


def _by_multiples(planner: Planner, problem: Problem, accept: Accept, above: Plan, close: float = CLOSE) -> Plan:
    """The largest multiple that is kept, of a planner that is asked for one after the other; no less than `above`."""

    def kept(plan: Plan, scaled: Problem) -> bool:
        return not plan.unserved and accept(plan, scaled)

    most = _largest(planner, problem, _served, above=above, below=math.inf)
    if most.scale <= above.scale * CLOSE:
        return above
    best = largest_accepted_scale(most, problem, accept=accept, above=above, close=close)

    def roomy(scaled: Problem) -> Plan:
        return with_headroom(planner, scaled)

    if not _more(roomy, problem, kept, best):
        return best
    return _largest(roomy, problem, kept, above=best, below=most.scale, close=close)


def largest_accepted_scale(
    plan: Plan, problem: Problem, *, accept: Accept = meets_slos, above: Plan | None = None, close: float = CLOSE
) -> Plan:
    """The plan for the largest multiple of the rates, up to what it carries, that `accept` takes.

    It may stand as it is. Else it keeps its devices, cut anew where promises would break: the less they have to do, the
    better they do it.
    above: a plan that is taken, and the answer unless there is more.
    """
    above = above or _nothing(plan, problem)
    best = plan

    def attempt(scaled: Problem) -> Plan:
        return improve_plan(_carrying(best, scaled), scaled)

    def taken(lower: Plan, scaled: Problem) -> bool:
        nonlocal best
        if not accept(lower, scaled):
            return False
        best = lower
        return True

    below = most = with_totals(plan, problem).scale
    full = _times(problem, most)
    stands = _carrying(plan, full)
    if most > above.scale and accept(stands, full):
        return with_totals(stands, problem)
    if not _more(attempt, problem, taken, above):
        return above
    for part in PARTS:
        if most * part <= above.scale:
            break
        scaled = _times(problem, most * part)
        lower = attempt(scaled)
        if lower != stands and taken(lower, scaled):
            above = with_totals(best, problem)
            break
        below = most * part
    return _largest(attempt, problem, taken, above=above, below=below, close=close)


def _more(planner: Planner, problem: Problem, taken: Accept, above: Plan) -> bool:
    """Whether more than that plan serves may be taken: where a little more is not, no more is, and one question will
    do instead of a dozen."""
    little = _times(problem, above.scale * CLOSE)
    return above.scale == 0 or taken(planner(little), little)


def _largest(
    planner: Planner, problem: Problem, taken: Accept, *, above: Plan, below: float, close: float = CLOSE
) -> Plan:
    """The plan for the largest multiple of the rates that is taken, from that of one plan up to another multiple."""
    best, low, high = above, above.scale, below
    while high > low * close and high > 1e-6:
        scale = (low * 2 or 1.0) if math.isinf(high) else high / 4 if low == 0 else (low + high) / 2
        plan = planner(scaled := _times(problem, scale))
        if taken(plan, scaled):
            best, low = plan, scale
        else:
            high = scale
    return with_totals(best, problem)


def _roomier(problem: Problem, part: float, beside: float) -> Problem:
    """With parts of the targets, and of what neighbours cost. Nobody asks for its bound."""
    models = tuple(msgspec.structs.replace(model, slo=model.slo * part) for model in problem.models)
    interference = problem.interference
    if beside < 1:
        interference = ScaledInterference(interference, beside) if beside else NoInterference()
    return msgspec.structs.replace(problem, models=models, interference=interference, bounded=False)


def _served(plan: Plan, problem: Problem) -> bool:
    return not plan.unserved and _sound(plan, problem)


def _sound(plan: Plan, problem: Problem) -> bool:
    return not check(plan, problem)


def _nothing(plan: Plan, problem: Problem) -> Plan:
    return with_totals(msgspec.structs.replace(plan, devices=()), problem)


def _at(problem: Problem, rates: dict[str, float]) -> Problem:
    return msgspec.structs.replace(problem, rates=rates, objective="devices")


def _times(problem: Problem, scale: float) -> Problem:
    return _at(problem, {name: rate * scale for name, rate in problem.rates.items()})


def _carrying(plan: Plan, problem: Problem) -> Plan:
    """The plan with each model's rates multiplied so that they add up to what is asked; nothing is left unserved."""
    carried = plan.rates()
    factors = {name: rate / carried[name] for name, rate in problem.rates.items() if carried.get(name)}
    return with_totals(_scaled(plan, factors), problem)


def _scaled(plan: Plan, factors: dict[str, float]) -> Plan:
    """The plan with each model's rates multiplied."""

    def placement(old: Placement) -> Placement:
        return msgspec.structs.replace(old, rate=old.rate * factors.get(old.model, 1.0))

    def partition(old: Partition) -> Partition:
        return msgspec.structs.replace(old, placements=tuple(placement(p) for p in old.placements))

    def device(old: Device) -> Device:
        return msgspec.structs.replace(old, partitions=tuple(partition(p) for p in old.partitions))

    return msgspec.structs.replace(plan, devices=tuple(device(d) for d in plan.devices))
