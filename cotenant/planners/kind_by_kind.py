"""Plan for several kinds of devices, one after the other, with planners that know one kind: the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    build_plan,
    latency_curve,
    max_throughput_batch,
    sorted_by_price,
)
from cotenant.planners.problem import Problem

# Of one model, for planners that place one after the other: what they take grows with the square of it.
MAX_INSTANCES = 10_000

# Places rates (requests/s by model) on devices of one kind, as far as that serves them.
Place = Callable[[Kind, Mapping[str, float]], list[DeviceDraft]]


class Instance(msgspec.Struct, frozen=True):
    """Describe one of the equal parts into which a model's rate is split. rate: requests/s."""

    model: str
    rate: float


def plan_kind_by_kind(problem: Problem, planner: str, place: Place) -> Plan:
    """Return the plan of a planner that places what the kinds before have not served. planner: its name."""
    devices: list[DeviceDraft] = []
    unserved = {model: rate for model, rate in problem.rates.items() if rate > 0}
    for kind in sorted_by_price(problem.fleet):
        placed = place(kind, unserved)
        devices += placed
        for device in placed:
            for cut in device.cuts:
                for model, rate in cut.rates.items():
                    unserved[model] -= rate * device.count
        unserved = {model: rate for model, rate in unserved.items() if rate > ROUNDING_TOLERANCE * problem.rates[model]}
    return build_plan(problem, planner, devices)


def split_into_instances(problem: Problem, kind: Kind, model: str, rate: float, share: int) -> list[Instance]:
    """Split a model's rate into the fewest equal parts that one partition of a share (‰) sustains.

    None where that share does not meet the target; no more than a limited fleet has room for. Raises PlanError for more
    than `MAX_INSTANCES`.
    """
    count = instance_count(rate, sustained_rate(problem, model, kind, share))
    return [Instance(model, rate / count)] * most_instances(model, kind, count) if count else []


def instance_count(rate: float, most: float) -> int:
    """Return how many partitions of at most `most` requests/s a rate takes; 0 where that is 0."""
    return math.ceil(rate / most * (1 - ROUNDING_TOLERANCE)) if most > 0 else 0


def most_instances(model: str, kind: Kind, count: int) -> int:
    """Return a number of partitions, or how many there can be where the fleet has no room for as many.

    Raises PlanError for more than `MAX_INSTANCES`.
    """
    return checked_instances(model, count if kind.count is None else min(count, kind.count * (WHOLE // kind.cuts[0])))


def checked_instances(model: str, count: int) -> int:
    """Return a number of instances. Raises PlanError for more than `MAX_INSTANCES`."""
    if count > MAX_INSTANCES:
        raise PlanError(
            f"model {model!r}: its rate takes {count} instances, and this planner places each by itself, at most"
            f" {MAX_INSTANCES} of a model; lower the rate or the count of devices, or use the planner 'squishy'"
        )
    return count


def sustained_rate(problem: Problem, model: str, kind: Kind, share: int) -> float:
    """Return the requests/s that a model sustains alone on a share (‰) within its target; 0 where it meets none."""
    return max_throughput_batch(latency_curve(problem, model, kind.name, share), problem.model(model).slo)[1]
