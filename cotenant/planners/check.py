"""Check a plan against a problem: the deterministic test of the papers, for evenly spaced requests.

The plan's own figures are not trusted: rounds, latencies and memory are recomputed from the problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from cotenant.core import mig
from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import LaneId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import MAX_BATCH
from cotenant.core.units import WHOLE, show_memory, show_seconds, show_share
from cotenant.planners import Problem
from cotenant.planners.applications import overlong_paths, without_applications
from cotenant.planners.capacity import RoundShare, footprint, slowdown, smallest_batches
from cotenant.planners.job_interference import cautious, is_profiled, job_memory, jobs_of, worst_slowdowns
from cotenant.predictors import Load

# Relative tolerance of rates, latencies and targets: a plan file keeps fewer digits.
CHECK_TOLERANCE = 1e-6

Rule = Literal[
    "kind", "count", "id", "partitions", "cut", "sum", "geometry", "memory", "model", "twice", "batch", "profile",
    "rate", "keeps up", "worst case", "latency", "duty", "served", "scale", "split", "job", "job twice", "job profile",
    "job slo",
]  # fmt: skip

# The message of each rule, and the format of its numbers.
_LINES: dict[Rule, tuple[str, Callable[[float], str]]] = {
    "kind": ("the problem has no devices of this kind", str),
    "count": ("{value} devices where there are {limit}", "{:g}".format),
    "id": ("{value} devices of one kind have this index", "{:g}".format),
    "partitions": ("{value} partitions where at most {limit} are allowed", "{:g}".format),
    "cut": ("{value} is not a legal share; the nearest is {limit}", lambda value: show_share(round(value))),
    "sum": ("the partitions add up to {value} of the device", lambda value: show_share(round(value))),
    "geometry": ("MIG has no such instances side by side with the memory that their workers need", str),
    "memory": ("workers need {value} where the device has {limit}", show_memory),
    "model": ("the problem has no such model", str),
    "twice": ("{value} placements on one partition", "{:g}".format),
    "batch": ("batch {value}, where the model and its profile allow 1 to {limit}", "{:g}".format),
    "profile": ("this share and batch were not profiled: latency unknown", str),
    "rate": ("a rate of {value} requests/s", "{:g}".format),
    "keeps up": ("sustains {limit} requests/s, is planned for {value}", "{:.6g}".format),
    "worst case": ("worst-case latency {value}, target {limit}", show_seconds),
    "latency": ("a batch takes {limit}, the plan says {value}", show_seconds),
    "duty": ("a round takes {limit}, the plan says {value}", show_seconds),
    "served": ("{value} requests/s are served or reported as unserved, {limit} were requested", "{:.6g}".format),
    "split": ("the budgets of its stages add up to {value}, the target is {limit}", show_seconds),
    "job": ("the problem has no such job, or another model or batch for it", str),
    "job twice": ("it stands on {value} devices; a job stands on one", "{:g}".format),
    "job profile": ("its steps were not profiled on this kind of device", str),
    "job slo": (
        "beside jobs batches take up to {value} times as long, and none up to those planned keep up with the rates"
        " within the targets",
        "{:.3g}".format,
    ),
    "scale": ("the plan states that it serves {value} of the requested rates, it serves {limit}", "{:.6g}".format),
}


class Violation(msgspec.Struct, frozen=True):
    """Describe a violated rule. where: device, partition or model. value, limit: what the plan has, and what is
    allowed."""

    rule: Rule
    where: str
    value: float = 0.0
    limit: float = 0.0

    def __str__(self) -> str:
        line, show = _LINES[self.rule]
        return f"{self.where}: {line.format(value=show(self.value), limit=show(self.limit))}"


def check(plan: Plan, problem: Problem) -> list[Violation]:
    """Return every violation of a plan for a problem; [] for a sound plan (docs/concepts.md)."""
    if problem.applications:
        split = [
            Violation("split", f"application {name}", length, slo)
            for name, length, slo in overlong_paths(plan, problem)
        ]
        return split or check(plan, without_applications(problem, plan.split))
    violations = _fleet_violations(plan, problem)
    kinds = {kind.name: kind for kind in problem.fleet}
    for device in plan.devices:
        if device.kind in kinds:
            violations += _device_violations(device, problem)
    if any(device.jobs for device in plan.devices):
        violations += _job_violations(plan, problem)
    return violations + _rate_violations(plan, problem)


def _fleet_violations(plan: Plan, problem: Problem) -> list[Violation]:
    violations = []
    kinds = {kind.name: kind for kind in problem.fleet}
    for name, used in Counter(device.kind for device in plan.devices).items():
        if name not in kinds:
            violations.append(Violation("kind", name))
            continue
        count = kinds[name].count
        if count is not None and used > count:
            violations.append(Violation("count", name, used, count))
    for device_id, times in Counter(device.id for device in plan.devices).items():
        if times > 1:
            violations.append(Violation("id", str(device_id), times, 1))
    return violations


def _device_violations(device: Device, problem: Problem) -> list[Violation]:
    violations = []
    kind = problem.kind(device.kind)
    name = str(device.id)
    if kind.max_partitions is not None and len(device.partitions) > kind.max_partitions:
        violations.append(Violation("partitions", name, len(device.partitions), kind.max_partitions))
    if device.free < 0:
        violations.append(Violation("sum", name, WHOLE - device.free, WHOLE))
    needs = []
    for slot, partition in enumerate(device.partitions):
        where = f"{name}/{slot}"
        if partition.share not in kind.cuts:
            nearest = min(kind.cuts, key=lambda cut: abs(cut - partition.share))
            violations.append(Violation("cut", where, partition.share, nearest))
        for model, times in Counter(placement.model for placement in partition.placements).items():
            if times > 1:
                violations.append(Violation("twice", f"{where} {model}", times, 1))
        known = [
            _placement_violations(placement, partition, where, device.kind, problem)
            for placement in partition.placements
        ]
        faults = [fault for faults in known for fault in faults]
        violations += faults
        if not faults:
            violations += _cycle_violations(device, slot, where, problem)
        workers = sum(p.procs * footprint(problem, device.kind, p.model, p.batch) for p in partition.placements)
        needs.append((partition.share, workers))
    if kind.geometry is not None and mig.placements_fit(kind.geometry, needs) is None:
        violations.append(Violation("geometry", name))
    memory = sum(workers for _, workers in needs)
    memory += sum(job_memory(job, device.kind, problem) for job in jobs_of(device, problem))
    if memory > kind.memory:
        violations.append(Violation("memory", name, memory, kind.memory))
    return violations


def _placement_violations(
    placement: Placement, partition: Partition, where: str, kind: str, problem: Problem
) -> list[Violation]:
    """Return what is invalid about a placement, so that its round cannot be computed."""
    where = f"{where} {placement.model}"
    model = next((model for model in problem.models if model.name == placement.model), None)
    if model is None:
        return [Violation("model", where)]
    if not (math.isfinite(placement.rate) and placement.rate >= 0):
        return [Violation("rate", where, placement.rate)]
    profile = problem.profile(placement.model, kind)
    if profile is None:
        return [Violation("profile", where)]
    largest = profile.max_batch if model.max_batch is None else min(profile.max_batch, model.max_batch)
    if not 1 <= placement.batch <= largest:
        return [Violation("batch", where, placement.batch, largest)]
    if not math.isfinite(profile.latency(placement.batch, partition.share, placement.procs)):
        return [Violation("profile", where)]
    return []


def _cycle_violations(device: Device, slot: int, where: str, problem: Problem) -> list[Violation]:
    violations = []
    latencies = _latencies(device, slot, problem)
    length = sum(latencies)
    for placement, latency in zip(device.partitions[slot].placements, latencies, strict=True):
        here = f"{where} {placement.model}"
        slo = problem.model(placement.model).slo
        carries = placement.procs * placement.batch / length
        if placement.rate > carries * (1 + CHECK_TOLERANCE):
            violations.append(Violation("keeps up", here, placement.rate, carries))
        if length + latency > slo * (1 + CHECK_TOLERANCE):
            violations.append(Violation("worst case", here, length + latency, slo))
        if abs(placement.latency - latency) > latency * CHECK_TOLERANCE:
            violations.append(Violation("latency", here, placement.latency, latency))
        if abs(placement.duty - length) > length * CHECK_TOLERANCE:
            violations.append(Violation("duty", here, placement.duty, length))
    return violations


def _job_violations(plan: Plan, problem: Problem) -> list[Violation]:
    """Check that the jobs of a plan are the problem's, and that with high slowdowns by them every SLO still holds."""
    violations = []
    known = {job.name: job for job in problem.jobs}
    for name, times in Counter(job.name for device in plan.devices for job in device.jobs).items():
        if times > 1:
            violations.append(Violation("job twice", f"job {name}", times, 1))
    judged = cautious(problem)
    for device in plan.devices:
        for placed in device.jobs:
            where = f"{device.id} job {placed.name}"
            job = known.get(placed.name)
            if job is None or (job.model, job.batch) != (placed.model, placed.batch):
                violations.append(Violation("job", where))
            elif not is_profiled(job, device.kind, problem):
                violations.append(Violation("job profile", where))
        if jobs := jobs_of(device, problem):
            violations += _slowed_violations(device, jobs, problem, judged)
    return violations


