"""Choose the devices of a server's jobs: where every SLO still validates with the high quantile of the slowdown.

That is known of jobs whose steps were profiled: batch inference of a served model, and training that the zoo profiles.
Of any other nothing can be predicted. It stands where the fewest jobs do, and yields like all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from cotenant.control.jobs.events import JobPlaced, PlaceJob
from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import DeviceId
from cotenant.core.job import BatchInference, Job, Training
from cotenant.core.plan import JobPlacement, Plan
from cotenant.live.deployment import Deployment
from cotenant.live.jobs.driver import first_device
from cotenant.planners import Problem
from cotenant.planners.job_placement import JobPlaces, places_for
from cotenant.zoo.trainers import TRAINERS

Key = tuple[Job, tuple[tuple[DeviceId, tuple[Job, ...]], ...]]


class PlaceChooser:
    """Answer `PlaceJob`. Devices are judged in a thread, and again only once the plan, its problem or the jobs there
    have changed. deployment: returns the one in force."""

    def __init__(self, deployment: Callable[[], Deployment]) -> None:
        self._deployment = deployment
        self._judged: tuple[Deployment, dict[Key, JobPlaces]] | None = None

    async def __call__(self, command: PlaceJob) -> JobPlaced:
        deployment = self._deployment()
        if profiled(command.job, deployment.problem) is None:
            return first_device(command)
        places = await self._places(command, deployment)
        device = next((device for device in places.devices if device in command.devices), None)
        return JobPlaced(command.job.id, device, places.reason)

    async def _places(self, command: PlaceJob, deployment: Deployment) -> JobPlaces:
        if self._judged is None or self._judged[0] is not deployment:
            self._judged = deployment, {}
        judged = self._judged[1]
        key = command.job, tuple(sorted(command.devices.items()))
        if key not in judged:
            judged[key] = await asyncio.to_thread(
                judge, command.job, deployment.plan, deployment.problem, command.devices
            )
        return judged[key]


def judge(job: Job, plan: Plan, problem: Problem, running: Mapping[DeviceId, Sequence[Job]]) -> JobPlaces:
    """Return where a job may stand beside what a plan serves and the jobs that run on its devices."""
    known = (profiled(other, problem) for jobs in running.values() for other in jobs)
    beside = {background.name: background for background in known if background is not None}
    devices = tuple(
        msgspec.structs.replace(
            device,
            jobs=tuple(
                JobPlacement(name=other.id, model=beside[other.id].model, batch=beside[other.id].batch)
                for other in running.get(device.id, ())
                if other.id in beside
            ),
        )
        for device in plan.devices
    )
    background = profiled(job, problem)
    assert background is not None, job.id
    return places_for(
        background,
        msgspec.structs.replace(plan, devices=devices),
        msgspec.structs.replace(problem, jobs=tuple(beside.values())),
    )


def profiled(job: Job, problem: Problem) -> BackgroundJob | None:
    """Return a job as planners see it; None where its steps were not profiled."""
    match job.work:
        case BatchInference(model=model, batch=batch):
            pass
        case Training(source=source, batch=batch) if source in TRAINERS:
            model, batch = TRAINERS[source].profile, batch or TRAINERS[source].batch
        case _:
            return None
    largest = [profile.max_batch for (name, _), profile in problem.profiles.items() if name == model]
    if not largest:
        return None
    return BackgroundJob(
        name=job.id,
        model=model,
        batch=min(batch or max(largest), max(largest)),
        priority=job.priority,
        memory=job.memory,
    )
