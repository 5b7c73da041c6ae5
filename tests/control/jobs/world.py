"""Jobs and devices in virtual time around a scheduler: attempts use what they are granted, step by step."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from cotenant.control.jobs.events import (
    DeadlineMissed,
    DeviceIdle,
    DevicesObserved,
    ForgetJob,
    GrantShare,
    JobCommand,
    JobEvent,
    JobExited,
    JobPlaced,
    JobProgressed,
    JobSubmitted,
    JobsWoke,
    KeepJob,
    KillJob,
    PlaceJob,
    StartJob,
    StoredJob,
    TellStop,
    WakeJobsAt,
)
from cotenant.control.jobs.options import JobsOptions
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.identity import DeviceId
from cotenant.core.job import Job, JobId, JobStatus, Training, Work

CPU = DeviceId("cpu")


def job(id: JobId = "job-1", *, work: Work | None = None, **values: Any) -> Job:
    return Job(id=id, name="job", work=work or Training(source="digits"), **values)


class Attempt:
    """A process: takes `step` share-seconds for each step, as fast as its share allows, but begins a step as soon as it
    has no debt. used: of what it is granted, the part that it can use."""

    def __init__(self, start: StartJob, step: float, used: float) -> None:
        self.start = start
        self.share = 0
        self.told = ""
        self.killed = False
        self.step = step
        self.used = used
        self.spent = 0.0
        self.credit = 0.0
        self.steps = 0

    def run(self, seconds: float, capacity: float) -> None:
        self.credit += self.share / 1000 * capacity * seconds * self.used
        while self.credit > 0:
            self.credit -= self.step
            self.spent += self.step
            self.steps += 1


class World:
    """A scheduler with its devices, its processes and its timer, checked after every event."""

    def __init__(self, *, devices: dict[DeviceId, DeviceIdle] | None = None, **options: Any) -> None:
        self.scheduler = JobScheduler(JobsOptions(**options))
        self.now = 1000.0
        self.devices = {CPU: DeviceIdle(1000)} if devices is None else devices
        self.attempts: dict[JobId, Attempt] = {}
        self.stored: dict[JobId, StoredJob] = {}
        self.forgotten: list[JobId] = []
        self.warned: list[DeadlineMissed] = []
        self.wake = math.inf
        self.places = True  # answer where a job should run
        self.said: list[JobCommand] = []  # all but what is stored
        self.step: dict[JobId, float] = {}
        self.used: dict[JobId, float] = {}
        self.observe()

    def tell(self, event: JobEvent) -> list[JobCommand]:
        """Feed an event and carry out what comes of it, and of that; return the commands, those of the store aside."""
        said: list[JobCommand] = []
        events = [event]
        while events:
            commands = self.scheduler.handle(events.pop(0), self.now)
            self.scheduler.invariants()
            for command in commands:
                events += self._carry_out(command)
                if not isinstance(command, KeepJob | WakeJobsAt | DeadlineMissed):
                    said.append(command)
            for device in {attempt.start.device for attempt in self.attempts.values()}:
                assert self._granted(device) <= self._idle(device), "more than is idle"
        self.said += said
        return said

    def _carry_out(self, command: JobCommand) -> list[JobEvent]:
        match command:
            case PlaceJob(placed, devices):
                assert devices
                assert all(device in self.devices for device in devices)
                return [JobPlaced(placed.id, next(iter(devices)))] if self.places else []
            case StartJob(started):
                assert started.id not in self.attempts, "a second process"
                self.attempts[started.id] = Attempt(
                    command, self.step.get(started.id, 0.01), self.used.get(started.id, 1.0)
                )
            case GrantShare(id, attempt, share):
                before = self._granted()
                assert self.attempts[id].start.attempt == attempt
                self.attempts[id].share = share
                assert self._granted() <= max(before, self._idle()), "given before it was taken from another"
            case TellStop(id, attempt, reason):
                assert self.attempts[id].start.attempt == attempt
                assert not self.attempts[id].told, "told twice"
                self.attempts[id].told = reason
            case KillJob(id, attempt):
                assert self.attempts[id].start.attempt == attempt
                assert self.attempts[id].told, "killed without being told"
                self.attempts[id].killed = True
            case KeepJob(stored):
                self.stored[stored.status.job.id] = stored
            case ForgetJob(id):
                self.forgotten.append(id)
                del self.stored[id]
            case DeadlineMissed():
                self.warned.append(command)
            case WakeJobsAt(time):
                self.wake = time
        return []

    def _granted(self, device: DeviceId | None = None) -> int:
        """Return the sum of the shares of a device's jobs, or of all."""
        return sum(each.share for each in self.attempts.values() if device in (None, each.start.device))

    def _idle(self, device: DeviceId | None = None) -> int:
        return sum(max(seen.idle, 0) for each, seen in self.devices.items() if device in (None, each))

    def submit(self, *jobs: Job) -> list[JobCommand]:
        return [command for each in jobs for command in self.tell(JobSubmitted(each))]

    def observe(self, idle: int | None = None, **changes: Any) -> list[JobCommand]:
        """Report the devices, the idle share of all changed if given."""
        if idle is not None or changes:
            given = changes if idle is None else {"idle": idle, **changes}
            self.devices = {device: msgspec.structs.replace(seen, **given) for device, seen in self.devices.items()}
        return self.tell(DevicesObserved(dict(self.devices)))

    def exit(self, id: JobId = "job-1", *, completed: bool = False, reason: str = "exit status 1") -> list[JobCommand]:
        attempt = self.attempts.pop(id)
        return self.tell(JobExited(id, attempt.start.attempt, completed, reason, share_seconds=attempt.spent))

    def until(self, time: float) -> None:
        """Let time pass; the timer fires when it is due."""
        while self.wake <= time:
            self.now, self.wake = self.wake, math.inf
            self.tell(JobsWoke())
        self.now = time

    def run(self, seconds: float, *, every: float = 0.1, total: int | None = None) -> None:
        """Let attempts run, and report what is idle and how far they are."""
        for _ in range(round(seconds / every)):
            for attempt in self.attempts.values():
                attempt.run(every, self.devices[attempt.start.device].capacity)
            self.until(self.now + every)
            for attempt in list(self.attempts.values()):
                start = attempt.start
                self.tell(JobProgressed(start.job.id, start.attempt, attempt.steps, total, attempt.spent))
            self.observe()

    def status(self, id: JobId = "job-1") -> JobStatus:
        status = self.scheduler.status(id)
        assert status is not None
        return status

    def told(self) -> list[JobId]:
        """Return the jobs that were told to stop and have not exited."""
        return [job for job, attempt in self.attempts.items() if attempt.told]

    def share(self, id: JobId = "job-1") -> int:
        return self.attempts[id].share
