"""Drive the scheduler of best-effort jobs in a simulated run: carry out its commands in virtual time, and tell it what
is idle, how far jobs are, and when serving needs its devices.

It decides nothing: where a job stands is the plan's choice, when it runs and with which share the scheduler's, which is
the live server's. Jobs end with the arrivals of the run; a process starts at once and stops at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

from cotenant.control.jobs.events import (
    DeviceIdle,
    DevicesObserved,
    GrantShare,
    JobCommand,
    JobEvent,
    JobExited,
    JobPlaced,
    JobProgressed,
    JobRefused,
    JobSubmitted,
    JobsWoke,
    KillJob,
    PlaceJob,
    PressureSeen,
    StartJob,
    TellStop,
    WakeJobsAt,
)
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.background_job import BackgroundJob
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.job import Command, Job, JobId
from cotenant.core.plan import Device, Plan
from cotenant.core.request import Outcome, Request
from cotenant.core.units import WHOLE
from cotenant.measure.report import JobReport
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast import JobForecast, forecast, forecast_jobs
from cotenant.planners.job_interference import workers_memory
from cotenant.runtime.events import Died, Event, Finished, Reply, Run
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.sim.background_lane import BackgroundLane, JobRun
from cotenant.sim.lending import LentProcessors
from cotenant.sim.loop import Actor, Tell
from cotenant.sim.service import Service

# Hears some times a second the time, and the share-seconds that jobs have taken and that lanes have left until then.
Watch = Callable[[float, float, float], None]

PERIOD = 0.25  # seconds between two looks at devices and jobs
DANGER = 0.1  # of a request's target: its batch ends so close to its deadline where attainment is in danger


class SimulatedJobs:
    """Run the jobs of a plan.

    seconds: at which all jobs end. processors: where idle share of processors is lent. rolling: tells whether a rollout
    is in progress. watch: hears what jobs take. Call `open` before anything runs.
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        *,
        seconds: float,
        processors: LentProcessors | None,
        rolling: Callable[[], bool],
        watch: Watch | None = None,
    ) -> None:
        self.now = 0.0
        self.due = 0.0
        self._problem = without_applications(problem, plan.split)
        self._seconds = seconds
        self._processors = processors
        self._rolling = rolling
        self._watch = watch
        self._scheduler = JobScheduler()
        self._jobs = {f"job-{number}": job for number, job in enumerate(problem.jobs, 1)}
        self._runs = {job_id: JobRun(job) for job_id, job in self._jobs.items()}
        self._attempts: dict[JobId, tuple[int, DeviceId]] = {}
        self._took: dict[JobId, float] = dict.fromkeys(self._jobs, 0.0)  # share-seconds of attempts before this one
        self._on: dict[JobId, DeviceId] = {}  # where it ran last
        self._ended: dict[JobId, float] = {}
        self._lanes: dict[DeviceId, BackgroundLane] = {}
        self._by_lane: dict[LaneId, BackgroundLane] = {}
        self._devices: dict[DeviceId, Device] = {}  # as in the plan in force
        self._models: dict[LaneId, set[str]] = {}
        self._seen: dict[DeviceId, tuple[float, float]] = {}  # idle share-seconds at the last look, and when that was
        self._waiting = dict(plan.waiting_jobs)
        self._predicted: dict[str, JobForecast] = forecast_jobs(plan, self._problem, forecast(plan, problem))
        self._look = 0.0
        self._wake = math.inf
        self._submitted = False

    # What is served

    def open(self, lanes: Mapping[LaneId, LaneAssignment]) -> None:
        """Add lanes, or change them from now on, with the jobs of their devices."""
        now = self.now
        kinds = {kind.name: kind for kind in self._problem.fleet}
        by_device: dict[DeviceId, dict[LaneId, LaneAssignment]] = {}
        for name, lane in lanes.items():
            by_device.setdefault(lane.device.id, {})[name] = lane
            self._models[name] = {each.model for each in lane.placements}
        for device, there in by_device.items():
            if device not in self._lanes:
                self._lanes[device] = BackgroundLane(
                    self._problem, kinds[device.kind], self._lent(device), now, self._seconds
                )
                self._seen[device] = 0.0, now
            self._devices[device] = next(iter(there.values())).device
            self._change(self._lanes[device], now, lambda lane, there=there: lane.open(there))  # type: ignore[misc]
            self._by_lane.update(dict.fromkeys(there, self._lanes[device]))

    def close(self, name: LaneId, now: float) -> None:
        """Take a lane away that runs nothing any more."""
        if (lane := self._by_lane.pop(name, None)) is not None:
            self._change(lane, now, lambda lane: lane.close(name))

    def begin(self, run: Run, now: float) -> float:
        """Hear that a batch begins; return how many times as long it takes beside jobs."""
        lane = self._by_lane.get(run.lane)
        if lane is None or now > self._seconds:
            return 1.0
        self._change(lane, now, lambda lane: lane.begin(run.lane, run.model))
        return lane.slowdown_of(run.lane, run.model)

    def end(self, name: LaneId, now: float) -> None:
        """Hear that a lane's batch ends, or is lost."""
        if (lane := self._by_lane.get(name)) is not None and now <= self._seconds:
            self._change(lane, now, lambda lane: lane.end(name))

    def changed(self, name: LaneId, now: float) -> None:
        """Hear that the processors of a lane are used otherwise than before."""
        if (lane := self._by_lane.get(name)) is not None and now <= self._seconds:
            self._change(lane, now, lambda lane: lane.settle())

    def judge(self, run: Run, ends: float, now: float) -> None:
        """Look whether a batch that begins ends too close to its most urgent deadline."""
        urgent = min(run.requests, key=lambda request: request.deadline)
        if urgent.deadline - ends < DANGER * (urgent.deadline - urgent.arrived) and self._attempts:
            self._press([run.lane.device], f"batches of {run.model} end close to their target", now)

    def replied(self, reply: Reply, now: float) -> None:
        """Look at how requests ended: where serving rejects or misses them, it needs its devices."""
        if self._attempts and reply.outcome in (Outcome.REJECTED, Outcome.EXPIRED):
            model = reply.requests[0].model
            devices = {lane.device for lane, models in self._models.items() if model in models}
            self._press(devices, f"requests of {model} are {reply.outcome.value}", now)

    def _press(self, devices: Iterable[DeviceId], reason: str, now: float) -> None:
        self._tell(PressureSeen(dict.fromkeys(devices, reason)), now)

    # Time

    def act(self, now: float) -> None:
        """Do what is due."""
        if not self._submitted:
            self._submitted = True
            self._observe(now)
            for job_id, job in self._jobs.items():
                self._tell(JobSubmitted(_as_job(job_id, job)), now)
        for device, lane in self._lanes.items():
            if lane.due <= now:
                self._change(lane, now, lambda lane: None)
                self._end_done(device, now)
        if self._wake <= now:
            self._wake = math.inf
            self._tell(JobsWoke(), now)
        if self._look <= now:
            self._observe(now)
        self._reschedule()

    def finish(self) -> tuple[JobReport, ...]:
        """End the run; return what each job got."""
        for lane in self._lanes.values():
            lane.advance(self._seconds)
        return tuple(self._report(job_id) for job_id in self._jobs)

    def _observe(self, now: float) -> None:
        """Tell how far jobs are, and what was idle since the last look."""
        self._look = now + PERIOD
        for job_id, (attempt, device) in list(self._attempts.items()):
            self._lanes[device].advance(now)
            run = self._runs[job_id]
            took = run.share_seconds - self._took[job_id]
            self._tell(JobProgressed(job_id, attempt, run.steps, run.job.steps, took), now)
            if not self._rolling() and not self._stands(job_id, device):
                self._leave(job_id, now)
        if self._rolling():
            self._press(list(self._lanes), "a rollout is in progress", now)
        there = [device for device, lane in self._lanes.items() if lane.serves]
        self._tell(DevicesObserved({device: self._idle(device, now) for device in there}), now)
        if self._watch is not None:
            taken = sum(run.share_seconds for run in self._runs.values())
            self._watch(now, taken, sum(lane.idle_seconds for lane in self._lanes.values()))

    def _idle(self, device: DeviceId, now: float) -> DeviceIdle:
        lane = self._lanes[device]
        lane.advance(now)
        before, since = self._seen[device]
        self._seen[device] = lane.idle_seconds, now
        idle = (lane.idle_seconds - before) / lane.capacity / (now - since) if now > since else 1.0
        memory = self._problem.kind(device.kind).memory - workers_memory(self._devices[device], self._problem)
        return DeviceIdle(round(idle * WHOLE), max(memory, 0), lane.capacity)

    def _reschedule(self) -> None:
        ends = min((lane.due for lane in self._lanes.values()), default=math.inf)
        self.due = min(ends, self._wake, self._look) if len(self._ended) < len(self._jobs) else math.inf
        if self.due > self._seconds:
            self.due = math.inf

    def _change(self, lane: BackgroundLane, now: float, change: Callable[[BackgroundLane], None]) -> None:
        lane.advance(now)
        change(lane)
        lane.reschedule()
        self.due = min(self.due, lane.due) if lane.due <= self._seconds else self.due

    # The scheduler

    def _tell(self, event: JobEvent, now: float) -> None:
        """Hand the scheduler an event, and those that follow from its commands."""
        events = deque([event])
        while events:
            for command in self._scheduler.handle(events.popleft(), now):
                events.extend(self._perform(command, now))

    def _perform(self, command: JobCommand, now: float) -> list[JobEvent]:
        match command:
            case PlaceJob(job, devices):
                return [self._placed(job.id, devices)]
            case StartJob(job, device, attempt):
                self._attempts[job.id], self._on[job.id] = (attempt, device), device
                self._took[job.id] = self._runs[job.id].share_seconds
                lane = self._lanes[device]
                self._change(lane, now, lambda lane: lane.start(job.id, self._runs[job.id]))
            case GrantShare(job_id, attempt, share):
                if (place := self._attempts.get(job_id)) is not None and place[0] == attempt:
                    self._runs[job_id].granted = share
                    self._change(self._lanes[place[1]], now, lambda lane: None)
            case TellStop(job_id, attempt, reason) | KillJob(job_id, attempt, reason):
                return self._stopped(job_id, attempt, reason, now)
            case WakeJobsAt(time):
                self._wake = time
            case _:
                pass  # what is stored, and warnings
        return []

    def _placed(self, job_id: JobId, devices: Iterable[DeviceId]) -> JobPlaced:
        for device in devices:
            if self._stands(job_id, device):
                return JobPlaced(job_id, device)
        why = self._waiting.get(self._jobs[job_id].name, "its device has no room for it now")
        return JobPlaced(job_id, None, why)

    def _stands(self, job_id: JobId, device: DeviceId) -> bool:
        """Tell whether the plan in force has a job on a device."""
        return any(job.name == self._jobs[job_id].name for job in self._devices[device].jobs)

    def _leave(self, job_id: JobId, now: float) -> None:
        """End an attempt where the plan does not have the job any more; it begins again where the plan has it."""
        attempt, device = self._attempts.pop(job_id)
        self._change(self._lanes[device], now, lambda lane: lane.stop(job_id))
        self._tell(JobRefused(job_id, attempt, "the plan has moved it"), now)

    def _stopped(self, job_id: JobId, attempt: int, reason: str, now: float, *, done: bool = False) -> list[JobEvent]:
        known = self._attempts.get(job_id)
        if known is None or known[0] != attempt:
            return []
        del self._attempts[job_id]
        run = self._runs[job_id]
        self._change(self._lanes[known[1]], now, lambda lane: lane.stop(job_id))
        return [JobExited(job_id, attempt, done, reason, share_seconds=run.share_seconds - self._took[job_id])]

    def _end_done(self, device: DeviceId, now: float) -> None:
        for job_id, (attempt, where) in list(self._attempts.items()):
            if where == device and self._runs[job_id].is_done:
                self._ended[job_id] = now
                for event in self._stopped(job_id, attempt, "", now, done=True):
                    self._tell(event, now)

    def _lent(self, device: DeviceId) -> Callable[[], float] | None:
        processors = self._processors
        return None if processors is None else lambda: processors.idle(device)

    def _report(self, job_id: JobId) -> JobReport:
        job, run = self._jobs[job_id], self._runs[job_id]
        predicted = self._predicted.get(job.name)
        device = self._on.get(job_id)
        status = self._scheduler.status(job_id)
        idle = 0.0 if device is None else self._lanes[device].idle_seconds
        return JobReport(
            job=job.name,
            model=job.model,
            batch=job.batch,
            device=None if device is None else str(device),
            reason="" if status is None or device is not None else status.reason,
            steps=run.steps,
            steps_per_s=run.steps / self._ended.get(job_id, self._seconds),
            predicted_steps_per_s=None if predicted is None else predicted.steps,
            share_seconds=run.share_seconds,
            idle_share_seconds=idle,
            ended=self._ended.get(job_id),
            predicted_end=None if predicted is None else predicted.end,
            deadline=job.deadline,
        )


