"""Plans that change, workers that die in every step and devices that are lost, with requests in flight throughout: the
simulator and the live driver must get the same commands at the same times, from the dispatcher and the orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cotenant.backends import Backend
from cotenant.backends.fake import Fake
from cotenant.control.event_log import replay
from cotenant.control.events import (
    Assign,
    DeviceRestored,
    DevicesLost,
    Dispatch,
    LaneRestarts,
    LanesDown,
    PartitionClosed,
    RolloutEnded,
    Switch,
    WakeAt,
    WorkerReady,
    WorkersExited,
)
from cotenant.control.orchestrator import Command, Event, Orchestrator
from cotenant.control.rollout import Rollout
from cotenant.control.supervisor import Supervisor
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.request import Request
from cotenant.core.tensor import Tensor
from cotenant.errors import RolloutError, WorkerError
from cotenant.live.batch_listener import BatchListener, Payload
from cotenant.live.control_driver import ControlDriver
from cotenant.live.deployment import Deployment
from cotenant.live.driver import Driver, Tensors
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.pool import Pool
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.runtime import events as runtime
from cotenant.runtime.events import Restarting
from cotenant.runtime.lane_specs import lane_specs
from cotenant.runtime.log import log_line
from cotenant.sim.loop import play
from cotenant.sim.workers import OPTIONS, Workers
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing
from cotenant.workload.failures import Failure
from tests.live.deployment import repository, sample_deployment
from tests.same.test_simulator_and_driver import Recorder, _shape
from tests.virtual_loop import virtual_loop

SECONDS = 12.0
WITHIN = 0.0931
DEVICES = (DeviceId("cpu"), DeviceId("cpu", 1))
MODELS = ("identity", "lookup")


def startup(lane: LaneId) -> float:
    """No two at the same moment: in which order an event loop takes those is its own."""
    return 0.7013 + 0.0031 * lane.slot + 0.00107 * lane.device.index


def takes(run: runtime.Run) -> float:
    return 0.011 * len(run.requests) * (1 + 0.3 * (run.batch * 0.6180339887 % 1))


class Story(msgspec.Struct):
    """requests: (time, model). changes: plans, and when they are requested."""

    first: Plan
    requests: list[tuple[float, str]]
    changes: list[tuple[float, Plan]]
    failures: list[Failure]


class Recording(Orchestrator):
    """Keeps what it was told, and what it answered."""

    def __init__(self, standbys: int = 0) -> None:
        super().__init__(Rollout(), Supervisor(OPTIONS), standbys=standbys)
        self.told: list[tuple[float, Event, list[Command]]] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self.invariants()
        self.told.append((now, event, commands))
        return commands

    def words(self) -> list[tuple[float, str]]:
        """Timers are left out: how early they are rounded is the drivers' own."""
        return [(now, _word(c)) for now, _, commands in self.told for c in commands if not isinstance(c, WakeAt)]


def _word(command: Command) -> str:
    match command:
        case LaneRestarts(lane, time) | Dispatch(Restarting(lane, time)):
            return (
                f"{lane} is expected back at {time:.6f}"  # a clock that counts nanoseconds differs in the last digits
            )
        case LanesDown(back=back) | Dispatch(runtime.Died(back=back)) if back:
            rounded = {lane: round(time, 6) for lane, time in back.items()}
            told = command.event if isinstance(command, Dispatch) else command
            return repr(msgspec.structs.replace(told, back=rounded))
        case Assign(revision):
            return f"assign {revision.number}"
        case RolloutEnded(revision, outcome, reason):
            return f"ended {revision.number} {outcome} {reason}"
        case Switch(number, both, _, new):
            return f"switch {number} {[lane.id for lane in both.lanes]} {[lane.id for lane in new.lanes]}"
        case _:
            return repr(command)


