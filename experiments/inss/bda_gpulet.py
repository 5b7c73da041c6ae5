"""Decide on the batches of gpulet's partitions as InSS does: BDA-Gpulet of its section 6.3.

Algorithm 1 is of one model in a partition. Where gpulet has several share one in time, a model's batch takes as long as
the round that it is in, and may not be so large that another of them misses its target or its rate; their batches are
decided one after the other. A device on which the batches miss a target under the interference that results keeps
gpulet's.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    PartitionDraft,
    latency_curve,
    partitions_with_batches,
    slowdown,
    with_totals,
)
from cotenant.planners.inss.batch_decision import DEFAULT_BATCH, search_batch
from cotenant.predictors import Load


def with_decided_batches(problem: Problem, plan: Plan) -> Plan:
    """Return a plan with the batches of Algorithm 1, of empty queues."""
    devices = tuple(_decided(problem, problem.kind(device.kind), device) for device in plan.devices)
    return with_totals(msgspec.structs.replace(plan, devices=devices), problem)


def _decided(problem: Problem, kind: Kind, device: Device) -> Device:
    drafts = [
        PartitionDraft(
            partition.share,
            {placement.model: placement.rate for placement in partition.placements},
            {placement.model: placement.procs for placement in partition.placements},
        )
        for partition in device.partitions
    ]
    batches = [_batches(problem, kind, device, index) for index in range(len(drafts))]
    decided = partitions_with_batches(problem, kind, drafts, batches)
    return device if decided is None else msgspec.structs.replace(device, partitions=decided)


def _batches(problem: Problem, kind: Kind, device: Device, index: int) -> list[int]:
    """Return the batches of one partition. Models on others are taken to run batches of 4, as in Algorithm 1."""
    partition = device.partitions[index]
    models = partition.placements
    slos = [problem.model(model.model).slo for model in models]
    curves = [latency_curve(problem, model.model, kind.name, partition.share, model.procs) for model in models]
    beside = [_loads(kind, other) for n, other in enumerate(device.partitions) if n != index]
    batches = [model.batch for model in models]

    def latency(i: int, batch: int) -> float:
        return curves[i][batch - 1] * slowdown(
            problem, Load(models[i].model, kind.name, batch, partition.share), beside
        )

    for i, model in enumerate(models):
        others = {j: latency(j, batches[j]) for j in range(len(models)) if j != i}

        def length(batch: int, i: int = i, others: dict[int, float] = others) -> float:
            """Return the seconds of a round, infinite where it is too long for the other models."""
            if batch > len(curves[i]):
                return math.inf
            seconds = latency(i, batch) + sum(others.values())
            late = any(seconds + own > slos[j] for j, own in others.items())
            short = any(models[j].procs * batches[j] < models[j].rate * seconds for j in others)
            return math.inf if late or short else seconds

        batches[i] = search_batch(length, slos[i], model.rate / model.procs, 0.0) or batches[i]
    return batches


def _loads(kind: Kind, partition: Partition) -> list[Load]:
    return [Load(placement.model, kind.name, DEFAULT_BATCH, partition.share) for placement in partition.placements]
