"""Compute what best-effort jobs and the partitions of a device do to each other, and the memory that jobs take.

A job has no share of its own: it runs on what is idle, so its share depends on which partitions run a batch. Partitions
of several models count with the model that slows a victim most, as they do for each other (`capacity.slowdown`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import LaneId
from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import WHOLE
from cotenant.planners.capacity import footprint, slowdown
from cotenant.planners.problem import Problem
from cotenant.predictors import Load, at_quantile

JOB_QUANTILE = 0.9  # of the slowdown by jobs with which every SLO must still hold

# (lane, model) → how many times as long its batches take beside jobs as without them.
JobSlowdowns = dict[tuple[LaneId, str], float]


def cautious(problem: Problem) -> Problem:
    """Return the problem with the high quantile of slowdowns that jobs are judged by, where its predictor has any."""
    return msgspec.structs.replace(problem, interference=at_quantile(problem.interference, JOB_QUANTILE))


def is_profiled(job: BackgroundJob, kind: str, problem: Problem) -> bool:
    """Tell whether it is known how long a job's steps take on a kind of device."""
    profile = problem.profile(job.model, kind)
    return profile is not None and job.batch <= profile.max_batch


def jobs_of(device: Device, problem: Problem) -> list[BackgroundJob]:
    """Return the jobs of a device that the problem has and that were profiled on its kind."""
    known = {job.name: job for job in problem.jobs}
    placed = (known.get(placement.name) for placement in device.jobs)
    return [job for job in placed if job is not None and is_profiled(job, device.kind, problem)]


def job_loads(jobs: Sequence[BackgroundJob], kind: str, share: float) -> list[Load]:
    """Return what jobs run on a share (‰) that they divide by their priorities; none that gets less than 1 ‰."""
    weight = sum(job.priority for job in jobs)
    parts = [(job, round(share * job.priority / weight)) for job in jobs]
    return [Load(job.model, kind, job.batch, part) for job, part in parts if part >= 1]


def job_memory(job: BackgroundJob, kind: str, problem: Problem) -> int:
    """Return the bytes that a job takes of a device."""
    return footprint(problem, kind, job.model, job.batch) if job.memory is None else job.memory


def workers_memory(device: Device, problem: Problem) -> int:
    """Return the bytes that the workers of a device's partitions take."""
    return sum(
        placement.procs * footprint(problem, device.kind, placement.model, placement.batch)
        for partition in device.partitions
        for placement in partition.placements
    )


def worst_slowdowns(device: Device, jobs: Sequence[BackgroundJob], problem: Problem, judged: Problem) -> JobSlowdowns:
    """Return the slowdowns by jobs in the worst case: all other partitions run a batch, or all but one, or none, and
    jobs take all that is left. judged: the problem with the slowdowns to judge by (`cautious`)."""
    found: JobSlowdowns = {}
    for slot, partition, others, load in _victims(device):
        alone = slowdown(problem, load, [loads_of(other, device.kind) for other in others])
        worst = alone
        for active in _situations(others):
            rest = WHOLE - partition.share - sum(other.share for other in active)
            if loads := job_loads(jobs, device.kind, rest):
                beside = [*(loads_of(other, device.kind) for other in active), *([one] for one in loads)]
                worst = max(worst, slowdown(judged, load, beside))
        found[LaneId(device.id, slot), load.model] = worst / alone
    return found


def expected_slowdowns(
    device: Device, jobs: Sequence[BackgroundJob], problem: Problem, utilisation: Mapping[str, float]
) -> JobSlowdowns:
    """Return the slowdowns by jobs that take what the other partitions leave on average. utilisation: busy fraction of
    time by lane."""
    found: JobSlowdowns = {}
    for slot, partition, others, load in _victims(device):
        beside = [loads_of(other, device.kind) for other in others]
        idle = idle_share(device, utilisation)
        idle -= partition.share * (1 - utilisation.get(str(LaneId(device.id, slot)), 0.0))
        loads = [[one] for one in job_loads(jobs, device.kind, idle)]
        factor = slowdown(problem, load, [*beside, *loads]) / slowdown(problem, load, beside)
        found[LaneId(device.id, slot), load.model] = max(1.0, factor)
    return found


def slowdowns_by_jobs(plan: Plan, problem: Problem, utilisation: Mapping[str, float]) -> JobSlowdowns:
    """Return the expected slowdowns on every device of a plan that has jobs."""
    found: JobSlowdowns = {}
    for device in plan.devices:
        if jobs := jobs_of(device, problem):
            found |= expected_slowdowns(device, jobs, problem, utilisation)
    return found


def idle_share(device: Device, utilisation: Mapping[str, float]) -> float:
    """Return the share (‰) that a device's partitions leave idle on average, what no partition has included."""
    used = sum(
        partition.share * utilisation.get(str(LaneId(device.id, slot)), 0.0)
        for slot, partition in enumerate(device.partitions)
    )
    return max(WHOLE - used, 0.0)


def loads_of(partition: Partition, kind: str) -> list[Load]:
    return [Load(placement.model, kind, placement.batch, partition.share) for placement in partition.placements]


def _victims(device: Device) -> Iterator[tuple[int, Partition, list[Partition], Load]]:
    """Yield each placement as a load, with its slot, its partition and the other partitions."""
    for slot, partition in enumerate(device.partitions):
        others = [other for i, other in enumerate(device.partitions) if i != slot]
        for load in loads_of(partition, device.kind):
            yield slot, partition, others, load


def _situations(others: Sequence[Partition]) -> Iterator[list[Partition]]:
    """Yield sets of partitions that run a batch at the same time: all, all but one, none."""
    yield list(others)
    if len(others) > 1:
        for i in range(len(others)):
            yield [other for j, other in enumerate(others) if j != i]
    if others:
        yield []
