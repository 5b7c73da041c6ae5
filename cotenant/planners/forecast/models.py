"""Forecast the models of a plan: build its lanes' queues, route requests among them, and mix their solutions.

Where several lanes hold a model, each request goes to the one that will finish first. So a lane gets requests in
proportion to its free capacity, whatever rates the plan has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import msgspec

from cotenant.core.identity import LaneId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Profile
from cotenant.core.units import show_share
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.capacity import slowdown
from cotenant.planners.forecast.lanes import CACHED_LANES, LaneQueue, QueueSolution, queue_solutions
from cotenant.planners.forecast.poisson_quadrature import MAX_STRIDE
from cotenant.planners.forecast.results import Forecast, combine_lanes
from cotenant.predictors import Load

MAX_ITERATIONS = 6  # iterations of the fixed point of a round's length, which then hardly changes
MIN_FREE_FRACTION = 0.05  # fraction of a lane's time assumed free for a model, however busy the others are


def forecast_models(
    plan: Plan, problem: Problem, slowdowns: Mapping[tuple[LaneId, str], float] = MappingProxyType({})
) -> Forecast:
    """Forecast a plan for a problem without applications. slowdowns: of batches, besides interference, by lane and
    model. Raises PlanError for a placement that was not profiled."""
    scale = (plan.scale or 1.0) if problem.objective == "rate" else 1.0
    offered = {model: rate * scale for model, rate in problem.rates.items() if rate > 0}
    planned_rates = dict.fromkeys(offered, 0.0)
    workers = dict.fromkeys(offered, 0)
    for _, _, placement in plan.placements():
        if placement.model in offered:
            planned_rates[placement.model] += placement.rate
            workers[placement.model] += placement.procs
    slos = {model.name: model.slo for model in problem.models}
    names: list[str] = []
    lanes: list[list[LaneQueue]] = []
    for device in plan.devices:
        loads = [_loads(partition, device.kind) for partition in device.partitions]
        for slot, partition in enumerate(device.partitions):
            colocated = loads[:slot] + loads[slot + 1 :]
            lane = []
            for placement, load in zip(partition.placements, loads[slot], strict=True):
                model = placement.model
                if model in offered and placement.rate > 0:
                    profile = profile_of(problem, device, partition, placement)
                    lane.append(
                        LaneQueue(
                            model,
                            profile,
                            partition.share,
                            placement.procs,
                            placement.batch,
                            slowdown(problem, load, colocated)
                            * slowdowns.get((LaneId(device.id, slot), placement.model), 1.0),
                            offered[model] * placement.rate / planned_rates[model] / placement.procs,
                            slos[model],
                            min(workers[model], MAX_STRIDE),
                            _variation(profile, placement.batch, partition.share),
                        )
                    )
            names.append(str(LaneId(device.id, slot)))
            lanes.append(lane)
    _route(lanes)
    lane_solutions = queue_solutions([tuple(lane) for lane in lanes])
    utilisation = {}
    solutions: dict[str, list[tuple[float, QueueSolution]]] = {model: [] for model in offered}
    for name, lane, queues_solved in zip(names, lanes, lane_solutions, strict=True):
        busy = 0.0
        for queue, solution in zip(lane, queues_solved, strict=True):
            busy += queue.rate * solution.attainment * solution.cost
            solutions[queue.model].append((queue.rate * queue.procs, solution))
        utilisation[name] = min(busy, 1.0)
    models = {model: combine_lanes(solutions[model], rate, slos[model]) for model, rate in offered.items()}
    return Forecast(models=models, utilisation=utilisation)


def profile_of(problem: Problem, device: Device, partition: Partition, placement: Placement) -> Profile:
    """Return the profile of a placement. Raises PlanError where it lacks the batch, share or workers."""
    profile = problem.profile(placement.model, device.kind)
    if profile is None or math.isinf(profile.latency(placement.batch, partition.share, placement.procs)):
        raise PlanError(
            f"no forecast for {placement.model!r} in batches of {placement.batch} on {show_share(partition.share)} of"
            f" {device.kind!r}: that was not profiled"
        )
    return profile


def _loads(partition: Partition, kind: str) -> list[Load]:
    return [Load(placement.model, kind, placement.batch, partition.share) for placement in partition.placements]


def _route(lanes: Sequence[list[LaneQueue]]) -> None:
    """Replace the rates of each model's queues: proportional to the capacity that other models leave on the lane."""
    lanes_of: dict[str, list[tuple[list[LaneQueue], int]]] = {}
    for lane in lanes:
        for i, queue in enumerate(lane):
            lanes_of.setdefault(queue.model, []).append((lane, i))
    for queues_of_model in lanes_of.values():
        if len(queues_of_model) > 1:
            queues = [lane[i] for lane, i in queues_of_model]
            capacities = [queue.procs * _worker_capacity(lane, i) for lane, i in queues_of_model]
            rate = sum(queue.rate * queue.procs for queue in queues) / sum(capacities)
            for queue, capacity, (lane, i) in zip(queues, capacities, queues_of_model, strict=True):
                lane[i] = msgspec.structs.replace(queue, rate=rate * capacity / queue.procs)


def _worker_capacity(lane: Sequence[LaneQueue], i: int) -> float:
    """Return the requests/s that a worker of model i of a lane can sustain.

    It has the time that the other models leave, and one batch in each round in which they run what gathers.
    """
    queue = lane[i]
    full = queue.batch_seconds(queue.batch)
    if len(lane) == 1:
        return queue.batch / full
    others = [other for other in lane if other is not queue]
    free = max(1 - sum(other.busy for other in others), MIN_FREE_FRACTION)
    length = full
    for _ in range(MAX_ITERATIONS):
        length = full + sum([other.batch_seconds(other.rate * length) for other in others])
    return queue.batch * min(free / full, 1 / length)


@lru_cache(CACHED_LANES)
def _variation(profile: Profile, batch: int, share: int) -> float:
    """Return the coefficient of variation of a batch's latency at the nearest profiled point (feature ``cv_pct``)."""
    return profile.nearest(batch, share).features.get("cv_pct", 0.0) / 100
