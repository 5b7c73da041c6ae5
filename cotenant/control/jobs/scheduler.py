"""Decide when best-effort jobs start, what share each gets, when they yield to serving, and how they end.

One scheduler serves the simulator and the live server: events in, commands out. It never waits, reads no clock and owns
no process. Jobs take what is idle, down to none: they have nothing from the moment at which serving needs their device
until it has been calm for a while. What they have is divided by weighted fair queueing of share-seconds
(`fair_shares`). A job has at most one attempt at a time; one that fails is started again after a delay that doubles, as
often as its retries allow. Stops that are no fault of the job's (too little memory, a model that is unloaded, the end
of the server) do not count, and it goes on from its checkpoint later. Each job ends once: succeeded, failed or
cancelled.
"""

from __future__ import annotations

import math

import msgspec

from cotenant.control.jobs.events import (
    CANCELLED,
    DeadlineMissed,
    DevicesObserved,
    ForgetJob,
    GrantShare,
    JobCancelAsked,
    JobCommand,
    JobEvent,
    JobExited,
    JobInterfered,
    JobPauseAsked,
    JobPlaced,
    JobProgressed,
    JobRefused,
    JobResumeAsked,
    JobsRestored,
    JobsShutdown,
    JobSubmitted,
    JobsWoke,
    KeepJob,
    KillJob,
    ModelsChanged,
    PlaceJob,
    PressureSeen,
    StartJob,
    StoredJob,
    TellStop,
    WakeJobsAt,
)
from cotenant.control.jobs.fair_shares import caught_up, fair_shares
from cotenant.control.jobs.job_device import JobDevice
from cotenant.control.jobs.job_record import JobRecord, Stop
from cotenant.control.jobs.job_table import CLOSING, JobTable
from cotenant.control.jobs.options import JobsOptions
from cotenant.core.job import Job, JobId, JobState, JobStatus
from cotenant.core.units import show_memory, show_seconds
from cotenant.errors import ConfigError

PAUSED = "paused by its owner"