def plan(rng: np.random.Generator) -> Plan:
    """Each model on one or two partitions, anywhere."""
    cuts: dict[DeviceId, list[Partition]] = {}
    for model in MODELS:
        for _ in range(int(rng.integers(1, 3))):
            placement = Placement(model=model, batch=int(rng.integers(2, 5)), rate=10.0, duty=0.1, latency=0.04)
            share = int(rng.choice((100, 200, 300)))
            cuts.setdefault(DEVICES[int(rng.integers(2))], []).append(Partition(share=share, placements=(placement,)))
    return Plan(
        planner="hand",
        devices=tuple(Device(id=device, partitions=tuple(cuts[device])) for device in DEVICES if device in cuts),
    )


def story(seed: int) -> Story:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0.1, SECONDS, 600)).tolist()
    requested = rng.uniform(0.2, SECONDS, int(rng.integers(1, 5))).tolist()
    requested += [time + float(rng.uniform(0, 0.6)) for time in requested for _ in range(2) if rng.random() < 0.5]
    failures = []
    for _ in range(int(rng.integers(0, 7))):
        device = DEVICES[int(rng.integers(2))]
        part = device if rng.random() < 0.4 else LaneId(device, int(rng.integers(6)))
        back = math.inf if rng.random() < 0.1 else float(rng.uniform(0, 2))
        failures.append(Failure(parts=(part,), time=float(rng.uniform(0.2, SECONDS)), back=back))
    return Story(
        first=plan(rng),
        requests=[(time, MODELS[int(rng.integers(2))]) for time in times],
        changes=[(time, plan(rng)) for time in sorted(requested)],
        failures=failures,
    )


def given(root: Path, *, in_place: bool = False) -> Deployment:
    """Devices have memory for four workers. in_place: these change between the two smaller shares, and to larger
    batches."""
    deployment = sample_deployment(root)
    (kind,) = deployment.problem.fleet
    kind = msgspec.structs.replace(kind, count=2, memory=4 * (64 << 20), batches_grow=in_place)
    fleet = (msgspec.structs.replace(kind, in_place=(200, 1000) if in_place else ()),)
    return msgspec.structs.replace(deployment, problem=msgspec.structs.replace(deployment.problem, fleet=fleet))


def simulated(told: Story, deployment: Deployment, standbys: int = 0) -> tuple[Recorder, Recording]:
    problem = deployment.problem
    models = {model.name: model for model in problem.models}
    recorder = Recorder()
    workers = Workers(
        told.first,
        problem,
        lambda wanted: lane_specs(wanted, models, problem.profiles),
        lambda lanes: None,
        lambda lane: startup(lane.spec.id),
    )
    workers.orchestrator = recording = Recording(standbys)
    for time, wanted in told.changes:
        workers.at(time, partial(workers.request, wanted, "a change"))
    for failure in told.failures:
        workers.at(failure.time, partial(workers._fail, failure))
    requests = [Request(n, model, time, time + WITHIN) for n, (time, model) in enumerate(told.requests, 1)]
    play(recorder.handle, requests, lambda run, now: takes(run), lambda reply, now: (), workers)
    return recorder, recording


class VirtualPool(Pool):
    """Workers that take as long to start as those of the simulator, in the time of the event loop."""

    orchestrator: Recording
    driver: Driver
    failures: list[Failure]

    def __init__(self, backend: Backend, arena: Arena, control: ControlDriver, batches: BatchListener) -> None:
        super().__init__(backend, arena, control.feed, batches)
        self._feed = control.feed
        self._loop = asyncio.get_running_loop()
        self._batches_by_lane: dict[LaneId, asyncio.TimerHandle] = {}
        self._standing_by: set[int] = set()  # incarnations

    def spawn(
        self,
        lane: LaneId,
        incarnation: int,
        setup: LaneSetup,
        *,
        fresh: bool,
        leaving: Collection[LaneId] = (),
        standby: bool = False,
    ) -> None:
        if standby:
            self._standing_by.add(incarnation)
        now = self._loop.time()
        ends = [it.time + it.back for it in self.failures if lane in it.parts and it.covers(now)]
        first = self.orchestrator.rollout.revision is None
        up = max(ends, default=now) + (0.0 if first else startup(lane))
        if up < math.inf:
            self._loop.call_at(up, self._feed, WorkerReady(lane, incarnation))

    def resize(self, setups: Mapping[LaneId, LaneSetup]) -> None:
        """How long batches take is the story's."""

    def kill(self, lane: LaneId, incarnation: int, reason: str, *, abandon: bool = False) -> None:
        if incarnation not in self._standing_by:
            self.gone(lane)
        self._feed(WorkersExited(((lane, incarnation),), reason))

    def promote(self, lane: LaneId, incarnation: int) -> None:
        self._standing_by.remove(incarnation)

    def retire(self, lane: LaneId, incarnation: int, grace: float) -> None:
        self.kill(lane, incarnation, "it was stopped")

    def close_partition(self, lane: LaneId, incarnation: int) -> None:
        self._feed(PartitionClosed(lane, incarnation))

    def gone(self, lane: LaneId) -> None:
        if lane in self._batches_by_lane:
            self._batches_by_lane.pop(lane).cancel()

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        run = runtime.Run(lane, batch, model, tuple(Request(0, model, 0, 0) for _ in payloads))
        timing = Timing(0, 0, 0, 0, 0, 0)
        self._batches_by_lane[lane] = self._loop.call_later(
            takes(run), self._batches.finished, lane, batch, list(payloads), timing
        )


