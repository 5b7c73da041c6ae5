"""HetSev's autoscaling (Electronics 2023, section 4.1): which kind of GPU to add or remove, by price and launch time.

HetSev decides for one service at a time, here a model, and counts instances: a model on a fixed share of a device. Two
policies answer its question, what to add and to remove: `LeastCostScaling` solves the paper's integer program exactly,
`GreedyScaling` is the heuristic that the paper runs. Devices wanted are those that the instances fill.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import highspy
import msgspec

from cotenant.control.scaling.context import ScalingContext
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import latency_curve


class InstanceType(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one service on one kind of device (the paper's i).

    cost: of one, in any unit of money an hour (C_i). launch: seconds until one is ready (O_i). capacity: requests/s of
    one (T_i). running: instances now (N_i). most: how many there may be, for what other services leave (R_total / R_i).
    """

    kind: str
    cost: float
    launch: float
    capacity: float
    running: int
    most: float = math.inf

    def objective(self, added: int, unpredictability: float) -> float:
        """Return what a scaling action adds to the paper's objective. unpredictability: λ, per second of launch."""
        return self.cost * (added + unpredictability * self.launch * max(added, 0))


def least_cost_action(types: Sequence[InstanceType], rate: float, unpredictability: float) -> dict[str, int] | None:
    """Solve the paper's integer program: by kind, how many instances to add, or to remove where below 0.

    rate: requests/s to carry (W). None: all that there may be do not carry it. Types that miss the SLO are not to be
    among these (constraint 4).
    """
    if not types:
        return {} if rate <= 0 else None
    program = highspy.Highs()  # type: ignore[no-untyped-call]
    program.setOptionValue("output_flag", False)
    program.setOptionValue("threads", 1)  # HiGHS refuses another number later in the same process
    program.setOptionValue("mip_rel_gap", 0.0)
    columns = range(len(types))
    for each in types:  # X_i
        most = highspy.kHighsInf if math.isinf(each.most) else max(0.0, math.floor(each.most) - each.running)
        program.addCol(each.cost, -float(each.running), max(most, -each.running), 0, [], [])
    for each in types:  # max(X_i, 0)
        program.addCol(each.cost * unpredictability * each.launch, 0.0, highspy.kHighsInf, 0, [], [])
    for i in columns:
        program.changeColIntegrality(i, highspy.HighsVarType.kInteger)
        program.addRow(0.0, highspy.kHighsInf, 2, [i, len(types) + i], [-1.0, 1.0])
    missing = rate - math.fsum(each.capacity * each.running for each in types)
    program.addRow(missing, highspy.kHighsInf, len(types), list(columns), [each.capacity for each in types])
    program.run()
    if program.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    solution = program.getSolution().col_value
    return {each.kind: round(solution[i]) for i, each in enumerate(types)}


def cheapest_addition(
    types: Sequence[InstanceType], rate: float, saturation: float, unpredictability: float
) -> dict[str, int]:
    """Select the kind whose instances bring saturation down to a threshold for the least objective (scaling out).

    Of the kinds of which there are enough; of the one with the most capacity, all there are, where none is enough. The
    paper's constraint 1 asks for capacity for the rate alone, which running instances at 80 % have already; added is
    at least one, and as many as the threshold takes, lest the next period adds again.
    """
    missing = rate / saturation - math.fsum(each.capacity * each.running for each in types)
    choices = []
    for each in types:
        needed = max(1, math.ceil(missing / each.capacity - 1e-9))
        if each.running + needed <= each.most:
            choices.append((each.objective(needed, unpredictability), -each.capacity, each.kind, needed))
    if choices:
        _, _, kind, needed = min(choices)
        return {kind: needed}
    left = [
        (each.capacity * (math.floor(each.most) - each.running), each) for each in types if math.isfinite(each.most)
    ]
    if not left:
        return {}
    _, each = max(left, key=lambda pair: pair[0])
    return {each.kind: max(0, math.floor(each.most) - each.running)}


def most_saving_removal(types: Sequence[InstanceType], rate: float, saturation: float) -> str | None:
    """Select the kind of a running instance without which the others carry the rate, the one that saves most.

    None where none can go (scaling in). No running instance is ever exchanged for a cheaper one.
    """
    capacity = math.fsum(each.capacity * each.running for each in types)
    choices = [
        (-each.cost, each.capacity, each.kind)
        for each in types
        if each.running > 0 and (capacity - each.capacity) * saturation >= rate
    ]
    return min(choices)[2] if choices else None