def _slowed_violations(
    device: Device, jobs: Sequence[BackgroundJob], problem: Problem, judged: Problem
) -> list[Violation]:
    """Return the partitions of a device where no round keeps up within the targets beside its jobs. Its batches may be
    smaller than planned: those leave room for bursts. What violates the rules without jobs is reported elsewhere."""
    kind = device.kind
    if any(
        _placement_violations(each, part, "", kind, problem) for part in device.partitions for each in part.placements
    ):
        return []
    slowdowns = worst_slowdowns(device, jobs, problem, judged)
    violations = []
    for slot, partition in enumerate(device.partitions):
        works, largest = [], 1.0
        for each in partition.placements:
            curve = problem.profiles[each.model, kind].curve(partition.share, each.procs)[: each.batch]
            by_jobs = slowdowns[LaneId(device.id, slot), each.model]
            factor = each.latency / curve[-1] * by_jobs
            slo = problem.model(each.model).slo
            works.append(RoundShare([factor * seconds for seconds in curve], each.rate / each.procs, slo))
            largest = max(largest, by_jobs)
        if smallest_batches(works) is None:
            violations.append(Violation("job slo", f"{device.id}/{slot}", largest))
    return violations


def _latencies(device: Device, slot: int, problem: Problem) -> list[float]:
    """Return the seconds that a batch of each placement of a partition takes."""
    kind, partition = device.kind, device.partitions[slot]
    colocated = [other for i, other in enumerate(device.partitions) if i != slot]
    beside = [_loads(neighbour, kind) for neighbour in colocated]
    latencies = []
    for placement, load in zip(partition.placements, _loads(partition, kind), strict=True):
        profile = problem.profiles[placement.model, kind]
        alone = profile.latency(placement.batch, partition.share, placement.procs)
        latencies.append(alone * slowdown(problem, load, beside))
    return latencies