class VirtualDriver(ControlDriver):
    def make_pool(self, backend: Backend, arena: Arena, batches: BatchListener, warm_workers: int) -> Pool:
        self._clock = asyncio.get_running_loop().time
        return VirtualPool(backend, arena, self, batches)

    def watch(self) -> None:
        """Nothing happens to workers but by the story."""


class Nobody(ServingObserver):
    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None: ...

    def ended(self, reply: runtime.Reply, now: float) -> None: ...


async def driven(told: Story, deployment: Deployment, standbys: int) -> tuple[Recorder, Recording, list[list[object]]]:
    loop = asyncio.get_running_loop()
    recorder, recording = Recorder(), Recording(standbys)
    state = ServingState(msgspec.structs.replace(deployment, plan=told.first))
    observer = Nobody(state, lambda lane: None)

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        rollouts.run(lane, batch, model, payloads)

    driver = Driver(
        recorder, run, observer, clock=loop.time, drained=lambda lane: rollouts.drained(lane), rounding=1e-9
    )
    with contextlib.closing(Arena(4096)) as arena:
        rollouts = RolloutDriver(recording, state, driver, observer, Fake(), arena, control=VirtualDriver)
        control = rollouts._control
        # They are looked up when a batch runs, and so may change until then.
        control._clock = loop.time
        pool = control.pool
        assert isinstance(pool, VirtualPool)
        pool.orchestrator, pool.driver, pool.failures = recording, driver, []

        def fail(failure: Failure) -> None:
            pool.failures.append(failure)
            lanes = recording.supervisor.lanes()
            reason = f"{', '.join(failure.parts)} failed"
            for lane in filter(failure.hits, lanes):
                pool.gone(lane)
            (part,) = failure.parts
            if isinstance(part, LaneId):
                if part in lanes and lanes[part].incarnation:
                    control.feed(WorkersExited(((part, lanes[part].incarnation),), reason))
                return
            if failure.back < math.inf:
                loop.call_at(failure.time + failure.back, restore, part, failure.time + failure.back)
            control.feed(DevicesLost({part: reason}))

        def restore(device: DeviceId, now: float) -> None:
            if not any(device in each.parts and each.covers(now) for each in pool.failures):
                control.feed(DeviceRestored(device))

        async def apply(wanted: Plan) -> None:
            with contextlib.suppress(RolloutError, WorkerError):  # how it ended is in the story
                await rollouts.apply(msgspec.structs.replace(deployment, plan=wanted), "a change")

        def request(wanted: Plan) -> None:
            tasks.append(loop.create_task(apply(wanted)))

        answers: list[list[object]] = [[] for _ in told.requests]

        def submit(number: int, model: str) -> None:
            payload = (Tensor("x", "UINT8", (1,), bytes([number % 256])),)
            driver.submit(model, payload, answers[number].append, within=WITHIN)

        tasks = [loop.create_task(apply(told.first))]
        for time, wanted in told.changes:
            loop.call_at(time, request, wanted)
        for failure in told.failures:
            loop.call_at(failure.time, fail, failure)
        for number, (time, model) in enumerate(told.requests):
            loop.call_at(time, submit, number, model)
        await asyncio.sleep(SECONDS + 120.0)
        assert driver.in_flight == 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()
    return recorder, recording, answers


