"""From a plan to its lanes, and from what each does to what every model will see.

Where several lanes share a model, each request goes to the one that will be done first. So lanes get as much as they
have room for, whatever the plan says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Profile
from cotenant.core.units import show_share
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.capacity import slowdown
from cotenant.planners.forecast.answer import Forecast, combine_lanes
from cotenant.planners.forecast.lanes import KNOWN, LaneQueue, QueueSolution, queue_solutions
from cotenant.planners.forecast.poisson_quadrature import POOL
from cotenant.predictors import Load

ROUNDS = 6  # until the length of one hardly changes
LEAST_ROOM = 0.05  # that a lane is taken to have, of its time, however busy others keep it


def forecast_models(plan: Plan, problem: Problem) -> Forecast:
    """As `forecast`, of a problem without applications."""
    scale = plan.scale if problem.objective == "rate" else 1.0
    offered = {model: rate * scale for model, rate in problem.rates.items() if rate > 0}
    carried = dict.fromkeys(offered, 0.0)
    workers = dict.fromkeys(offered, 0)
    for _, _, placement in plan.placements():
        if placement.model in offered:
            carried[placement.model] += placement.rate
            workers[placement.model] += placement.procs
    slos = {model.name: model.slo for model in problem.models}
    names: list[str] = []
    lanes: list[list[LaneQueue]] = []
    for device in plan.devices:
        loads = [_loads(partition, device.kind) for partition in device.partitions]
        for slot, partition in enumerate(device.partitions):
            beside = loads[:slot] + loads[slot + 1 :]
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
                            slowdown(problem, load, beside),
                            offered[model] * placement.rate / carried[model] / placement.procs,
                            slos[model],
                            min(workers[model], POOL),
                            _varies(profile, placement.batch, partition.share),
                        )
                    )
            names.append(f"{device.name}/{slot}")
            lanes.append(lane)
    _route(lanes)
    answers = queue_solutions([tuple(lane) for lane in lanes])
    utilisation = {}
    seen: dict[str, list[tuple[float, QueueSolution]]] = {model: [] for model in offered}
    for name, lane, turns in zip(names, lanes, answers, strict=True):
        busy = 0.0
        for queue, turn in zip(lane, turns, strict=True):
            busy += queue.rate * turn.attainment * turn.cost
            seen[queue.model].append((queue.rate * queue.procs, turn))
        utilisation[name] = min(busy, 1.0)
    models = {model: combine_lanes(seen[model], rate, slos[model]) for model, rate in offered.items()}
    return Forecast(models=models, utilisation=utilisation)


def profile_of(problem: Problem, device: Device, partition: Partition, placement: Placement) -> Profile:
    """Raises PlanError where the placement was not profiled."""
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
    """Requests go where they will be done first, whatever rates the plan has for the lanes of a model: each gets a part
    as large as what the other models on it leave room for."""
    places: dict[str, list[tuple[list[LaneQueue], int]]] = {}
    for lane in lanes:
        for i, queue in enumerate(lane):
            places.setdefault(queue.model, []).append((lane, i))
    for several in places.values():
        if len(several) > 1:
            queues = [lane[i] for lane, i in several]
            rooms = [queue.procs * _room(lane, i) for lane, i in several]
            rate = sum(queue.rate * queue.procs for queue in queues) / sum(rooms)
            for queue, room, (lane, i) in zip(queues, rooms, several, strict=True):
                lane[i] = msgspec.structs.replace(queue, rate=rate * room / queue.procs)


def _room(lane: Sequence[LaneQueue], i: int) -> float:
    """Requests/s that a worker of one model of a lane can serve beside the others: in the time that they leave it, and
    no more than a batch a round, in which each of them runs what gathers."""
    queue = lane[i]
    full = queue.takes(queue.batch)
    if len(lane) == 1:
        return queue.batch / full
    others = [it for it in lane if it is not queue]
    left = max(1 - sum(it.busy for it in others), LEAST_ROOM)
    length = full
    for _ in range(ROUNDS):
        length = full + sum([it.takes(it.rate * length) for it in others])
    return queue.batch * min(left / full, 1 / length)


@lru_cache(KNOWN)
def _varies(profile: Profile, batch: int, share: int) -> float:
    """As the nearest point was measured to (feature ``cv_pct``)."""
    return profile.nearest(batch, share).features.get("cv_pct", 0.0) / 100