def retimed(plan: Plan, problem: Problem) -> Plan:
    """Return the plan with the latencies that the problem's profiles give its batches; all of them are profiled."""
    devices = []
    for device in plan.devices:
        partitions = []
        for slot, partition in enumerate(device.partitions):
            latencies = _latencies(device, slot, problem)
            placements = tuple(
                msgspec.structs.replace(placement, latency=latency, duty=sum(latencies))
                for placement, latency in zip(partition.placements, latencies, strict=True)
            )
            partitions.append(msgspec.structs.replace(partition, placements=placements))
        devices.append(msgspec.structs.replace(device, partitions=tuple(partitions)))
    return msgspec.structs.replace(plan, devices=tuple(devices))


def _loads(partition: Partition, kind: str) -> list[Load]:
    """Return what runs on a partition, but for placements that no load describes, which are violations themselves."""
    if not 0 < partition.share <= WHOLE:
        return []
    return [
        Load(placement.model, kind, placement.batch, partition.share)
        for placement in partition.placements
        if 0 < placement.batch <= MAX_BATCH
    ]


def _rate_violations(plan: Plan, problem: Problem) -> list[Violation]:
    """Check that served plus unserved is the problem's rate, or the multiple of it that the plan serves where that is
    more."""
    violations = []
    carried = plan.rates()
    served = {name: carried.get(name, 0.0) for name in problem.rates}
    for name, asked in problem.rates.items():
        asked *= max(1.0, plan.scale)
        unserved = plan.unserved.get(name, 0.0)
        total = served[name] + unserved
        if not unserved >= 0 or abs(total - asked) > asked * CHECK_TOLERANCE:
            violations.append(Violation("served", name, total, asked))
    violations += [Violation("model", name) for name in plan.unserved if name not in problem.rates]
    scale = min([served[name] / asked for name, asked in problem.rates.items() if asked], default=1.0)
    if abs(plan.scale - scale) > scale * CHECK_TOLERANCE:
        violations.append(Violation("scale", plan.planner, plan.scale, scale))
    return violations