class JobsActor:
    """Serve batches beside jobs: the actor of `sim.loop.play`, around another.

    serve, ended: of what counts batches and replies. It tells itself when batches end, so that it knows which run.
    """

    def __init__(
        self,
        jobs: SimulatedJobs,
        service: Service,
        serve: Callable[[Run, float], float],
        ended: Callable[[Reply, float], Iterable[Request]],
        actor: Actor,
    ) -> None:
        self._jobs = jobs
        self._service = service
        self._serve = serve
        self._ended = ended
        self._actor = actor
        self._order = 0
        self._ends: list[tuple[float, int, Finished]] = []
        self._told: Tell = lambda event, now: None

    @property
    def due(self) -> float:
        return min(self._actor.due, self._jobs.due, self._ends[0][0] if self._ends else math.inf)

    def serve(self, run: Run, now: float) -> float:
        """Start a batch; its end is told."""
        usual = self._service.slowdown
        self._service.slowdown = usual * self._jobs.begin(run, now)
        seconds = self._serve(run, now)
        self._service.slowdown = usual
        if seconds < math.inf:
            self._order += 1
            heappush(self._ends, (now + seconds, self._order, Finished(run.lane, run.batch)))
            self._jobs.judge(run, now + seconds, now)
        else:
            self._jobs.changed(run.lane, now)
        return math.inf

    def ended(self, reply: Reply, now: float) -> Iterable[Request]:
        self._jobs.replied(reply, now)
        return self._ended(reply, now)

    def act(self, now: float, tell: Tell) -> None:
        self._told = tell
        self._jobs.now = now
        if self._actor.due <= now:
            self._actor.act(now, self._tell)
        elif self._ends and self._ends[0][0] <= now:
            _, _, finished = heappop(self._ends)
            self._tell(finished, now)
        else:
            self._jobs.act(now)

    def drained(self, lane: LaneId, now: float) -> None:
        self._actor.drained(lane, now)
        self._jobs.close(lane, now)

    def _tell(self, event: Event, now: float) -> None:
        if isinstance(event, Died):
            dead = {event.lane, *event.others}
            self._ends[:] = [end for end in self._ends if end[2].lane not in dead]
            heapify(self._ends)
            for lane in dead:
                self._jobs.end(lane, now)
        elif isinstance(event, Finished):
            self._jobs.end(event.lane, now)
        self._told(event, now)


def _as_job(job_id: JobId, job: BackgroundJob) -> Job:
    """Return what the scheduler is told of a job: whether its memory fits is the plan's to say."""
    return Job(
        id=job_id,
        name=job_id,
        work=Command(argv=(job.model,)),
        priority=job.priority,
        deadline=job.deadline,
        retries=0,
        grace=0.0,
    )
