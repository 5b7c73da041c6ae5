"""Choose which best-effort job stands on which device of a plan, after serving has been planned.

A device's choice among jobs is `colocate`'s: sets of candidates beside a target are scored, by the predicted sum of
throughputs (KACE's and ours), by a rule such as MEMCAP, or at random. Whatever the score, a job only stands where it
harms nobody: its memory fits, and with the high quantile of the slowdown by jobs the plan still passes `check` and the
forecast of every model there still attains its SLO. The plan of what is served never changes for a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from cotenant.core.background_job import BackgroundJob, step_rate
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, JobPlacement, Plan
from cotenant.core.units import WHOLE, show_memory, show_names, show_share
from cotenant.errors import PlanError
from cotenant.planners.applications import without_applications
from cotenant.planners.check import check
from cotenant.planners.colocate import (
    SetScore,
    rank_at_random,
    rank_by_learned_sum,
    rank_by_prediction,
    rank_by_rule,
    rank_sets,
)
from cotenant.planners.forecast.models import forecast_models
from cotenant.planners.job_interference import (
    cautious,
    idle_share,
    is_profiled,
    job_loads,
    job_memory,
    jobs_of,
    loads_of,
    workers_memory,
    worst_slowdowns,
)
from cotenant.planners.problem import Problem
from cotenant.predictors import Load
from cotenant.predictors.kernels import ThroughputSum

MIN_IDLE = 10  # ‰ of a device; with less left on average, a job would hardly get on

# Scores sets of candidates beside a target, one of the models that the device serves.
JobPolicy = Callable[[Load], SetScore]


def by_prediction(problem: Problem) -> JobPolicy:
    """Prefer the largest predicted sum of throughputs, each relative to that alone."""
    return lambda target: rank_by_prediction(target, problem.interference, problem.profiles, "relative")


def by_learned_sum(predictor: ThroughputSum) -> JobPolicy:
    """Prefer the largest sum of rows/s that a KACE predictor expects."""
    return lambda target: rank_by_learned_sum(target, predictor)


def by_rule(rule: str, problem: Problem) -> JobPolicy:
    """Prefer by one feature of the jobs: `colocate.RULES`, such as the least memory."""
    return lambda target: rank_by_rule(rule, problem.profiles)


def at_random(rng: np.random.Generator) -> JobPolicy:
    return lambda target: rank_at_random(rng)


class JobPlaces(msgspec.Struct, frozen=True):
    """Hold the devices that a job may stand on, best first as far as idle share goes, or why there is none."""

    devices: tuple[DeviceId, ...]
    reason: str = ""


def place_jobs(plan: Plan, problem: Problem, policy: JobPolicy | None = None) -> Plan:
    """Return the plan with the problem's jobs on its devices, and with the reasons of those that wait.

    Devices choose in turns, the one that leaves a job most first; each takes the job that the policy (default:
    `by_prediction`) ranks highest of those that it may have. Plan and problem of applications are judged by the budgets
    of stages.
    """
    placing = _Placing(without_jobs(plan), without_applications(problem, plan.split), policy or by_prediction(problem))
    waiting = {job.name: job for job in problem.jobs}
    while waiting and (chosen := placing.next(waiting)) is not None:
        del waiting[chosen.name]
    return msgspec.structs.replace(
        placing.plan, waiting_jobs={name: placing.reason(job) for name, job in waiting.items()}
    )


def places_for(job: BackgroundJob, plan: Plan, problem: Problem) -> JobPlaces:
    """Return where one more job may stand, beside those that the plan has."""
    placing = _Placing(plan, without_applications(problem, plan.split), by_prediction(problem))
    devices = tuple(device for device in placing.by_idle() if not placing.harm(device, job))
    return JobPlaces(devices, "" if devices else placing.reason(job))


def without_jobs(plan: Plan) -> Plan:
    """Return the plan of what is served alone."""
    if not plan.waiting_jobs and not any(device.jobs for device in plan.devices):
        return plan
    devices = tuple(msgspec.structs.replace(device, jobs=()) for device in plan.devices)
    return msgspec.structs.replace(plan, devices=devices, waiting_jobs={})


class _Placing:
    """Place jobs one by one. plan: with those that are placed."""

    def __init__(self, plan: Plan, problem: Problem, policy: JobPolicy) -> None:
        self.plan = plan
        self._problem = problem
        self._judged = cautious(problem)
        self._policy = policy
        self._kinds: Mapping[str, Kind] = {kind.name: kind for kind in problem.fleet}
        self._utilisation = forecast_models(plan, problem).utilisation
        self._harms: dict[tuple[object, ...], str] = {}

    def next(self, waiting: Mapping[str, BackgroundJob]) -> BackgroundJob | None:
        """Place one of these jobs and return it; None where no device may have any."""
        for device_id in self.by_idle():
            for job in self._ranked(device_id, waiting):
                if not self.harm(device_id, job):
                    self._place(device_id, job)
                    return job
        return None

    def by_idle(self) -> list[DeviceId]:
        """Return the devices, those first that leave one more job most: its part of what is idle, and where no job
        stands yet twice that, as it takes nothing from another there."""

        def worth(device: Device) -> float:
            weight = sum(job.priority for job in jobs_of(device, self._problem))
            return idle_share(device, self._utilisation) * (1 / (1 + weight) if weight else 2.0)

        return [device.id for device in sorted(self.plan.devices, key=worth, reverse=True)]

    def reason(self, job: BackgroundJob) -> str:
        """Say why no device may have a job: of the devices that come nearest to it."""
        if not self.plan.devices:
            return "the plan uses no device"
        told: dict[str, list[DeviceId]] = {}
        for device_id in self.by_idle():
            told.setdefault(self.harm(device_id, job), []).append(device_id)
        reason, devices = max(told.items(), key=lambda each: len(each[1]))
        many = show_names([str(device) for device in devices]) if len(devices) < 4 else f"{len(devices)} devices"
        return f"on {many}: {reason}"

    def harm(self, device_id: DeviceId, job: BackgroundJob) -> str:
        """Say why a device must not have a job; "" where it may."""
        device = self._device(device_id)
        key = (device_id, device.jobs, job.model, job.batch, job.priority, job.memory)
        if key not in self._harms:
            try:
                self._harms[key] = self._harm(device, job)
            except PlanError as error:  # a predictor that does not know the job's model, for one
                self._harms[key] = str(error)
        return self._harms[key]

    def _harm(self, device: Device, job: BackgroundJob) -> str:
        problem, kind = self._problem, self._kinds[device.kind]
        if not is_profiled(job, kind.name, problem):
            return f"{job.model!r} was not profiled there in a batch of {job.batch}"
        if kind.geometry is not None:
            return "MIG instances are isolated, and what one leaves idle is nobody else's"
        jobs = [*jobs_of(device, problem), job]
        free = kind.memory - workers_memory(device, problem)
        free -= sum(job_memory(other, kind.name, problem) for other in jobs[:-1])
        if (needs := job_memory(job, kind.name, problem)) > free:
            return f"it needs {show_memory(needs)}, {show_memory(max(free, 0))} are free"
        idle = idle_share(device, self._utilisation)
        if idle < MIN_IDLE:
            return f"{show_share(round(idle))} are left idle"
        if not step_rate(problem.profiles[job.model, kind.name], job.batch, WHOLE, kind.processors):
            return "none of its steps was profiled"
        return self._violated(device, jobs)

    def _violated(self, device: Device, jobs: list[BackgroundJob]) -> str:
        """Say which SLO might be violated beside these jobs; "" where none."""
        beside = self._with(device, jobs)
        only = msgspec.structs.replace(self.plan, devices=(beside,))
        if broken := [each for each in check(only, self._problem) if each.rule == "job slo"]:
            return str(broken[0])
        slowdowns = worst_slowdowns(beside, jobs, self._problem, self._judged)
        models = {placement.model for part in device.partitions for placement in part.placements}
        forecasts = forecast_models(self.plan, self._problem, slowdowns).models
        for name in sorted(models & forecasts.keys()):
            attained, required = forecasts[name].attainment, self._problem.model(name).attainment
            if attained < required:
                return f"{name} would attain {attained * 100:.2f} % < {required * 100:g} %"
        return ""

    def _ranked(self, device_id: DeviceId, waiting: Mapping[str, BackgroundJob]) -> list[BackgroundJob]:
        """Rank the jobs for a device by the policy; equal ones by priority, then in the order of the problem."""
        device = self._device(device_id)
        served = [load for partition in device.partitions for load in loads_of(partition, device.kind)]
        idle, there = idle_share(device, self._utilisation), jobs_of(device, self._problem)
        candidates: dict[tuple[Load, ...], list[BackgroundJob]] = {}
        for job in sorted(waiting.values(), key=lambda each: -each.priority):
            if is_profiled(job, device.kind, self._problem):
                loads = job_loads([*there, job], device.kind, idle)
                if len(loads) == len(there) + 1:
                    candidates.setdefault((*served[1:], *loads), []).append(job)
        if not served:
            return [job for jobs in candidates.values() for job in jobs]
        ranked = rank_sets(candidates, self._policy(served[0]))
        return [job for choice in ranked for job in candidates[choice.colocated]]

    def _place(self, device_id: DeviceId, job: BackgroundJob) -> None:
        device = self._device(device_id)
        placed = self._with(device, [*jobs_of(device, self._problem), job])
        devices = tuple(placed if each.id == device_id else each for each in self.plan.devices)
        self.plan = msgspec.structs.replace(self.plan, devices=devices)

    def _device(self, device_id: DeviceId) -> Device:
        return next(device for device in self.plan.devices if device.id == device_id)

    @staticmethod
    def _with(device: Device, jobs: list[BackgroundJob]) -> Device:
        placed = tuple(JobPlacement(name=job.name, model=job.model, batch=job.batch) for job in jobs)
        return msgspec.structs.replace(device, jobs=placed)