class JobScheduler:
    """Decide the life of jobs. Feed it events in order of time; carry out its commands in order."""

    def __init__(self, options: JobsOptions | None = None) -> None:
        self.options = options or JobsOptions()
        self._table = JobTable(self.options)
        self._jobs = self._table.jobs
        self._running = self._table.running
        self._devices = self._table.devices
        self._ended: dict[JobId, JobStatus] = {}
        self._wake = math.inf  # what was asked for last

    def handle(self, event: JobEvent, now: float) -> list[JobCommand]:
        """Decide what to do about an event at the time `now`: unix seconds, by a clock that never goes back. Raises
        ConfigError for a job whose id there is already."""
        commands = self._handle(event, now)
        self._release_memory(commands, now)
        self._kill_overdue(commands, now)
        self._divide(commands, now)
        self._place(commands, now)
        self._predict(commands, now)
        self._keep(commands, now)
        self._set_timer(commands, now)
        return commands

    def status(self, id: JobId) -> JobStatus | None:
        """Return where a job stands; None where there is none of that id."""
        record = self._jobs.get(id)
        return self._ended.get(id) if record is None else record.status()

    def statuses(self) -> list[JobStatus]:
        """Return where all jobs stand: those that ended, in that order, then the others, as they were submitted."""
        return [*self._ended.values(), *(record.status() for record in self._jobs.values())]

    @property
    def processes(self) -> int:
        """How many jobs have a process now."""
        return len(self._running)

    # Events

    def _handle(self, event: JobEvent, now: float) -> list[JobCommand]:
        match event:
            case JobProgressed(id, attempt):
                if (record := self._current(id, attempt)) is not None:
                    record.advance(event, self._table.device_of(record), now)
            case DevicesObserved():
                return self._observed(event, now)
            case PressureSeen(devices):
                for device, reason in devices.items():
                    if device in self._devices:
                        self._devices[device].press(reason, now, self.options)
            case JobExited():
                return self._exited(event, now)
            case JobRefused(id, attempt, reason):
                return self._refused(id, attempt, reason, now)
            case JobSubmitted(job):
                self._submitted(job, now)
            case JobPauseAsked(id):
                self._pause(id)
            case JobResumeAsked(id):
                self._resume(id)
            case JobCancelAsked(id, reason):
                return self._cancel(id, reason, now)
            case JobPlaced():
                return self._placed(event, now)
            case JobInterfered(id, interference):
                if id in self._jobs:
                    self._jobs[id].interference = interference
            case ModelsChanged(models):
                return self._models_changed(models, now)
            case JobsRestored(jobs):
                return self._restored(jobs, now)
            case JobsShutdown(grace):
                return self._shut_down(grace, now)
            case JobsWoke():
                self._wake = math.inf
        return []

    def _submitted(self, job: Job, now: float) -> None:
        if job.id in self._jobs or job.id in self._ended:
            raise ConfigError(f"id: there is a job {job.id!r} already; submit it under another id")
        self._jobs[job.id] = JobRecord(StoredJob(JobStatus(job=job, state=JobState.QUEUED, submitted_at=now)))

    def _pause(self, id: JobId) -> None:
        record = self._jobs.get(id)
        if record is not None and not (record.stop is not None and record.stop.cancels):
            record.state, record.reason = JobState.PAUSED, PAUSED

    def _resume(self, id: JobId) -> None:
        record = self._jobs.get(id)
        if record is not None and record.state is JobState.PAUSED:
            record.state = JobState.RUNNING if record.process else JobState.QUEUED
            record.reason = "waits until it is started again"

    def _cancel(self, id: JobId, reason: str, now: float) -> list[JobCommand]:
        record = self._jobs.get(id)
        if record is None:
            return []
        if not record.process:
            return self._end(record, JobState.CANCELLED, reason, now)
        commands = self._tell(record, reason, now, cancels=True)
        record.state = JobState.RUNNING  # one that is paused, too, has to save what it has
        return commands

    def _observed(self, event: DevicesObserved, now: float) -> list[JobCommand]:
        for device, seen in event.devices.items():
            if device in self._devices:
                self._devices[device].observe(seen, now, self.options)
            else:
                self._devices[device] = JobDevice(device, seen, now)
        for device in self._devices.keys() - event.devices.keys():
            del self._devices[device]
        commands: list[JobCommand] = []
        for record in self._running.values():
            if record.device not in self._devices:
                commands += self._tell(record, f"waits for a device: {record.device} takes no jobs any more", now)
        return commands

    def _models_changed(self, models: frozenset[str], now: float) -> list[JobCommand]:
        self._table.models = models
        commands: list[JobCommand] = []
        for record in self._running.values():
            if missing := self._table.missing_model(record.job):
                commands += self._tell(record, missing, now)
        return commands

    def _restored(self, jobs: tuple[StoredJob, ...], now: float) -> list[JobCommand]:
        commands: list[JobCommand] = []
        for stored in jobs:
            status = stored.status
            if status.state.ended:
                self._ended[status.job.id] = status
                continue
            record = self._jobs[status.job.id] = JobRecord(stored)
            if stored.cancelled:
                commands += self._end(record, JobState.CANCELLED, CANCELLED, now)
            elif status.state is JobState.RUNNING:  # a server that stops in order leaves none behind
                commands += self._failed(record, "the server died while it ran", False, now)
        return commands

    def _shut_down(self, grace: float, now: float) -> list[JobCommand]:
        self._table.closing = True
        commands: list[JobCommand] = []
        for record in self._running.values():
            commands += self._tell(record, CLOSING, now, grace)
        return commands

    # Ends of attempts and of jobs

    def _current(self, id: JobId, attempt: int) -> JobRecord | None:
        """Return the job that this attempt runs; None for late events."""
        record = self._running.get(id)
        return record if record is not None and record.process == attempt else None

    def _exited(self, event: JobExited, now: float) -> list[JobCommand]:
        record = self._current(event.id, event.attempt)
        if record is None:
            return []
        record.spend(event.share_seconds)
        stop = record.stop
        self._leave(record)
        if event.completed:
            return self._end(record, JobState.SUCCEEDED, "", now)
        if stop is None:
            return self._failed(record, event.reason or "it ended without a reason", event.hopeless, now)
        if stop.cancels:
            return self._end(record, JobState.CANCELLED, stop.reason, now)
        self._requeue(record, stop.reason)
        return []

    def _leave(self, record: JobRecord) -> None:
        """Hear that nothing of an attempt is left."""
        record.leave()
        del self._running[record.job.id]

    def _failed(self, record: JobRecord, reason: str, hopeless: bool, now: float) -> list[JobCommand]:
        attempts = record.job.retries + 1
        if hopeless:
            return self._end(record, JobState.FAILED, reason, now)
        if record.failures >= record.job.retries:
            tried = f" (the last of {attempts} attempts)" if attempts > 1 else ""
            return self._end(record, JobState.FAILED, reason + tried, now)
        record.failures, record.refusals = record.failures + 1, 0
        record.due = now + self.options.delay(record.failures)
        wait = show_seconds(record.due - now)
        failed = f"failed {record.failures} of {attempts} times, and is started again {wait} after that: {reason}"
        self._requeue(record, failed)
        return []

    def _refused(self, id: JobId, attempt: int, reason: str, now: float) -> list[JobCommand]:
        record = self._current(id, attempt)
        if record is None:
            return []
        stop = record.stop
        self._leave(record)
        if stop is not None and stop.cancels:
            return self._end(record, JobState.CANCELLED, stop.reason, now)
        record.refusals += 1
        record.due = now + self.options.delay(record.refusals)
        self._requeue(record, f"waits for a process: {reason}")
        return []

    def _requeue(self, record: JobRecord, reason: str) -> None:
        """Let a job wait that has no process any more, unless it is paused."""
        if record.state is JobState.RUNNING:
            record.state, record.reason = JobState.QUEUED, reason

    def _tell(
        self, record: JobRecord, reason: str, now: float, grace: float = math.inf, *, cancels: bool = False
    ) -> list[JobCommand]:
        """Tell an attempt to stop, once. The owner's reason outlasts others, and the shortest grace holds."""
        due = now + min(record.job.grace, grace)
        if (stop := record.stop) is not None:
            stop.due = min(stop.due, due)
            if not stop.cancels:
                stop.reason, stop.cancels = reason, cancels
            return []
        record.stop = Stop(reason, due, cancels)
        return [TellStop(record.job.id, record.process, reason)]

    def _kill_overdue(self, commands: list[JobCommand], now: float) -> None:
        for record in self._running.values():
            if record.stop is not None and not record.stop.killed and now >= record.stop.due:
                record.stop.killed = True
                commands.append(KillJob(record.job.id, record.process, record.stop.reason))

    def _end(self, record: JobRecord, state: JobState, reason: str, now: float) -> list[JobCommand]:
        job = record.job
        del self._jobs[job.id]
        self._ended[job.id] = msgspec.structs.replace(
            record.status(),
            state=state,
            reason=reason,
            ended_at=now,
            predicted_end=None,
            will_miss_deadline=job.deadline is not None and (now > job.deadline or state is not JobState.SUCCEEDED),
        )
        commands: list[JobCommand] = [KeepJob(StoredJob(self._ended[job.id], record.failures))]
        while len(self._ended) > self.options.history:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            commands.append(ForgetJob(oldest))
        return commands

    # Shares and memory

    def _divide(self, commands: list[JobCommand], now: float) -> None:
        """Divide what is idle on each device; what is taken away is said first."""
        shares = dict.fromkeys(self._running, 0)
        for device in self._devices.values():
            idle = device.idle(now)
            active = [record for record in self._table.jobs_on(device) if record.state is JobState.RUNNING]
            claims = [record.claim(device) for record in active]
            device.virtual = caught_up(claims, idle, device.virtual)
            divided = fair_shares(claims, idle, capacity=device.seen.capacity, horizon=self.options.horizon)
            for record, claim, share in zip(active, claims, divided, strict=True):
                record.served = claim.served
                record.reason = "" if share else _why_nothing(device, now)
                shares[record.job.id] = share
        changed = [record for record in self._running.values() if shares[record.job.id] != record.granted]
        for record in sorted(changed, key=lambda record: shares[record.job.id] - record.granted):
            record.grant(shares[record.job.id], self._table.device_of(record), now)
            commands.append(GrantShare(record.job.id, record.process, record.granted))

    def _release_memory(self, commands: list[JobCommand], now: float) -> None:
        for device in self._devices.values():
            if (record := self._table.too_large(device, now)) is not None:
                needs = show_memory(self._table.needs(record.job))
                commands += self._tell(record, f"waits for memory: {needs} are not free on {device.id} any more", now)

    # Starts

    def _place(self, commands: list[JobCommand], now: float) -> None:
        """Ask where the next job should run, one after the other."""
        asked = any(record.placing for record in self._jobs.values())
        waiting = [record for record in self._table.waiting(now) if not record.placing]
        for record, reason in zip(waiting, self._table.reasons(waiting, now), strict=True):
            record.reason = reason
            if not record.reason and asked:
                record.reason = "waits for its turn"
            elif not record.reason:
                record.placing = asked = True
                record.reason = "waits until a device has been chosen for it"
                commands.append(PlaceJob(record.job, self._table.candidates(record.job, now)))

    def _placed(self, event: JobPlaced, now: float) -> list[JobCommand]:
        record = self._jobs.get(event.id)
        if record is None or not record.placing:
            return []
        record.placing = False
        if record.state is not JobState.QUEUED or self._table.closing:
            return []
        if event.device not in self._table.candidates(record.job, now) or self._table.missing_model(record.job):
            record.due = now + self.options.place_again
            record.reason = f"waits for a device: {event.reason or 'the one that was chosen has no room any more'}"
            return []
        record.begin(self._devices[event.device], now)
        self._running[event.id] = record
        return [StartJob(record.job, event.device, record.attempt)]

    # When they will end, what is stored, and when to look again

    def _predict(self, commands: list[JobCommand], now: float) -> None:
        roomiest = max(self._devices.values(), key=lambda device: device.average, default=None)
        weights = {device.id: self._table.weight_on(device) for device in self._devices.values()}
        for record in self._jobs.values():
            there, was_late = self._table.device_of(record), record.late
            device = there or roomiest
            own = 0 if there is not None and record.state is JobState.RUNNING else record.job.priority
            record.predict(device, own + (0 if device is None else weights[device.id]), now)
            if record.late and not was_late and record.job.deadline is not None:
                commands.append(DeadlineMissed(record.job.id, record.job.deadline, record.status().predicted_end))

    def _keep(self, commands: list[JobCommand], now: float) -> None:
        """Store what changed: a job's state at once, its progress now and then."""
        changed = (job for job in self._jobs.values() if job.should_be_kept(now, self.options.keep_every))
        commands += [KeepJob(record.keep(now)) for record in changed]

    def _set_timer(self, commands: list[JobCommand], now: float) -> None:
        times = [device.pressed_until for device in self._devices.values()]
        times += [device.overfull_since + self.options.memory_patience for device in self._devices.values()]
        times += [record.stop.due for record in self._running.values() if record.stop is not None]
        times += [record.due for record in self._jobs.values() if record.state is JobState.QUEUED]
        due = min((time for time in times if time > now), default=math.inf)
        if due < self._wake:
            self._wake = due
            commands.append(WakeJobsAt(due))

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        assert not self._jobs.keys() & self._ended.keys()
        assert self._running == {id: record for id, record in self._jobs.items() if record.process}  # noqa: A001
        assert sum(record.placing for record in self._jobs.values()) <= 1
        for record in self._jobs.values():
            record.invariants()
        for device in self._devices.values():
            granted = sum(record.granted for record in self._table.jobs_on(device))
            assert granted <= max(device.seen.idle, 0), device.id


def _why_nothing(device: JobDevice, now: float) -> str:
    if pressure := device.pressure(now):
        return f"yields to serving on {device.id}: {pressure}"
    if device.seen.idle <= 0:
        return f"serving leaves nothing idle on {device.id}"
    return f"waits until other jobs on {device.id} have had as much"
