"""Estimate what lending idle share of processors gives on average: how much shorter batches are than on a share alone.

A batch computes, and is then held until its share's time is up or nobody else computes on its cores. Other lanes are a
mean field: each computes for a fraction of the time, independently of the rest.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.cpu_shares import CorePins, computing_parts, threads_of
from cotenant.core.identity import LaneId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.front_end import cores_of


class _Lane(msgspec.Struct, frozen=True):
    """A lane that shares cores with others. computing: fraction of the time in which it computes. batch: seconds that
    its batches compute, on average over that time. models: of each the part of its batches that is computed, and the
    seconds of one row on the share alone."""

    cores: tuple[int, ...]
    threads: int
    computing: float
    batch: float
    models: dict[str, tuple[float, float]]


def lent_slowdowns(plan: Plan, problem: Problem, utilisation: dict[str, float]) -> dict[tuple[LaneId, str], float]:
    """Return how long batches take with lending, over what they take on their share alone: by lane and model, at most
    1. utilisation: busy fraction of time by lane, on shares alone."""
    kinds = {kind.name: kind for kind in problem.fleet}
    slowdowns = {}
    for device in plan.devices:
        kind = kinds[device.kind]
        if kind.processors:
            lanes = _lanes(device, kind, problem, utilisation)
            for name, lane in lanes.items():
                others = [other for key, other in lanes.items() if key != name and {*other.cores} & {*lane.cores}]
                for model, (part, latency) in lane.models.items():
                    slowdowns[name, model] = _slowdown(lane, part, latency, others)
    return slowdowns


def _slowdown(lane: _Lane, part: float, latency: float, others: list[_Lane]) -> float:
    """Return the factor for a model. part: of its batches that is computed; latency: seconds on the share alone."""
    demand = lane.threads / len(lane.cores)
    demand += sum(
        other.computing * other.threads * len({*other.cores} & {*lane.cores}) / len(other.cores) / len(lane.cores)
        for other in others
    )
    computing = min(part * max(demand, 1.0), 1.0)
    busy = sum(other.computing for other in others)
    if not busy:
        return computing
    idle = math.prod(1.0 - other.computing for other in others)
    rest = sum(other.computing * other.batch for other in others) / busy / 2 / latency
    held = 1.0 - computing
    return computing + (1.0 - idle) * (min(rest / idle, held) if idle else held)


def _lanes(device: Device, kind: Kind, problem: Problem, utilisation: dict[str, float]) -> dict[LaneId, _Lane]:
    cores = cores_of(kind.processors, problem.front_end)
    pins, lanes = CorePins(), {}
    slots = sorted(enumerate(device.partitions), key=lambda each: -each[1].share)
    for slot, partition in slots:
        name = LaneId(device.id, slot)
        threads = threads_of(partition.share, kind.processors)
        each = kind.processors * partition.share / WHOLE / threads
        own = pins.pin(name, cores, threads, each) or cores
        lanes[name] = _lane(own, threads, partition, kind, problem, utilisation.get(str(name), 0.0))
    return lanes


def _lane(
    cores: tuple[int, ...],
    threads: int,
    partition: Partition,
    kind: Kind,
    problem: Problem,
    busy: float,
) -> _Lane:
    models, held, computed, squared = {}, 0.0, 0.0, 0.0
    for placement in partition.placements:
        profile = problem.profiles[placement.model, kind.name]
        part = computing_parts(profile, partition.share, kind.processors)[0]
        latency = profile.latency(1, partition.share, placement.procs)
        models[placement.model] = part, latency
        held += placement.rate * latency
        computed += placement.rate * latency * part
        squared += placement.rate * (latency * part) ** 2
    return _Lane(
        cores=cores,
        threads=threads,
        computing=min(busy * computed / held, 1.0) if held else 0.0,
        batch=squared / computed if computed else 0.0,
        models=models,
    )