@pytest.mark.parametrize(("in_place", "standbys"), [(False, 0), (True, 0), (False, 1), (True, 1)])
@pytest.mark.parametrize("seed", range(20))
def test_simulator_and_server_take_the_same_steps(seed: int, in_place: bool, standbys: int, tmp_path: Path) -> None:
    deployment, told = given(repository(tmp_path), in_place=in_place), story(seed)
    expected, expected_control = simulated(told, deployment, standbys)
    loop = virtual_loop()
    try:
        got, control, answers = loop.run_until_complete(driven(told, deployment, standbys))
    finally:
        loop.close()
    assert [word for _, word in control.words()] == [word for _, word in expected_control.words()]
    assert [now for now, _ in control.words()] == pytest.approx([now for now, _ in expected_control.words()], abs=1e-6)
    live = [entry for entry in got.story if entry[1]]
    simulated_story = [entry for entry in expected.story if entry[1]]
    assert [_shape(commands) for _, commands in live] == [_shape(commands) for _, commands in simulated_story]
    assert [now for now, _ in live] == pytest.approx([now for now, _ in simulated_story], abs=1e-6)
    assert all(len(each) == 1 for each in answers)  # served or not, but never silently lost


def test_stories_go_through_every_outcome(tmp_path: Path) -> None:
    """Else the test above would say less than it seems to."""
    deployment = given(repository(tmp_path))
    outcomes: set[str] = set()
    for seed in range(20):
        _, control = simulated(story(seed), deployment)
        outcomes |= {word.split()[2] for _, word in control.words() if word.startswith("ended")}
    assert outcomes >= {"completed", "rolled-back", "rejected", "superseded"}


def test_stories_change_workers_in_place_beside_new_ones_and_alone(tmp_path: Path) -> None:
    deployment = given(repository(tmp_path), in_place=True)
    alone, beside = 0, 0
    for seed in range(20):
        started = False
        for _, word in simulated(story(seed), deployment)[1].words():
            started = (started or word.startswith("SpawnWorker")) and not word.startswith("switch")
            if word.startswith("ResizeLanes"):
                alone, beside = alone + (not started), beside + started
    assert alone and beside


def test_stories_promote_standby_workers_and_let_them_go(tmp_path: Path) -> None:
    deployment = given(repository(tmp_path))
    words = [word for seed in range(20) for _, word in simulated(story(seed), deployment, 1)[1].words()]
    for kind in ("SpawnWorker", "PromoteWorker", "KillWorker"):
        assert any(word.startswith(kind) for word in words), kind


def test_orchestrator_that_is_told_a_story_again_says_the_same(tmp_path: Path) -> None:
    _, control = simulated(story(3), given(repository(tmp_path)))
    again = Orchestrator(Rollout(), Supervisor(OPTIONS))
    assert control.told
    for now, event, commands in control.told:
        assert again.handle(event, now) == commands


def test_event_log_of_a_story_replays(tmp_path: Path) -> None:
    deployment = given(repository(tmp_path))
    recorder = Logged()
    problem = deployment.problem
    models = {model.name: model for model in problem.models}
    told = story(4)
    workers = Workers(
        told.first,
        problem,
        lambda wanted: lane_specs(wanted, models, problem.profiles),
        lambda lanes: None,
        lambda lane: startup(lane.spec.id),
    )
    for time, wanted in told.changes:
        workers.at(time, partial(workers.request, wanted, "a change"))
    requests = [Request(n, model, time, time + WITHIN) for n, (time, model) in enumerate(told.requests, 1)]
    play(recorder.handle, requests, lambda run, now: takes(run), lambda reply, now: (), workers)
    assert replay(recorder.lines).difference == ""


class Logged(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []

    def handle(self, event: runtime.Event, now: float) -> list[runtime.Command]:
        commands = super().handle(event, now)
        self.lines.append(log_line(now, event, commands))
        return commands
