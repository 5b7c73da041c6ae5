"""Run a schedule against the live driver, pool, rollout, supervisor and dispatcher in virtual time, and check what must
hold: all of it is the product's but the processes of workers, the device and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from cotenant.backends import Backend, Launch
from cotenant.backends.fake import Fake
from cotenant.control.orchestrator import Command, Event, Orchestrator
from cotenant.control.revision import MemoryPolicy, RolloutOutcome
from cotenant.control.rollout import Rollout, RolloutOptions
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor import Supervisor
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.errors import CotenantError, DeviceError, RequestError
from cotenant.live import pool as pool_module
from cotenant.live import process as process_module
from cotenant.live import serving_observer as observer_module
from cotenant.live.batch_listener import BatchListener
from cotenant.live.control_driver import ControlDriver
from cotenant.live.deployment import Deployment, ServableModel, without_model
from cotenant.live.descriptors import DescriptorReserve
from cotenant.live.driver import TOGETHER, Driver, Tensors
from cotenant.live.pool import Pool
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.rollout_statistics import Past
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.planners import Problem
from cotenant.runtime import events as runtime
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.lane import MIN_GRACE
from cotenant.worker.arena import PAGE, Arena
from cotenant.worker.repository import Entry
from tests.chaos.clock import Clock, VirtualLoop
from tests.chaos.processes import WIDTH, Machine
from tests.chaos.schedule import DEVICES, MODELS, SECONDS, Schedule, Step, describe_failure

OPTIONS = SupervisorOptions(lives=4, start_timeout=6.0, hang_timeout=2.0)
SETTLE = 100.0  # seconds within which all must be well again once nothing goes wrong any more
INJECTED = "as the schedule has it"
WORKER = 64 << 20  # bytes of a device that a worker takes
PLACES = 4  # workers that a device has room for
# A request is answered at latest so long after its deadline: by then its batch has been given up. The longest batch
# takes 0.08 s, and a correction doubles that at most.
GRACE = MIN_GRACE + 0.05
SHARES = (100, 200, 300)


def _problem(in_place: bool) -> Problem:
    models = tuple(Model(name=name, slo=1.0) for name in MODELS)
    points = [
        Point(share=share, batch=batch, latency=0.01 * batch, memory=WORKER) for share in (1000, 50) for batch in (1, 8)
    ]
    kind = Kind(
        name="cpu",
        cuts=tuple(range(50, 1001, 50)),
        count=DEVICES,
        memory=PLACES * WORKER,
        in_place=(200, 1000) if in_place else (),
        batches_grow=in_place,
    )
    return Problem(
        models=models,
        rates=dict.fromkeys(MODELS, 10.0),
        fleet=(kind,),
        profiles={(name, "cpu"): Profile(name, "cpu", points) for name in MODELS},
    )


PROBLEMS = {in_place: _problem(in_place) for in_place in (False, True)}
ENTRIES = {
    name: ServableModel(
        entry=Entry(name=name, folder=Path(name), path=Path(name), version="1", platform="onnxruntime_onnx"),
        info=ModelInfo(
            name=name,
            version="1",
            platform="onnxruntime_onnx",
            inputs=(TensorSpec("x", "UINT8", (-1, -1)),),
            outputs=(TensorSpec("y", "UINT8", (-1, -1)),),
            max_batch_size=64,
        ),
        model=Model(name=name, slo=1.0),
    )
    for name in MODELS
}


def plan_of(number: int) -> Plan:
    """A plan from a number: up to three partitions on each device, each with one or two models."""
    rng = random.Random(number)  # noqa: S311  # to be repeated, not to be secret
    devices = []
    sizes = rng.choice(((1, 1), (2, 1), (1, 2), (0, 2), (2, 2), (3, 0), (3, 1), (2, 3), (0, 0)))
    for index, count in enumerate(sizes):
        partitions = []
        for _ in range(count):
            names = rng.sample(MODELS, rng.choice((1, 1, 2)))
            placements = tuple(
                Placement(model=name, batch=rng.randint(2, 8), rate=10.0, duty=0.1, latency=0.04) for name in names
            )
            partitions.append(Partition(share=rng.choice(SHARES), placements=placements))
        if partitions:
            devices.append(Device(id=DeviceId("cpu", index), partitions=tuple(partitions)))
    return Plan(planner="hand", devices=tuple(devices))


class ViolationError(Exception):
    """What did not hold."""


class ChaosBackend(Fake):
    """Opens partitions, unless it is told not to. What it opens must fit."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.refusals: dict[str, int] = {}
        self.opened: dict[LaneId, int] = {}
        self._run = run

    def _check(self, what: str) -> None:
        if self.refusals.get(what, 0):
            self.refusals[what] -= 1
            raise DeviceError(INJECTED)

    def _launch(self, lane: LaneId) -> Launch:
        process = str(lane.device) if self._run.schedule.shared else ""
        return Launch(fake=True, env={"LANE": str(lane)}, process=process)

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        self._check("no-partition")
        if lane in self.opened:
            self._run.problem(f"the partition of {lane} was opened twice")
        self.opened[lane] = WORKER * len(self._run.control.setups[lane].models)
        held = sum(size for other, size in self.opened.items() if other.device == lane.device)
        schedule = self._run.schedule
        if held > PLACES * WORKER and not schedule.shared and schedule.memory is not MemoryPolicy.OVERSUBSCRIBE:
            self._run.problem(f"{lane.device} has no room for {sorted(self.opened)}")
        return self._launch(lane)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        return {lane: self._launch(lane) for lane in shares}

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        self._check("no-hook")

    def close(self, lane: LaneId) -> None:
        self.opened.pop(lane, None)
        self._check("no-close")

    def lost(self) -> dict[DeviceId, str]:
        return dict(self._run.machine.lost)


