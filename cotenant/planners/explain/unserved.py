"""Explain why some or all of a model's rate is unserved."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from cotenant.core import mig
from cotenant.core.device_groups import group_devices
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Plan
from cotenant.core.units import show_memory, show_rate, show_seconds, show_share
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    PartitionDraft,
    batched_partitions,
    fits_memory,
    footprint,
    latency_curve,
    max_throughput_batch,
)
from cotenant.planners.explain.placement import partition_need, with_share, with_unlimited_devices

# unknown: the model was not profiled. time: no share is fast enough. memory, capacity: no device has enough of it.
Cause = Literal["unknown", "time", "memory", "capacity"]


class UnservedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Explain a model's unserved rate.

    rate: requests/s that are unserved. nearest: the shortest feasible target, in seconds, on a whole device; None where
    the cause is not time. why: the cause in words.
    """

    model: str
    rate: float
    cause: Cause
    nearest: float | None
    why: str


def explain_unserved(problem: Problem, plan: Plan, name: str, rate: float) -> UnservedModel:
    """Explain why so much of a model's rate, in requests/s, is unserved."""

    def because(cause: Cause, why: str, nearest: float | None = None) -> UnservedModel:
        return UnservedModel(model=name, rate=rate, cause=cause, nearest=nearest, why=why)

    model = problem.model(name)
    fastest = [(seconds[:1], kind) for kind in problem.fleet for _, seconds in _whole(problem, name, kind)]
    known = [(seconds[0], kind) for seconds, kind in fastest if seconds and math.isfinite(seconds[0])]
    if not known:
        return because("unknown", "it was not profiled on any of these devices; profile it with `cotenant profile`")
    latency, kind = min(known, key=lambda one: one[0])
    if 2 * latency > model.slo:
        nearest = 2 * latency
        return because(
            "time",
            f"a single request takes {show_seconds(latency)} on {show_share(kind.cuts[-1])} of {kind.name}, the fastest"
            f" device, and one that just missed a batch waits as long again: the shortest feasible target is"
            f" {show_seconds(nearest)}, not {show_seconds(model.slo)}",
            nearest,
        )
    quick = {kind.name for seconds, kind in known if 2 * seconds <= model.slo}
    able = [kind for kind in problem.fleet if kind.name in quick]
    housing = [kind for kind in able if fits_memory(kind, [(kind.cuts[-1], footprint(problem, kind.name, name, 1))])]
    if not housing:
        need, room = min((footprint(problem, kind.name, name, 1), kind.memory) for kind in able)
        return because("memory", f"a worker needs {show_memory(need)}, a device has {show_memory(room)}")
    for group in group_devices(plan):
        if (kind := problem.kind(group.device.kind)) in housing and _only_memory(problem, kind, group.device, name):
            worker = show_memory(footprint(problem, kind.name, name, 1))
            taken = show_memory(sum(partition_need(problem, kind, partition) for partition in group.device.partitions))
            return because(
                "memory",
                f"{show_share(group.device.free)} of {group.name} are free, but {taken} of {show_memory(kind.memory)}"
                f" of memory are in use, and a worker needs {worker}",
            )
    most, kind = max(
        (
            (workers * max_throughput_batch(seconds, model.slo)[1], kind)
            for kind in housing
            for workers, seconds in _whole(problem, name, kind)
        ),
        key=lambda one: one[0],
    )
    used_up = sum(device.kind == kind.name for device in plan.devices)
    taken = "" if kind.count is None else f", and {used_up} of {kind.count} are in use"
    return because(
        "capacity",
        f"no capacity is left: a whole {kind.name} sustains {show_rate(most)} requests/s of it within its target"
        f"{taken}",
    )


def _whole(problem: Problem, model: str, kind: Kind) -> list[tuple[int, tuple[float, ...]]]:
    """Return the numbers of workers that the model was profiled with, and the seconds of its batches on the largest
    share."""
    profile = problem.profile(model, kind.name)
    numbers = sorted({point.procs for point in profile.points}) if profile is not None else []
    return [(workers, latency_curve(problem, model, kind.name, kind.cuts[-1], workers)) for workers in numbers]


def _only_memory(problem: Problem, kind: Kind, device: Device, model: str) -> bool:
    """Return whether the free share of a device would serve the model, but for memory."""
    share = max((cut for cut in kind.cuts if cut <= device.free), default=None)
    if share is None or (kind.max_partitions is not None and len(device.partitions) >= kind.max_partitions):
        return False
    cuts = [
        *(with_share(partition, partition.share, ()) for partition in device.partitions),
        PartitionDraft(share, {model: 0.0}),
    ]
    if kind.geometry and mig.placements_fit(kind.geometry, [(cut.share, 0) for cut in cuts]) is None:
        return False
    return (
        batched_partitions(problem, kind, cuts) is None
        and batched_partitions(problem, with_unlimited_devices(kind), cuts) is not None
    )
