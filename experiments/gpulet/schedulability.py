"""The largest rate that a way keeps in simulation: the paper's "SLO preserved max throughput" (section 5.2).

The paper asks for more until more than 1 % of all requests are late or dropped. So here, with the simulator for its
servers, and neighbours that do what `world` says, whatever the planner believes of them. A planner answers for evenly
spaced requests, and requests come at random; so each is also asked to plan for tighter targets, which leaves room in
every round, or for easier ones, as what it believes of neighbours may be too dark. Of these plans the one that keeps
most counts. None is given more than it was made for.

Geometry is what `cotenant plan` makes of it: for the largest rate that plans for tighter targets and for neighbours
that cost less, too, asks the quick planners, and takes what keeps most (`planners.largest_rate.largest_scale`). The
simulator alone judges it here, as it does the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import Problem, portfolio
from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.largest_rate import largest_scale
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from experiments.gpulet import paper
from experiments.gpulet.ground_truth import world
from experiments.gpulet.max_rates import Group, largest, players
from experiments.gpulet.model_sets import Cast
from experiments.gpulet.systems import Way, asked, planned

CLOSE = 0.01  # how near a rate is found
PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.15)  # of the targets, what is planned for
OWN_PARTS = (1.0, 0.8, 1.15)  # where the planner looks for room by itself
LOOK = 20_000  # requests in one run
GLANCE = 4_000  # requests that tell most rates apart that are far off,
FAR = 0.98  # in time being less than this of them


class Kept(msgspec.Struct, frozen=True):
    """Requests/s of a group in all. planned: what the way says that it serves at the targets asked for, evenly spaced;
    kept: what that plan keeps; most: what the best of its plans keeps, which was made for `part` of the targets."""

    planned: float
    kept: float
    most: float
    part: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A group of models, and how long to look, in requests of one run."""

    group: Group
    look: int = LOOK
    seed: int = 0


def most_kept(trial: Trial) -> Kept:
    group = trial.group
    cast = players(group)
    machines = world(cast, group.devices, trial.seed)
    unit = math.fsum(group.mix.values())
    best = Kept(0.0, 0.0, 0.0, 1.0)
    for part in OWN_PARTS if group.way.planner == "geometry" else PARTS:
        scale, plan = largest_plan(group.way, eased(cast, part), group.mix, group.devices, cast.units[0])
        if plan is None or (scale * unit <= best.most and group.way.planner != "geometry"):
            continue
        most = kept_by(plan, machines, trial, best.most / unit, scale) * unit
        if group.way.planner == "geometry":
            most = max(most, as_asked(eased(cast, part), machines, trial) * unit)
        if part == 1:
            best = Kept(scale * unit, most, most, part)
        elif most > best.most:
            best = msgspec.structs.replace(best, most=most, part=part)
    return best


def kept_by(plan: Plan, machines: Problem, trial: Trial, low: float, high: float) -> float:
    """The largest multiple of the group's mix, up to `high`, of which the plan answers enough in time; `low` where that
    is no more."""

    def keeps(x: float) -> bool:
        return enough(plan, machines, trial, x)

    if keeps(high):
        return high
    step = low * (1 + CLOSE) or high * 0.9
    if low and (step >= high or not keeps(step)):
        return low
    # The less is asked of a plan the more of it is in time, so that bisection is sound, but for chance.
    while not low and high > CLOSE:
        low, high, step = (step, high, step) if keeps(step) else (0.0, step, step * 0.8)
    while high - low > CLOSE * high and low:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def as_asked(cast: Cast, machines: Problem, trial: Trial) -> float:
    """The multiple of the group's mix that `cotenant plan` answers, were these the machines that it simulates."""
    group = trial.group
    problem = msgspec.structs.replace(asked(group.way, cast, group.devices), rates=dict(group.mix), objective="rate")
    role = next(iter(group.mix))

    def keeps(plan: Plan, scaled: Problem) -> bool:
        return enough(plan, machines, trial, scaled.rates[role] / group.mix[role])

    choice = portfolio.choose_planner("geometry")
    return largest_scale(choice.plan, problem, quick=choice.quick, accept=keeps, sound=False).scale


def enough(plan: Plan, machines: Problem, trial: Trial, x: float) -> bool:
    """Whether a plan answers as many in time as the paper asks for, at x times the group's mix."""
    glance = msgspec.structs.replace(trial, look=min(GLANCE, trial.look))
    return in_time(plan, machines, glance, x) >= FAR and in_time(plan, machines, trial, x) >= paper.KEPT


def in_time(plan: Plan, machines: Problem, trial: Trial, x: float) -> float:
    """Of all requests at x times the group's mix, the fraction that is answered in time: the paper's measure, which
    tells no model from another. A request of an application is answered when all its models are."""
    group = trial.group
    rates = {role: weight * x for role, weight in group.mix.items()}
    seconds = trial.look / math.fsum(rates.values())
    if group.application is not None:
        machines = msgspec.structs.replace(machines, applications=(group.application,))
        plan = msgspec.structs.replace(plan, split={group.application.name: group.targets})
        rates = {group.application.name: x}
    report = simulate(machines, plan, Workload.poisson(rates), seconds=seconds, seed=trial.seed)
    asked = [row for row in report.models if row.model in rates]
    offered = math.fsum(row.offered for row in asked)
    return math.fsum(row.goodput for row in asked) / offered if offered else 1.0


def largest_plan(
    way: Way, cast: Cast, mix: Mapping[str, float], devices: int, start: float
) -> tuple[float, Plan | None]:
    """The largest multiple of the mix that the way serves, evenly spaced, and its plan."""
    if way.planner == "geometry":
        problem = msgspec.structs.replace(asked(way, cast, devices), rates=dict(mix), objective="rate")
        plan = portfolio.plan(problem)
        return (plan.scale, plan) if plan.scale else (0.0, None)
    found: dict[float, Plan] = {}
    plans = planned(way, cast, devices)

    def serves(rates: Mapping[str, float]) -> bool:
        plan = plans(rates)
        if plan is not None:
            found[math.fsum(rates.values())] = plan
        return plan is not None

    scale = largest(serves, mix, start)
    return (scale, found[max(found)]) if found else (0.0, None)


def eased(cast: Cast, part: float) -> Cast:
    """The cast with so much of its targets, in whole ms: the published program knows no others."""
    targets = {role: math.ceil(target * part * 1e3 - ROUNDING_TOLERANCE) / 1e3 for role, target in cast.targets.items()}
    return msgspec.structs.replace(cast, targets=targets)