class _InstanceScaling(msgspec.Struct, frozen=True, kw_only=True):
    """unpredictability: λ, per second of launch. share: ‰ of a device that an instance has; without co-location all."""

    unpredictability: float = 0.001
    share: int = WHOLE

    def _instances(self, context: ScalingContext) -> dict[str, Counter[str]]:
        """Count the instances of each model in the plan in force, by kind."""
        counts: dict[str, Counter[str]] = {kind.name: Counter() for kind in context.problem.fleet}
        for device, _, placement in context.plan.placements():
            if device.kind in counts:
                counts[device.kind][placement.model] += placement.procs
        return counts

    def _types(
        self, context: ScalingContext, model: str, running: Mapping[str, Mapping[str, int]]
    ) -> list[InstanceType]:
        """Return the types that serve a model within its SLO, with room for what other models leave."""
        types = []
        for kind in context.problem.fleet:
            counts = running[kind.name]
            capacity = instance_capacity(context.problem, model, kind.name, self.share)
            if capacity:
                others = sum(counts.values()) - counts[model]
                most = math.inf if kind.count is None else float(kind.count * (WHOLE // self.share))
                types.append(
                    InstanceType(
                        kind=kind.name,
                        cost=1.0 if kind.price is None else kind.price,
                        launch=context.launch_seconds.get(kind.name, 0.0),
                        capacity=capacity,
                        running=counts[model],
                        most=max(float(counts[model]), most - others),
                    )
                )
        return types

    def _devices(self, context: ScalingContext, after: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
        """Return the devices that instances fill. What is on its way is not given back before it was there."""
        before, wanted = self._instances(context), {}
        for kind, counts in after.items():
            total = sum(counts.values())
            devices = math.ceil(total * self.share / WHOLE - 1e-9)
            if total >= sum(before[kind].values()):
                devices = max(devices, context.allocated(kind))
            wanted[kind] = int(min(devices, context.limit(kind)))
        return wanted


class LeastCostScaling(_InstanceScaling, frozen=True, kw_only=True):
    """Solve HetSev's integer program for each model in turn, each with the devices that the others leave."""

    horizon: float = 0.0

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        return self._devices(context, self.wanted_instances(context))

    def wanted_instances(self, context: ScalingContext) -> dict[str, Counter[str]]:
        """Return how many instances of each model are wanted, by kind."""
        after = self._instances(context)
        for model in context.problem.models:
            types = self._types(context, model.name, after)
            action = least_cost_action(types, context.problem.rates.get(model.name, 0.0), self.unpredictability)
            for each in types:
                added = int(each.most) - each.running if action is None else action[each.kind]
                after[each.kind][model.name] += added
        return after


class GreedyScaling(_InstanceScaling, frozen=True, kw_only=True):
    """Follow HetSev's heuristic for each model.

    A plan fills its devices with instances, so one instance less frees no device. So all instances are removed in one
    step without which the others carry the rate, where the paper removes one at a time.

    saturation: rate over capacity above which it scales out, when that lasts for `sustained` seconds. cool_down:
    seconds for which an instance must have been superfluous before it is removed.
    """

    saturation: float = 0.8
    sustained: float = 15.0
    cool_down: float = 300.0

    @property
    def horizon(self) -> float:
        return max(self.sustained, self.cool_down)

    def __call__(self, context: ScalingContext) -> dict[str, int]:
        return self._devices(context, self.wanted_instances(context))

    def wanted_instances(self, context: ScalingContext) -> dict[str, Counter[str]]:
        """Return how many instances of each model are wanted, by kind."""
        after = self._instances(context)
        for model in context.problem.models:
            types = self._types(context, model.name, after)
            for kind, added in self._action(context, model.name, types).items():
                after[kind][model.name] += added
        return after

    def _action(self, context: ScalingContext, model: str, types: list[InstanceType]) -> dict[str, int]:
        rate = context.problem.rates.get(model, 0.0)
        capacity = math.fsum(each.capacity * each.running for each in types)
        lately = [seen.rates.get(model, 0.0) for seen in context.since(self.sustained)]
        if min([rate, *lately]) > self.saturation * capacity:
            return cheapest_addition(types, rate, self.saturation, self.unpredictability)
        if not context.history or context.history[0].time > context.now - self.cool_down + context.history[0].seconds:
            return {}
        peak = max([rate, *(seen.rates.get(model, 0.0) for seen in context.history)])
        removed: Counter[str] = Counter()
        while (kind := most_saving_removal(types, peak, self.saturation)) is not None:
            removed[kind] -= 1
            types = [msgspec.structs.replace(each, running=each.running - (each.kind == kind)) for each in types]
        return dict(removed)


def instance_capacity(problem: Problem, model: str, kind: str, share: int) -> float:
    """Return the requests/s that one instance carries with its best batch within the SLO (constraint 4); 0 if none."""
    slo = problem.model(model).slo
    curve = latency_curve(problem, model, kind, share)
    return max((rows / latency for rows, latency in enumerate(curve, 1) if latency <= slo), default=0.0)
