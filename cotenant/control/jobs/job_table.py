"""Hold the jobs that have not ended and the devices that may have some, and tell what room there is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.control.jobs.job_device import JobDevice
from cotenant.control.jobs.job_record import JobRecord
from cotenant.control.jobs.options import JobsOptions
from cotenant.core.identity import DeviceId
from cotenant.core.job import BatchInference, Job, JobId, JobState
from cotenant.core.units import show_count, show_memory, show_share

CLOSING = "waits for the server to start again"
FRESH = 60.0  # seconds that a job counts as having waited when it is submitted: priority counts from the start


class JobTable:
    """Hold the scheduler's state; only the scheduler changes it.

    jobs: as they were submitted. running: those of them that have a process. models: those that batch inference can
    run; None: not heard of yet. closing: no job is started any more.
    """

    def __init__(self, options: JobsOptions) -> None:
        self.options = options
        self.jobs: dict[JobId, JobRecord] = {}
        self.running: dict[JobId, JobRecord] = {}
        self.devices: dict[DeviceId, JobDevice] = {}
        self.models: frozenset[str] | None = None
        self.closing = False

    def device_of(self, record: JobRecord) -> JobDevice | None:
        """Return the device on which a job runs, or ran last; None where that takes no jobs."""
        return None if record.device is None else self.devices.get(record.device)

    def jobs_on(self, device: JobDevice) -> list[JobRecord]:
        """Return the jobs that have a process on a device."""
        return [record for record in self.running.values() if record.device == device.id]

    def weight_on(self, device: JobDevice) -> int:
        """Return the priorities of the jobs that divide what is idle on a device, in sum."""
        return sum(each.job.priority for each in self.jobs_on(device) if each.state is JobState.RUNNING)

    def waiting(self, now: float) -> list[JobRecord]:
        """Return the jobs that wait for a start and are due, in the order in which they should get one: who has waited
        longest, times its priority, first."""
        due = [record for record in self.jobs.values() if record.state is JobState.QUEUED and now >= record.due]
        return sorted(due, key=lambda record: -record.job.priority * (now - record.submitted_at + FRESH))

    def candidates(self, job: Job, now: float) -> dict[DeviceId, tuple[Job, ...]]:
        """Return the devices on which a job can be started now, with the jobs there."""
        return {
            device.id: tuple(other.job for other in self.jobs_on(device))
            for device in self.devices.values()
            if not self.no_room(job, device, now)
        }

    def why_waiting(self, job: Job, now: float) -> str:
        """Return why a job cannot be started now; empty where it can."""
        if self.closing:
            return CLOSING
        if missing := self.missing_model(job):
            return missing
        if not self.devices:
            return "waits for a device: none takes jobs now"
        return min((self.no_room(job, device, now) for device in self.devices.values()), key=bool)

    def reasons(self, records: Sequence[JobRecord], now: float) -> list[str]:
        """Return why each of these jobs cannot be started now; jobs of equal needs wait for the same."""
        known: dict[tuple[int, str], str] = {}
        reasons = []
        for record in records:
            key = self.needs(record.job), self.missing_model(record.job)
            if key not in known:
                known[key] = self.why_waiting(record.job, now)
            reasons.append(known[key])
        return reasons

    def missing_model(self, job: Job) -> str:
        """Return what a job of batch inference waits for; empty where its model can be run."""
        if not isinstance(job.work, BatchInference):
            return ""
        if self.models is None:
            return "waits until the server has told which models it has"
        if job.work.model in self.models:
            return ""
        return f"waits for model {job.work.model!r}, which is not loaded"

    def no_room(self, job: Job, device: JobDevice, now: float) -> str:
        """Return why a job cannot be started on a device now; empty where it can."""
        if pressure := device.pressure(now):
            return f"yields to serving on {device.id}: {pressure}"
        if device.seen.idle < self.options.least_idle:
            return f"waits for idle share: less than {show_share(self.options.least_idle)} of {device.id} is idle"
        running = sum(record.state is JobState.RUNNING for record in self.jobs_on(device))
        if running >= self.options.slots:
            return f"waits for its turn: {show_count(running, 'job')} on {device.id}, which are the most at once"
        free = self.free_memory(device)
        if self.needs(job) > free:
            return (
                f"waits for memory: it needs {show_memory(self.needs(job))}, and {show_memory(max(free, 0))} are free"
                f" on {device.id}"
            )
        return ""

    def needs(self, job: Job) -> int:
        """Return the bytes that a job is counted with."""
        return self.options.memory if job.memory is None else job.memory

    def free_memory(self, device: JobDevice) -> float:
        """Return bytes that no job on a device was promised; those of jobs that are told to stop are not free yet."""
        if device.seen.memory is None:
            return math.inf
        return max(device.seen.memory, 0) - sum(self.needs(record.job) for record in self.jobs_on(device))

    def too_large(self, device: JobDevice, now: float) -> JobRecord | None:
        """Return the job to be told to stop where jobs have been promised more memory than is free for a while: a
        paused one first, then those of the lowest priority, the last submitted first."""
        jobs = self.jobs_on(device)
        leaving = sum(self.needs(record.job) for record in jobs if record.stop is not None)
        if self.free_memory(device) + leaving >= 0:
            device.overfull_since = math.inf
            return None
        device.overfull_since = min(device.overfull_since, now)
        if now < device.overfull_since + self.options.memory_patience:
            return None
        staying = [record for record in jobs if record.stop is None and self.needs(record.job)]
        return min(reversed(staying), key=lambda record: (record.state is not JobState.PAUSED, record.job.priority))
