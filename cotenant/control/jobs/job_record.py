"""Hold what the scheduler knows of a job that has not ended: its attempt, what it took, how far it is."""

from __future__ import annotations

import math

import msgspec

from cotenant.control.jobs.events import JobProgressed, StoredJob
from cotenant.control.jobs.fair_shares import Claim
from cotenant.control.jobs.job_device import JobDevice
from cotenant.core.identity import DeviceId
from cotenant.core.job import Job, JobInterference, JobState, JobStatus
from cotenant.core.units import WHOLE

WINDOW = 2.0  # seconds over which what a job takes is compared with what it was granted, and its throughput is counted
LONGEST_WINDOW = 30.0  # seconds, for jobs of long steps
LEAST_DEMAND = 10  # ‰
USED = 0.8  # of what was granted: a job that takes less cannot use it
ROOM = 1.25  # for a job that takes less: a share of so many times what it took
MARGIN = 0.1  # of the time left until its deadline by which a job that was late must be early to count as in time


class Stop(msgspec.Struct):
    """Hold that an attempt was told to stop. due: when it is killed. cancels: its job ends with it."""

    reason: str
    due: float
    cancels: bool = False
    killed: bool = False


class JobRecord:
    """Hold a job's state; only the scheduler changes it."""

    def __init__(self, stored: StoredJob) -> None:
        status = stored.status
        self.job: Job = status.job
        self.state = status.state
        self.reason = status.reason  # why it waits, or gets nothing
        self.attempt = status.attempt  # the last one that was started
        self.failures = stored.failures
        self.refusals = 0  # by the system, in a row
        self.process = 0  # the attempt that has a process; 0 where none has
        self.device: DeviceId | None = status.device
        self.granted = 0
        self.stop: Stop | None = None
        self.placing = False  # where it should run has been asked
        self.due = -math.inf  # when it may be started
        self.progress = status.progress
        self.interference = JobInterference()
        self.submitted_at = status.submitted_at
        self.started_at = status.started_at
        self.predicted_end: float | None = None
        self.late = status.will_miss_deadline
        self.served = 0.0  # virtual time on the device of its account
        self._account: JobDevice | None = None  # where it ran last; another one after that was away
        self._kept: tuple[object, ...] = ()  # as it was stored last
        self._kept_progress = status.progress
        self._kept_at = -math.inf
        self._spent = 0.0  # share-seconds of this attempt
        self._began: tuple[int, float] | None = None  # steps and share-seconds of this attempt when first heard of
        self._demand = WHOLE
        self._granted_at = 0.0
        self._offered = 0.0  # share-seconds granted within the window
        self._window = (0.0, 0.0, 0)  # since when, with which share-seconds and steps

    # Its attempt

    def begin(self, device: JobDevice, now: float) -> None:
        """Start the next attempt on a device."""
        self.served = max(self.served if self._account is device else 0.0, device.virtual)
        self._account = device
        self.attempt += 1
        self.process, self.device, self.state, self.reason = self.attempt, device.id, JobState.RUNNING, ""
        self.started_at = now if self.started_at is None else self.started_at
        self._spent, self._began, self._demand = 0.0, None, WHOLE
        self._granted_at, self._offered, self._window = now, 0.0, (now, 0.0, self.progress.steps)

    def leave(self) -> None:
        """Hear that nothing of the attempt is left."""
        self.process, self.granted, self.stop = 0, 0, None
        self.progress = msgspec.structs.replace(self.progress, throughput=0.0)

    def grant(self, share: int, device: JobDevice | None, now: float) -> None:
        """Give it another share, in ‰. device: None where it is gone."""
        if device is not None:
            self._offer(device, now)
        self.granted = share

    # What it takes

    def claim(self, device: JobDevice) -> Claim:
        """Return its claim on the device that it runs on."""
        ceiling = WHOLE if self.job.threads is None else max(device.seen.share_of(self.job.threads), 1)
        return Claim(weight=self.job.priority, served=self.served, most=min(self._demand, ceiling), ceiling=ceiling)

    def spend(self, share_seconds: float) -> None:
        """Charge what the attempt has taken in all so far."""
        more = share_seconds - self._spent
        if math.isfinite(more) and more > 0:
            self._spent += more
            self.served += more / self.job.priority
            total = self.progress.share_seconds + more
            self.progress = msgspec.structs.replace(self.progress, share_seconds=total)

    def advance(self, event: JobProgressed, device: JobDevice | None, now: float) -> None:
        """Take over how far the attempt is."""
        self.spend(event.share_seconds)
        metrics = {name: value for name, value in event.metrics.items() if math.isfinite(value)}
        self.progress = msgspec.structs.replace(
            self.progress, steps=event.steps, total=event.total, metrics=metrics or self.progress.metrics
        )
        if self._began is None:
            self._began = event.steps, self._spent
        if device is not None:
            self._offer(device, now)
            self._close_window(device, now)

    def _offer(self, device: JobDevice, now: float) -> None:
        self._offered += self.granted / WHOLE * device.seen.capacity * (now - self._granted_at)
        self._granted_at = now

    def _close_window(self, device: JobDevice, now: float) -> None:
        """Learn from the last seconds what it can use, and how fast its steps are. A window has whole steps, as far as
        that is possible: between them a job waits until its share allows the next."""
        since, spent, steps = self._window
        seconds, done = now - since, self.progress.steps - steps
        counts_steps = self.progress.total is not None or self.progress.steps > 0
        if seconds < (WINDOW if done or not counts_steps else LONGEST_WINDOW):
            return
        used = self._spent - spent
        if self._offered > 0:
            if used < USED * self._offered:
                share = used / (seconds * device.seen.capacity) * WHOLE
                self._demand = min(max(round(ROOM * share), LEAST_DEMAND), WHOLE)
            else:
                self._demand = min(2 * self._demand, WHOLE)
        self.progress = msgspec.structs.replace(self.progress, throughput=max(done, 0) / seconds)
        self._window, self._offered = (now, self._spent, self.progress.steps), 0.0

    # When it will end

    def predict(self, device: JobDevice | None, weights: int, now: float) -> None:
        """Predict when it ends, on a device where jobs of these weights run together, its own included."""
        self.predicted_end = self._end(device, weights, now)
        deadline = self.job.deadline
        if deadline is None:
            return
        margin = MARGIN * max(deadline - now, 0.0) if self.late else 0.0
        end = now if self.predicted_end is None else self.predicted_end
        self.late = end > deadline - margin if self.predicted_end is not None or now > deadline else self.late

    def _end(self, device: JobDevice | None, weights: int, now: float) -> float | None:
        total = self.progress.total
        if total is None or device is None or self.state is JobState.PAUSED or (cost := self._step_cost()) is None:
            return None
        part = min(device.average * self.job.priority / weights, self.claim(device).most)
        rate = part / WHOLE * device.seen.capacity  # share-seconds a second
        remaining = max(total - self.progress.steps, 0) * cost
        return max(now, self.due) + remaining / rate if rate > 1e-9 else math.inf

    def _step_cost(self) -> float | None:
        """Return share-seconds a step, of this attempt if that has done steps; None where there is nothing to go by."""
        if self._began is not None and self.progress.steps > self._began[0]:
            return (self._spent - self._began[1]) / (self.progress.steps - self._began[0])
        return self.progress.share_seconds / self.progress.steps if self.progress.steps else None

    def status(self) -> JobStatus:
        end = self.predicted_end
        return JobStatus(
            job=self.job,
            state=self.state,
            reason=self.stop.reason if self.stop is not None else self.reason,
            attempt=self.attempt,
            device=self.device,
            granted=self.granted,
            progress=self.progress,
            submitted_at=self.submitted_at,
            started_at=self.started_at,
            predicted_end=end if end is not None and math.isfinite(end) else None,
            will_miss_deadline=self.late,
            interference=self.interference,
        )

    # What outlives the server

    def should_be_kept(self, now: float, every: float) -> bool:
        """Tell whether something has changed that is to be stored: its state at once, its progress now and then."""
        if self._kept != self._lasting():
            return True
        return now >= self._kept_at + every and self.progress != self._kept_progress

    def keep(self, now: float) -> StoredJob:
        """Return what is to be stored, which it then is."""
        self._kept, self._kept_progress, self._kept_at = self._lasting(), self.progress, now
        return StoredJob(self.status(), self.failures, self.stop is not None and self.stop.cancels)

    def _lasting(self) -> tuple[object, ...]:
        cancelled = self.stop is not None and self.stop.cancels
        return self.state, self.attempt, self.device, self.failures, cancelled, self.late

    def invariants(self) -> None:
        """Raise AssertionError where its state contradicts itself."""
        where = (self.job.id, self.state)
        assert not self.state.ended, where
        assert self.process in (0, self.attempt), where
        assert (self.state is JobState.RUNNING) <= bool(self.process) <= (self.state is not JobState.QUEUED), where
        assert self.granted == 0 or self.process, where
        assert self.stop is None or self.process, where
        assert not self.process or self.device is not None, where
        assert self.failures <= self.job.retries, where
        assert self.failures <= self.attempt, where
