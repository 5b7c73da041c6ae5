"""Drive the scheduler of best-effort jobs on the event loop: carry out its commands, report what it needs to know.

It decides nothing. Serving pays nothing for it: what it looks at is counted anyway, files of /proc are read in a
thread, and without jobs nothing is looked at but the sums of what batches took.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from cotenant.backends import Backend
from cotenant.backends.cgroup import cpu_limit
from cotenant.control.jobs.events import (
    DeadlineMissed,
    DeviceIdle,
    DevicesObserved,
    ForgetJob,
    GrantShare,
    JobCommand,
    JobEvent,
    JobExited,
    JobInterfered,
    JobPlaced,
    JobProgressed,
    JobRefused,
    JobsRestored,
    JobsShutdown,
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
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.identity import DeviceId
from cotenant.core.job import Job, JobId, JobStatus
from cotenant.core.units import WHOLE, show_seconds
from cotenant.errors import CotenantError, NotFoundError
from cotenant.live.event_pump import EventPump
from cotenant.live.foreign_load import available_cores
from cotenant.live.jobs.attempts import Preparation
from cotenant.live.jobs.idle_share import IdleMeter, memory_for_jobs, processors
from cotenant.live.jobs.interference import JobSlowdowns, Seconds
from cotenant.live.jobs.job_process import JobProcess
from cotenant.live.jobs.pressure import PressureWatch, ServingCounts
from cotenant.worker.jobs.messages import Ended, Report

logger = logging.getLogger(__name__)

LOOK = 0.05  # seconds between two looks at what serving needs, while a job runs
KILLED = 15.0  # seconds that jobs have to be gone at the end, once they are killed
OBSERVE = 0.5  # seconds between two readings of what is idle

Place = Callable[[PlaceJob], JobPlaced | Awaitable[JobPlaced]]


class Serving(Protocol):
    """What jobs see of the server; see `ServingView`."""

    def counts(self) -> ServingCounts: ...

    def devices(self, model: str = "") -> tuple[DeviceId, ...]: ...

    def idle_of(self, device: DeviceId, now: float) -> int | None: ...

    def models(self) -> frozenset[str]: ...

    def batch_seconds(self) -> Seconds: ...


class _Running:
    """An attempt with its process."""

    def __init__(self, job: Job, attempt: int, device: DeviceId) -> None:
        self.job = job
        self.attempt = attempt
        self.device = device
        self.process: JobProcess | None = None
        self.told = False  # to stop
        self.share = 0  # granted, ‰
        self.sent: tuple[int, float | None] = (0, None)
        self.share_seconds = 0.0  # of a device that is no processor: share times seconds so far
        self.granted_at = 0.0


def first_device(command: PlaceJob) -> JobPlaced:
    """Place a job on the device with the fewest jobs."""
    device = min(command.devices, key=lambda device: (len(command.devices[device]), device))
    return JobPlaced(command.job.id, device)


class JobDriver:
    """Feed a scheduler. `start` it once the first deployment is in force.

    serving: the server. backend: of its devices. preparation: what attempts are made of. keep, forget: store jobs; they
    neither wait nor raise anything. place: chooses a device; None: that with the fewest jobs.
    """

    def __init__(
        self,
        scheduler: JobScheduler,
        serving: Serving,
        backend: Backend,
        preparation: Preparation,
        *,
        keep: Callable[[StoredJob], None] = lambda stored: None,
        forget: Callable[[JobId], None] = lambda job: None,
        place: Place | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._serving = serving
        self._backend = backend
        self._preparation = preparation
        self._keep = keep
        self._forget = forget
        self._place = place or first_device
        self._clock = clock
        # Unix time that never goes back: the machine's clock may be set while a job runs.
        self._epoch = time.time() - clock()  # noqa: TID251  # deadlines are of this clock
        self._pump: EventPump[JobEvent, JobCommand] = EventPump(
            scheduler.handle, self._perform, self._failed, self._unix
        )
        self._running: dict[JobId, _Running] = {}
        self._watch = PressureWatch()
        self._slowdowns = JobSlowdowns()
        self._had: frozenset[JobId] = frozenset()  # jobs with a share at the last observation
        cores = available_cores() if backend.name == "cpu" else ()
        self._capacity = processors(cores, cpu_limit()) if cores else 1.0
        self._meter = IdleMeter(cores, self._capacity) if cores else None
        self._models: frozenset[str] | None = None
        self._resting = True  # there is no job
        self._timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = False

    # Its life

    def start(self, restored: Sequence[StoredJob] = ()) -> None:
        """Begin, with the jobs of the last run of the server."""
        self._begun = True
        if restored:
            self.feed(JobsRestored(tuple(restored)))
        self._spawn(self._observe())

    async def stop(self, grace: float) -> None:
        """Tell all jobs to stop, and wait until nothing is left of them; they are killed after `grace` seconds."""
        if not self._begun:
            return
        self.feed(JobsShutdown(grace))
        gone = [each.process.gone for each in self._running.values() if each.process is not None]
        if gone:
            await asyncio.wait(gone, timeout=grace)
        for each in self._running.values():
            if each.process is not None:
                each.process.kill("the server has stopped")
        if left := [each.process for each in self._running.values() if each.process is not None]:
            gone = [process.gone for process in left]
            await asyncio.wait(gone, timeout=KILLED)
            for process in left:
                process.abandon()
            await asyncio.wait(gone, timeout=KILLED)
        self._begun = False
        for timer in (self._timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def feed(self, event: JobEvent) -> None:
        """Tell the scheduler, and do what it says; see `EventPump`."""
        if self._begun:
            self._pump.feed(event)

    def statuses(self) -> list[JobStatus]:
        return self._scheduler.statuses()

    def _unix(self) -> float:
        return self._epoch + self._clock()

    # Commands

    def _perform(self, command: JobCommand, now: float) -> None:
        match command:
            case GrantShare(id, attempt, share):
                if (running := self._current(id, attempt)) is not None:
                    self._count(running)
                    running.share = share
                    self._grant(running.device)
            case StartJob(job, device, attempt):
                self._start_attempt(job, device, attempt)
            case TellStop(id, attempt, reason):
                if (running := self._current(id, attempt)) is not None and running.process is not None:
                    logger.info("job %s is told to stop: %s", id, reason)
                    running.told = True
                    running.process.tell()
            case KillJob(id, attempt, reason):
                if (running := self._current(id, attempt)) is not None and running.process is not None:
                    running.process.kill(reason)
            case PlaceJob():
                self._spawn(self._find_place(command))
            case KeepJob(stored):
                self._keep(stored)
            case ForgetJob(id):
                self._forget(id)
            case WakeJobsAt(at):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(max(at - now, 0.0), self.feed, JobsWoke())
            case DeadlineMissed(id, deadline, end):
                late = "" if end is None else f" by {show_seconds(end - deadline)}"
                logger.warning("job %s is predicted to miss its deadline%s", id, late)

    def _failed(self, command: JobCommand, error: Exception) -> None:
        """Tell the scheduler of a command that failed, where it waits for what would have come of it."""
        reason = f"{type(error).__name__}: {error}"
        match command:
            case StartJob(job, _, attempt):
                self._running.pop(job.id, None)
                self.feed(JobExited(job.id, attempt, completed=False, reason=reason))
            case PlaceJob(job):
                self.feed(JobPlaced(job.id, None, reason))

    def _current(self, id: JobId, attempt: int) -> _Running | None:
        running = self._running.get(id)
        return running if running is not None and running.attempt == attempt else None

    async def _find_place(self, command: PlaceJob) -> None:
        try:
            found = self._place(command)
            placed = await found if inspect.isawaitable(found) else found
        except CotenantError as error:
            placed = JobPlaced(command.job.id, None, str(error))
        except Exception as error:
            logger.exception("no device could be chosen for job %s", command.job.id)
            placed = JobPlaced(command.job.id, None, f"{type(error).__name__}: {error}")
        self.feed(placed)

    # Attempts

    def _start_attempt(self, job: Job, device: DeviceId, attempt: int) -> None:
        running = self._running[job.id] = _Running(job, attempt, device)
        try:
            launch = self._backend.open_job(device)
            spec = self._preparation.attempt(job, attempt, launch)
            environ = self._preparation.environ(job, launch, os.environ)
        except (CotenantError, OSError) as error:
            del self._running[job.id]
            reason = str(error) if isinstance(error, CotenantError) else f"{error.filename}: {error.strerror}"
            hopeless = isinstance(error, CotenantError) and not isinstance(error, NotFoundError)  # it may come back
            self.feed(JobExited(job.id, attempt, completed=False, reason=reason, hopeless=hopeless))
            return
        try:
            running.process = JobProcess(
                spec,
                environ,
                reported=lambda report: self._reported(running, report),
                ended=lambda ended: self._ended(running, ended),
            )
        except OSError as error:
            del self._running[job.id]
            self.feed(JobRefused(job.id, attempt, f"the system starts no process for it: {error.strerror}"))
            return
        logger.info("job %s starts on %s, attempt %d", job.id, device, attempt)
        self._look_soon()

    def _reported(self, running: _Running, report: Report) -> None:
        self._count(running)
        self.feed(
            JobProgressed(
                running.job.id,
                running.attempt,
                steps=report.steps,
                total=report.total,
                share_seconds=self._spent(running, report.processor),
                metrics=report.metrics,
            )
        )

    def _ended(self, running: _Running, ended: Ended) -> None:
        self._count(running)
        del self._running[running.job.id]
        if not ended.completed:  # one that was told to is no surprise
            level = logging.INFO if running.told else logging.WARNING
            logger.log(level, "job %s, attempt %d, ended: %s", running.job.id, running.attempt, ended.reason)
        self.feed(
            JobExited(
                running.job.id,
                running.attempt,
                completed=ended.completed,
                reason=ended.reason,
                hopeless=ended.hopeless,
                share_seconds=self._spent(running, ended.processor),
            )
        )
        self._grant(running.device)

    def _spent(self, running: _Running, processor: float) -> float:
        """Return the share-seconds of an attempt. processor: seconds that it has used."""
        return processor if self._meter is not None else running.share_seconds

    def _count(self, running: _Running) -> None:
        """Count the share-seconds since the last change of a grant."""
        now = self._clock()
        running.share_seconds += running.share / WHOLE * (now - running.granted_at) if running.granted_at else 0.0
        running.granted_at = now

    def _grant(self, device: DeviceId) -> None:
        """Let the jobs of a device know what they have. One that is alone on processors has no limit: what others want
        is theirs at once, as it runs in the background, and what is idle comes and goes faster than it is measured."""
        running = [each for each in self._running.values() if each.device == device and each.process is not None]
        alone = sum(each.share > 0 for each in running) == 1
        for each in running:
            limit = None if alone or self._meter is None else self._capacity * each.share / WHOLE
            if each.sent != (each.share, limit) and each.process is not None:
                each.sent = each.share, limit
                each.process.grant(each.share, limit)

    # Observation

    def _look_soon(self) -> None:
        if self._look_timer is None and self._begun:
            self._watch = PressureWatch()
            self._look()

    def _look(self) -> None:
        """Look whether serving needs its devices, while there are jobs to yield."""
        self._look_timer = None
        if not self._running or not self._begun:
            return
        try:
            if (seen := self._watch.observe(self._serving.counts(), self._clock())) is not None:
                self.feed(PressureSeen(dict.fromkeys(self._serving.devices(seen.model), seen.reason)))
        except Exception:
            logger.exception("what serving needs could not be seen")
        finally:  # jobs that yield no more would be worse than any error
            self._look_timer = asyncio.get_running_loop().call_later(LOOK, self._look)

    async def _observe(self) -> None:
        while True:
            try:
                await self._observe_once()
            except Exception:
                logger.exception("what is idle could not be measured")
            await asyncio.sleep(OBSERVE)

    async def _observe_once(self) -> None:
        if all(status.state.ended for status in self._scheduler.statuses()):
            self._rest()
            return
        rested, self._resting = self._resting, False
        if (models := self._serving.models()) != self._models:
            self._models = models
            self.feed(ModelsChanged(models))
        if (idle := await self._idle()) is not None and not rested:  # the first reading is of all the time before
            self.feed(DevicesObserved(idle))
        self._observe_slowdowns()

    def _rest(self) -> None:
        """Forget what is out of date once there is a job again, and count batches as those without any."""
        self._compare_batches()
        self._models = None  # nobody asks
        if not self._resting:
            self._resting = True
            if self._meter is not None:
                self._meter.forget()
            self.feed(DevicesObserved({}))

    def _compare_batches(self) -> None:
        """Count the batches since the last time for the jobs that had a share beside them."""
        had, self._had = self._had, frozenset(each.job.id for each in self._running.values() if each.share)
        self._slowdowns.observe(self._serving.batch_seconds(), had | self._had)
        self._slowdowns.forget_others({each.job.id for each in self._scheduler.statuses() if not each.state.ended})

    def _observe_slowdowns(self) -> None:
        """Tell by how much batches of what is served take longer beside each job."""
        self._compare_batches()
        known = {status.job.id: status.interference for status in self._scheduler.statuses()}
        for job in self._had:
            seen = msgspec.structs.replace(known[job], serving_observed=self._slowdowns.slowdown(job))
            if seen != known[job]:
                self.feed(JobInterfered(job, seen))

    async def _idle(self) -> dict[DeviceId, DeviceIdle] | None:
        """Return what is idle by device; None where that is not known yet."""
        devices = self._serving.devices()
        if self._meter is None:
            now = self._clock()
            idle = {device: self._serving.idle_of(device, now) for device in devices}
            if None in idle.values():
                return None
            return {device: DeviceIdle(share or 0) for device, share in idle.items()}
        shims = [each.process.pid for each in self._running.values() if each.process is not None]
        share = await asyncio.to_thread(self._meter.read, self._clock(), shims)
        memory = await asyncio.to_thread(memory_for_jobs, shims)
        if share is None:
            return None
        return {device: DeviceIdle(share, memory, self._capacity) for device in devices}

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
