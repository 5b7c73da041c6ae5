"""What must hold however events fall: over random sequences of submissions, requests, exits, crashes of the server,
pressure, devices and models that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from cotenant.control.jobs.events import (
    DeviceIdle,
    JobCancelAsked,
    JobEvent,
    JobExited,
    JobPauseAsked,
    JobPlaced,
    JobProgressed,
    JobRefused,
    JobResumeAsked,
    JobsRestored,
    JobsShutdown,
    ModelsChanged,
    PlaceJob,
    PressureSeen,
)
from cotenant.core.identity import DeviceId
from cotenant.core.job import BatchInference, Job, JobId, JobState, Training
from tests.control.jobs.world import CPU, World, job

OTHER = DeviceId("cpu", 1)
DEVICES = {CPU: DeviceIdle(600, memory=8 << 20, capacity=2.0), OTHER: DeviceIdle(300)}


class Chance:
    """Turns drawn numbers into what happens next, out of all that may happen."""

    def __init__(self) -> None:
        self.world = self._world()
        self.submitted: list[Job] = []
        self.cancelled: set[JobId] = set()
        self.starts: dict[JobId, int] = {}
        self.excused: dict[JobId, int] = {}  # attempts that did not fail
        self.asked: list[PlaceJob] = []
        self.closing = False

    def _world(self) -> World:
        return World(devices=dict(DEVICES), slots=2, memory_patience=1.0, history=1000)

    def step(self, kind: int, which: int) -> None:
        """kind: of the things that may happen now. which: of those to which it may happen."""
        actions = self._actions(which)
        actions[kind % len(actions)]()
        self.check()

    def tell(self, event: JobEvent) -> None:
        self.world.tell(event)

    def _actions(self, which: int) -> list[Callable[[], Any]]:
        world = self.world
        some = self.submitted[which % len(self.submitted)].id if self.submitted else "job-0"
        running = list(world.attempts)
        actions: list[Callable[[], Any]] = [
            lambda: self._submit(which),
            lambda: world.until(world.now + (0.05, 0.5, 5.0, 100.0)[which % 4]),
            lambda: world.observe(which % 1200 - 100),
            lambda: world.observe(memory=(which % 10) << 20),
            lambda: self._device(which),
            lambda: self.tell(PressureSeen({CPU: "the queue of bert grows"})),
            lambda: self.tell(ModelsChanged(frozenset(("bert",) if which % 3 else ()))),
            lambda: self._place(which),
            lambda: self.tell(JobPauseAsked(some)),
            lambda: self.tell(JobResumeAsked(some)),
            lambda: self._cancel(some),
            lambda: self._crash_or_stop(which),
            # Late news of attempts that there are not.
            lambda: self.tell(JobExited(some, which % 3, bool(which % 2), "late")) if some not in running else None,
        ]
        if running:
            one = running[which % len(running)]
            actions += [
                lambda: self._exit(one, completed=False),
                lambda: self._exit(one, completed=which % 5 == 0),
                lambda: self._refuse(one),
                lambda: self._progress(one, which),
            ]
        return actions

    def _submit(self, which: int) -> None:
        work = BatchInference(model="bert", input="a", output="b") if which % 4 == 0 else Training(source="digits")
        submitted = job(
            f"job-{len(self.submitted)}",
            work=work,
            priority=which % 5 + 1,
            memory=None if which % 3 else (which % 9 + 1) << 20,
            deadline=self.world.now + which % 1000 if which % 2 else None,
            retries=which % 3,
            grace=float(which % 4),
            threads=which % 3 or None,
        )
        self.submitted.append(submitted)
        self.world.submit(submitted)

    def _device(self, which: int) -> None:
        if OTHER in self.world.devices:
            del self.world.devices[OTHER]
        else:
            self.world.devices[OTHER] = DeviceIdle(which % 1000)
        self.world.observe()

    def _place(self, which: int) -> None:
        """Answer where a job should run by hand, perhaps wrongly, perhaps later."""
        self.world.places = which % 2 == 0
        placing = [each for each in self.world.said if isinstance(each, PlaceJob)]
        if placing:
            self.tell(JobPlaced(placing[-1].job.id, (CPU, OTHER, None)[which % 3], "no place"))

    def _cancel(self, id: JobId) -> None:
        if self.submitted and not self.world.status(id).state.ended:
            self.cancelled.add(id)
        self.tell(JobCancelAsked(id))

    def _exit(self, id: JobId, *, completed: bool) -> None:
        if not completed and self.world.attempts[id].told:
            self.excused[id] = self.excused.get(id, 0) + 1
        self.world.exit(id, completed=completed)

    def _refuse(self, id: JobId) -> None:
        attempt = self.world.attempts.pop(id).start.attempt
        self.excused[id] = self.excused.get(id, 0) + 1
        self.tell(JobRefused(id, attempt, "too many processes"))

    def _progress(self, id: JobId, which: int) -> None:
        attempt = self.world.attempts[id]
        attempt.spent += which % 100 / 10
        self.tell(JobProgressed(id, attempt.start.attempt, which % 50, 50, attempt.spent))

    def _crash_or_stop(self, which: int) -> None:
        """Let the server die, or stop in order, and start again with what is stored."""
        old = self.world
        if which % 2:
            old.tell(JobsShutdown(1.0))
            old.until(old.now + 1.0)
            assert set(old.told()) == set(old.attempts)
            for one in list(old.attempts):
                self._exit(one, completed=False)
            assert old.scheduler.processes == 0
        # Only an attempt that runs when the server dies fails with it: a paused one takes no share, and its job stays
        # paused until its owner resumes it, which starts another attempt.
        for one in old.attempts:
            if old.status(one).state is JobState.PAUSED:
                self.excused[one] = self.excused.get(one, 0) + 1
        self.world = self._world()
        self.world.now = old.now
        self.world.stored = dict(old.stored)
        self.world.tell(JobsRestored(tuple(old.stored.values())))

    def check(self) -> None:
        world = self.world
        statuses = {status.job.id: status for status in world.scheduler.statuses()}
        assert statuses.keys() == {submitted.id for submitted in self.submitted}, "a job is lost"
        assert world.scheduler.processes == len(world.attempts)
        for submitted in self.submitted:
            status = statuses[submitted.id]
            assert status.job == submitted
            assert (submitted.id in world.attempts) <= (not status.state.ended), "it ended with a process"
            assert status.granted == (world.share(submitted.id) if submitted.id in world.attempts else 0)
            assert status.reason or status.state is JobState.SUCCEEDED or status.granted, "nobody knows why it waits"
            stored = world.stored[submitted.id]
            assert stored.status.state is status.state, "a restart would take it for something else"
            assert stored.failures <= submitted.retries + 1
            excused = self.excused.get(submitted.id, 0)
            assert status.attempt <= submitted.retries + 1 + excused, "tried too often"
            if submitted.id in self.cancelled:
                told = submitted.id in world.attempts and world.attempts[submitted.id].told
                assert told or status.state.ended, "a cancelled job runs on"

    def settle(self) -> None:
        """Let every process end, with room for all: every job ends that is neither paused nor without its model."""
        world = self.world
        world.places = True
        world.devices = {CPU: DeviceIdle(1000)}
        world.observe()
        self.tell(ModelsChanged(frozenset(("bert",))))
        for submitted in self.submitted:
            self.tell(JobResumeAsked(submitted.id))
        placing = [each for each in world.said if isinstance(each, PlaceJob)]
        if placing:
            self.tell(JobPlaced(placing[-1].job.id, None))
        for _ in range(4 * len(self.submitted) + 8):
            world.until(world.now + 400.0)
            for one in list(world.attempts):
                self._exit(one, completed=not world.attempts[one].told)
                self.check()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**6)), min_size=15, max_size=80))
# A job without retries is paused while it has a process, the server dies, and the job is resumed.
@example([(0, 49101), (8, 0), (11, 0)])
def test_no_job_is_lost_or_runs_twice_and_every_job_ends(steps: list[tuple[int, int]]) -> None:
    chance = Chance()
    for kind, which in steps:
        chance.step(kind, which)
    chance.settle()
    for submitted in chance.submitted:
        state = chance.world.status(submitted.id).state
        assert state.ended
        if submitted.id in chance.cancelled:
            assert state is not JobState.FAILED


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    steps=st.lists(st.floats(0.001, 2.0), min_size=4, max_size=4),
    idles=st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    capacity=st.sampled_from((1.0, 2.0, 16.0)),
)
def test_share_seconds_per_weight_of_jobs_that_always_have_work_stay_together(
    weights: list[int], steps: list[float], idles: list[int], capacity: float
) -> None:
    world = World(devices={CPU: DeviceIdle(1000, capacity=capacity)}, longest_calm=0.3)
    world.step = {f"job-{number}": step for number, step in enumerate(steps)}
    world.submit(*(job(f"job-{number}", priority=weight) for number, weight in enumerate(weights)))
    for idle in idles:
        world.observe(idle)
        world.run(1.0)
        per_weight = [world.attempts[f"job-{number}"].spent / weight for number, weight in enumerate(weights)]
        # A step of each, as of any fair queueing, and what is taken between two reports of progress.
        slack = [(steps[number] + 0.2 * capacity) / weight for number, weight in enumerate(weights)]
        assert max(per_weight) - min(per_weight) <= 2 * max(slack) + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_share_that_is_idle_is_taken_whole_where_a_job_can(seed: int) -> None:
    world = World(devices={CPU: DeviceIdle(1000, capacity=2.0)})
    world.step = {"job-0": 0.5, "job-1": 0.01 * (seed + 1)}
    world.submit(job("job-0"), job("job-1", priority=seed + 1))
    idle = 0.0
    for second in range(60):
        share = (second * 137 + seed * 311) % 900 + 100
        world.observe(share)
        world.run(1.0)
        idle += share / 1000 * 2.0
    taken = sum(attempt.spent for attempt in world.attempts.values())
    assert taken == pytest.approx(idle, rel=0.03)