class VirtualDriver(ControlDriver):
    """In the loop's time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, clock=asyncio.get_running_loop().time, **options)

    def make_pool(self, backend: Backend, arena: Arena, batches: BatchListener, warm_workers: int) -> Pool:
        made = super().make_pool(backend, arena, batches, warm_workers)
        made.processes.descriptors.close()
        made.processes.descriptors = DescriptorReserve(0)  # real files are not what is scarce here
        return made


class CheckedOrchestrator(Orchestrator):
    def __init__(self, run: Run, memory: MemoryPolicy) -> None:
        super().__init__(Rollout(RolloutOptions(memory=memory)), Supervisor(OPTIONS), standbys=run.schedule.standbys)
        self._run = run

    def handle(self, event: Event, now: float) -> list[Command]:
        with self._run.checked():
            commands = super().handle(event, now)
            self.invariants()
        self._run.told.append(f"{now:.6f} {type(event).__name__}")
        return commands


class CheckedDispatcher(Dispatcher):
    run: Run

    def handle(self, event: runtime.Event, now: float) -> list[runtime.Command]:
        with self.run.checked():
            commands = super().handle(event, now)
            self.invariants()
        return commands


class Caller:
    """A request, and what came of it."""

    def __init__(self, run: Run, step: Step) -> None:
        self.run = run
        self.model, width = step.how.split()
        self.rows = step.which
        self.within = step.more
        self.since = run.loop.now
        self.jumped = run.jumped
        self.id = 0
        self.left = False
        self.answers: list[Tensors | RequestError] = []
        seed = len(run.callers)
        self.data = b"".join(bytes([(seed * 31 + row * 7 + 1) % 256]) * WIDTH[width] for row in range(self.rows))
        self.shape = (self.rows, WIDTH[width])

    def send(self) -> None:
        payload = (Tensor("x", "UINT8", self.shape, self.data),)
        self.id = self.run.driver.submit(self.model, payload, self._answered, within=self.within, size=self.rows)

    def leave(self) -> None:
        if not self.answers:
            self.left = True
            self.run.driver.cancel(self.id)

    @property
    def served(self) -> bool:
        return len(self.answers) == 1 and isinstance(self.answers[0], tuple)

    def __str__(self) -> str:
        return f"the request of {self.since:g} s for {self.rows} rows of {self.model} within {self.within:g} s"

    def _answered(self, answer: Tensors | RequestError) -> None:
        self.answers.append(answer)
        if len(self.answers) > 1:
            self.run.problem(f"{self} was answered twice")
        if isinstance(answer, RequestError):
            if not str(answer):
                self.run.problem(f"{self} was answered without a reason")
        elif b"".join(bytes(tensor.data) for tensor in answer) != self.data:
            self.run.problem(f"{self} was answered by other rows")
        late = self.run.loop.now - self.since - self.within - (self.run.jumped - self.jumped)
        if late > GRACE:
            self.run.problem(f"{self} was answered {late:.3f} s after its deadline")


class Run:
    """One schedule. Raises ViolationError."""

    def __init__(self, schedule: Schedule, loop: VirtualLoop) -> None:
        self.schedule = schedule
        self.loop = loop
        self.problems: list[str] = []
        self.jumped = 0.0
        self.machine = Machine(loop, self.problem)
        self.machine.standbys = bool(schedule.standbys)
        if not schedule.shared and schedule.memory is not MemoryPolicy.OVERSUBSCRIBE:
            self.machine.places = PLACES
        self.callers: list[Caller] = []
        self.applied: list[asyncio.Task[None]] = []
        self.ended: dict[int, RolloutOutcome] = {}
        self.taken: list[object] = []  # blocks of the arena
        self.told: list[str] = []  # to the orchestrator, and when

    def close(self) -> None:
        """Close what a run that failed has left open."""
        for process in self.machine.processes:
            process.exit(-9)
        if not hasattr(self, "control"):
            return  # it did not begin
        for line in self.control.pool._workers:
            line._connection.close()
        for held in self.control.pool.processes._running:
            held._connection.close()
            os.close(held._output)

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.loop.now:.3f} s: {text}")

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Keep what does not hold, wherever the product would catch it."""
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.problem(f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {error}")
            raise

    async def run(self) -> None:
        schedule = self.schedule
        problem = PROBLEMS[schedule.in_place]
        self.deployment = Deployment(offered=ENTRIES, problem=problem, plan=Plan(planner="hand", devices=()))
        state = ServingState(self.deployment)
        self.backend = ChaosBackend(self)
        observer = ServingObserver(state, lambda lane: self.driver.busy_since(lane))
        dispatcher = self.dispatcher = CheckedDispatcher()
        dispatcher.run = self
        self.driver = Driver(
            dispatcher,
            lambda *batch: self.rollouts.run(*batch),
            observer,
            clock=self.loop.time,
            drained=lambda lane: self.rollouts.drained(lane),
            rounding=1e-6,
            together=TOGETHER,
        )
        with contextlib.closing(Arena(64 * PAGE)) as arena:
            self.machine.arena = arena
            self.orchestrator = CheckedOrchestrator(self, schedule.memory)
            self.rollouts = RolloutDriver(
                self.orchestrator,
                state,
                self.driver,
                observer,
                self.backend,
                arena,
                warm_workers=schedule.warm,
                control=VirtualDriver,
            )
            self.control = self.rollouts._control
            self.rollouts.on_ended = self._ended
            observer.track(ENTRIES.values())
            for step in schedule.steps:
                self.loop.call_at(step.time, self._take, step)
            await asyncio.sleep(SECONDS + 4.0)
            await self._settle()
            await self._probe()
            await self._stop(arena)

    def _ended(self, past: Past) -> None:
        ended = past.ended
        number = ended.revision.number
        if number in self.ended:
            self.problem(f"rollout {number} ended twice")
        if (ended.outcome is RolloutOutcome.COMPLETED) == bool(ended.reason):
            self.problem(f"rollout {number} was {ended.outcome} for the reason {ended.reason!r}")
        self.ended[number] = ended.outcome

    # What happens

    def _take(self, step: Step) -> None:
        with self.checked():
            self._do(step)

    def _do(self, step: Step) -> None:
        machine, loop = self.machine, self.loop
        device = DeviceId("cpu", step.which)
        match step.what:
            case "request":
                self._send(step)
            case "leave":
                if there := [caller for caller in self.callers if not caller.answers]:
                    there[step.which % len(there)].leave()
            case "plan":
                self._apply(msgspec.structs.replace(self.deployment, plan=plan_of(step.which)))
            case "unload":
                self._apply(without_model(self.rollouts.desired[1], MODELS[step.which]))
            case "abort":
                if self.applied:
                    self.applied[step.which % len(self.applied)].cancel()
            case "revive":
                loop.create_task(self._revive(MODELS[step.which]))
            case "batch":
                machine.batch_faults.setdefault(device, deque()).append((step.how, step.more))
            case "start":
                machine.start_faults.setdefault(device, deque()).append(step.how)
            case "kill" | "hang-up":
                if alive := [process for process in machine.processes if process.alive]:
                    process = alive[step.which % len(alive)]
                    process.kill() if step.what == "kill" else process.hang_up()
            case "unasked":
                if sessions := machine.sessions():
                    sessions[step.which % len(sessions)].unasked(step.how)
            case "system":
                self._system(step)
            case "lose":
                machine.lost[device] = INJECTED
                loop.call_later(step.more, machine.lost.pop, device, None)
            case "jump":
                self.jumped += step.more
                loop.jump(step.more)
            case "full":
                while (block := machine.arena.allocate(PAGE)) is not None:
                    self.taken.append(block)
                loop.call_later(step.more, self.taken.clear)

    def _system(self, step: Step) -> None:
        if step.how == "no-process":
            self.machine.refusals = step.which
        elif step.how == "undying":
            self.machine.undying = self.loop.now + step.more
        else:
            self.backend.refusals[step.how] = step.which

    def _send(self, step: Step) -> Caller:
        caller = Caller(self, step)
        self.callers.append(caller)
        caller.send()
        return caller

    def _apply(self, deployment: Deployment) -> None:
        self.applied.append(self.loop.create_task(self._until_applied(deployment)))

    async def _until_applied(self, deployment: Deployment) -> None:
        with contextlib.suppress(CotenantError):
            await self.rollouts.apply(deployment, "a step")

    async def _revive(self, model: str) -> None:
        with contextlib.suppress(CotenantError):
            await self.rollouts.revive(model)

    # What holds in the end

    async def _settle(self) -> None:
        """Nothing goes wrong any more: wait until all is well."""
        machine = self.machine
        machine.batch_faults.clear()
        machine.start_faults.clear()
        machine.refusals, machine.undying = 0, 0.0
        self.backend.refusals.clear()
        machine.lost.clear()
        self.taken.clear()
        for _ in range(int(SETTLE)):
            await asyncio.sleep(1.0)
            if self.problems:
                raise ViolationError(self.problems[0])
            if not (unwell := self._unwell()):
                return
            if "permanently" in unwell:
                for model in MODELS:
                    await self._revive(model)
        raise ViolationError(f"{SETTLE:g} s after the last fault: {unwell}")

    def _unwell(self) -> str:
        """Say what is not as it should be when nothing goes wrong; nothing where all is."""
        status = self.rollouts.status()
        if status.phase is not None:
            return f"a rollout is in phase {status.phase}"
        if self.driver.in_flight or self.driver._running or self.control.pool._flights:
            return f"{self.driver.in_flight} requests are open, and {[*self.driver._running]} busy"
        for name, lane in self.orchestrator.supervisor.lanes().items():
            if lane.state is LaneState.FAILED:
                return f"{name} has permanently failed"
            if lane.state is not LaneState.READY:
                return f"{name} is {lane.state}"
            if name in self.orchestrator._kept and lane.standby != "ready":
                return f"{name} has no standby worker, perhaps permanently"
        return ""

    async def _probe(self) -> None:
        """Everything that is planned is served again."""
        lanes = self.orchestrator.rollout.lanes
        if not self.dispatcher.lanes.keys() == lanes.keys() == self.backend.opened.keys():
            raise ViolationError(
                f"lanes {sorted(lanes)}, dispatched to {sorted(self.dispatcher.lanes)}, "
                f"open {sorted(self.backend.opened)}"
            )
        for lane in self.dispatcher.lanes.values():
            if not lane.available or lane.batch is not None:
                raise ViolationError(f"{lane.id} is not available, and nothing is wrong with it")
        for model in MODELS:
            served = any(model in lane.queues for lane in self.dispatcher.lanes.values())
            probes = [self._send(Step(self.loop.now, "request", rows, 5.0, f"{model} small")) for rows in (1, 3, 11)]
            await asyncio.sleep(6.0)
            for probe in probes:
                if probe.served != served:
                    raise ViolationError(f"{probe}, asked when all was well: {probe.answers}")
        tasks = [task for task in self.applied if not task.done()]
        if tasks:
            raise ViolationError(f"{len(tasks)} changes of plan have no answer")
        if self.ended.keys() != set(range(1, len(self.ended) + 1)) or len(self.ended) < len(self.rollouts_requested()):
            raise ViolationError(f"rollouts ended: {sorted(self.ended)}")
        for caller in self.callers:
            if len(caller.answers) != 1:
                raise ViolationError(f"{caller} got {len(caller.answers)} answers")

    def rollouts_requested(self) -> range:
        return range(1, self.orchestrator.rollout._latest + 1)

    async def _stop(self, arena: Arena) -> None:
        """Nothing is left."""
        await self.rollouts.shutdown(1.0)
        await asyncio.sleep(10.0)
        if alive := [process.pid for process in self.machine.processes if process.alive]:
            raise ViolationError(f"{len(alive)} processes are left after the server stopped")
        if self.backend.opened:
            raise ViolationError(f"partitions {sorted(self.backend.opened)} are left open")
        if self.control.pool._flights or self.control.pool._workers or self.control.pool.processes._running:
            raise ViolationError("the pool keeps workers after the server stopped")
        if self.driver._callers or self.driver._split or self.driver._running:
            raise ViolationError("the driver keeps requests after the server stopped")
        for caller in self.callers:
            caller.answers.clear()
        if arena.free != arena.size:
            gc.collect()
        if arena.free != arena.size:
            raise ViolationError(f"{arena.size - arena.free} bytes of the arena never came back")


class _Log(logging.Handler):
    """Keeps the errors that the product did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and INJECTED not in str(record.exc_info[1]):
            place = traceback.extract_tb(record.exc_info[2])[-1]
            self.unexpected.append(
                f"{record.getMessage()}: {record.exc_info[1]!r} at {Path(place.filename).name}:{place.lineno}"
            )


def play(schedule: Schedule) -> Run:
    """Run a schedule to its end; what did not hold is in `problems`."""
    loop = VirtualLoop()
    run = Run(schedule, loop)
    log = _Log()
    logger = logging.getLogger("cotenant")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(log)
    clock = Clock(loop)
    try:
        with (
            mock.patch.object(pool_module, "time", clock),
            mock.patch.object(observer_module, "time", clock),
            mock.patch.object(process_module, "subprocess", mock.Mock(Popen=run.machine.popen)),
        ):
            loop.run_until_complete(run.run())
            pending = asyncio.all_tasks(loop)
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.wait(pending) if pending else asyncio.sleep(0))
    except ViolationError as failed:
        run.problem(str(failed))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
        run.problem(f"{type(error).__name__}: {error}")
    finally:
        logger.removeHandler(log)
        logger.propagate = propagate
        run.close()
        loop.close()
    run.problems += log.unexpected + loop.problems
    return run


def failure(schedule: Schedule) -> str:
    """Return what `describe_failure` does of a schedule."""
    return describe_failure(schedule, lambda played: play(played).problems)
