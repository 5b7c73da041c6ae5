"""Forecast what best-effort jobs get: the share that partitions leave idle, and how many steps that is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant.core.background_job import BackgroundJob, legal_share, step_rate
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Plan
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.planners.capacity import slowdown
from cotenant.planners.forecast.results import Forecast
from cotenant.planners.job_interference import idle_share, job_loads, jobs_of, loads_of
from cotenant.planners.problem import Problem


class JobForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of a job.

    idle: fraction of its device that partitions leave. share: fraction that the job gets, beside the other jobs there.
    share_seconds: that it gets in a second; processor seconds where the device has processors. steps: per second. end:
    seconds after the start at which it is done; None for a job without an end, and where it gets nothing.
    """

    device: DeviceId
    idle: float
    share: float
    share_seconds: float
    steps: float
    end: float | None
    deadline: float | None

    @property
    def will_miss_deadline(self) -> bool:
        """Whether the idle time that is forecast does not bear out the deadline."""
        return self.deadline is not None and (self.end is None or self.end > self.deadline)


def forecast_jobs(plan: Plan, problem: Problem, served: Forecast) -> dict[str, JobForecast]:
    """Forecast the jobs that a plan places, by name, beside what it serves: from the start on, and as if none of them
    ended. served: the plan's forecast."""
    forecasts: dict[str, JobForecast] = {}
    for device in plan.devices:
        jobs = jobs_of(device, problem)
        weight = sum(job.priority for job in jobs)
        for job in jobs:
            part = job.priority / weight
            forecasts[job.name] = _forecast(job, part, device, problem, served.utilisation)
    return forecasts


def _forecast(
    job: BackgroundJob, part: float, device: Device, problem: Problem, utilisation: Mapping[str, float]
) -> JobForecast:
    kind = problem.kind(device.kind)
    processors = kind.processors
    idle = idle_share(device, utilisation)
    shares = {share * part: chance for share, chance in _idle_distribution(device, utilisation).items()}
    steps = _steps_on_processors if processors else _steps_on_gpu
    rate = steps(problem.profiles[job.model, kind.name], job.batch, shares, kind)
    rate /= _slowdown(job, idle * part, device, problem, utilisation)
    return JobForecast(
        device=device.id,
        idle=idle / WHOLE,
        share=idle * part / WHOLE,
        share_seconds=idle * part / WHOLE * (processors or 1.0),
        steps=rate,
        end=None if job.steps is None or not rate else job.steps / rate,
        deadline=job.deadline,
    )


def _steps_on_processors(profile: Profile, batch: int, shares: Mapping[float, float], kind: Kind) -> float:
    """Return the steps per second of a job that has what is idle at each moment. shares: probability of each, in ‰."""
    return sum(chance * step_rate(profile, batch, round(share), kind.processors) for share, chance in shares.items())


def _steps_on_gpu(profile: Profile, batch: int, shares: Mapping[float, float], kind: Kind) -> float:
    """Return the same where a step has the largest legal share of what is idle when it begins: as it keeps a small one
    for longer, the mean is that of seconds. None begins where nothing is idle."""
    rates = {share: step_rate(profile, batch, legal_share(kind, share), 0.0) for share in shares}
    begins = sum(chance for share, chance in shares.items() if rates[share])
    seconds = sum(chance / rates[share] for share, chance in shares.items() if rates[share])
    return begins**2 / seconds if seconds else 0.0


def _slowdown(
    job: BackgroundJob, share: float, device: Device, problem: Problem, utilisation: Mapping[str, float]
) -> float:
    """Return how many times as long a job's steps take beside what is served: as long as predicted beside all
    partitions for the part of the time in which some partition runs a batch."""
    loads = job_loads([job], device.kind, share)
    if not loads or not device.partitions:
        return 1.0
    nothing = 1.0
    for slot in range(len(device.partitions)):
        nothing *= 1 - min(utilisation.get(str(LaneId(device.id, slot)), 0.0), 1.0)
    beside = [loads_of(partition, device.kind) for partition in device.partitions]
    return 1 + (slowdown(problem, loads[0], beside) - 1) * (1 - nothing)


def _idle_distribution(device: Device, utilisation: Mapping[str, float]) -> dict[int, float]:
    """Return the probability of each idle share (‰), as if partitions were busy independently of each other."""
    chances = {max(device.free, 0): 1.0}
    for slot, partition in enumerate(device.partitions):
        busy = min(utilisation.get(str(LaneId(device.id, slot)), 0.0), 1.0)
        next_: dict[int, float] = {}
        for share, chance in chances.items():
            next_[share] = next_.get(share, 0.0) + chance * busy
            next_[share + partition.share] = next_.get(share + partition.share, 0.0) + chance * (1 - busy)
        chances = next_
    return chances
