"""The workers, one for each lane or one for many: start them, give them batches, watch them, start them again when they
die.

Nothing here decides what runs: the pool is told, and tells its listener what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, TypeVarTuple, cast

import msgspec

from cotenant.backends import Backend, Launch
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import Tensor
from cotenant.core.units import show_share
from cotenant.errors import ConfigError, DeviceError, FailedError, RequestError, WorkerError
from cotenant.live.process import ProcessLimitError, WorkerConnection, WorkerProcess, cpu_time
from cotenant.live.warm_pool import WarmPool, WorkerTemplate
from cotenant.worker import runners
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import LARGE, BatchResult, RunBatch, Setup, TensorPart, Timing, WorkerModel, aligned

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.1  # seconds before a dead worker is started again; doubles with each quick death
LONGEST_DELAY = 10.0
STEADY = 10.0  # a worker that lived for so many seconds did not die quickly
TICK = 0.5  # seconds between two looks at all workers and devices
WINDOW = 2.0  # seconds over which an used_share share is taken, at least
EXCESS = 30  # ‰ above its share from which on a lane is in over_share
_STOPPED = "it was stopped while it loaded its models"

Payload = tuple[Tensor, ...]
_Args = TypeVarTuple("_Args")
_T = TypeVar("_T")


class Listener(Protocol):
    """Told from the event loop, never from within `Pool.run`."""

    def ready(self, lane: LaneId) -> None:
        """The lane's worker is up and warm: for the first time, or again."""
        ...

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        """answers: the outputs of each request of the batch, or why the model failed on that one."""
        ...

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        """The model failed on every request of this batch; the worker lives."""
        ...

    def died(self, lane: LaneId, reason: str) -> None:
        """The lane's worker is gone, and what it ran is lost. `ready` follows, unless it dies again and again."""
        ...


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """state: starting, ready, restarting, lost (its device is), or failed (given up).

    share: ‰ that it should keep to; used_share: ‰ that it used of late, None where that is not known. over_share: it
    used more than its share. reason: of its last death. memory: bytes that are its process's own, which may be that of
    other lanes, too; only in a `Status`, since to know them takes reading /proc.
    """

    lane: LaneId
    state: str
    share: int
    pid: int | None
    used_share: float | None
    over_share: bool
    restarts: int
    models: tuple[str, ...]
    reason: str
    memory: int = 0


class _Flight(msgspec.Struct):
    """A batch under way. kept: what must stay in memory meanwhile. room: for its large outputs."""

    batch: int
    model: str
    rows: int
    since: float
    kept: list[object]
    room: Block | None


class _Lane:
    def __init__(self, name: LaneId, share: int, models: Sequence[WorkerModel]) -> None:
        self.name = name
        self.share = share
        self.launch = Launch()  # until the backend has said
        self.models = {model.name: model for model in models}
        self.state = "starting"
        self.line: WorkerConnection | None = None
        self.revival: asyncio.Task[None] | None = None
        self.since = 0.0  # when `line` became ready
        self.quick_deaths = 0
        self.restarts = 0
        self.reason = ""
        self.samples: deque[tuple[float, float]] = deque()  # time, and processor time used until then
        self.sample_due = False
        self.used_share: float | None = None
        self.over_share = False

    @property
    def stops(self) -> bool:
        return self.state.startswith("stop")


class Pool:
    """patience: seconds that a worker has to become ready. hang: seconds after which a batch is given up, and its
    worker with it. lives: quick deaths in a row after which a lane is given up. warm_workers: processes that are kept
    ready for lanes that start, of each outfit that lanes have. All methods belong to the event loop.
    """

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        listener: Listener,
        *,
        patience: float = 120.0,
        hang: float = 60.0,
        lives: int = 10,
        warm_workers: int = 0,
    ) -> None:
        self._backend = backend
        self._arena = arena
        self._listener = listener
        self._patience = patience
        self._hang = hang
        self._lives = lives
        self._lanes: dict[LaneId, _Lane] = {}
        self._lines: dict[WorkerConnection, _Lane] = {}
        self._flights: dict[WorkerConnection, _Flight] = {}
        self._processes: set[WorkerProcess] = set()  # all of which something is left, warm_workers too
        self._shared: dict[str, WorkerProcess] = {}  # by their names
        self._spares = WarmPool(warm_workers, self._begin)
        self._turns = ThreadPoolExecutor(1, "cotenant-backend")  # no longer than this pool; lanes may outlast `close`
        self._lost: dict[DeviceId, str] = {}  # device → why nothing can run on it
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(
        self, lane: LaneId, share: int, models: Sequence[WorkerModel], *, leaving: Collection[LaneId] = ()
    ) -> None:
        """leaving: lanes that stop once this one has taken over. Raises WorkerError, with the reason, where the worker
        does not become ready."""
        if self._closed:
            raise WorkerError(f"the worker of {lane} did not start: the server stops")
        if lane in self._lanes:
            raise WorkerError(f"lane {lane!r} has a worker already; stop it first")
        it = self._lanes[lane] = _Lane(lane, share, models)
        self._timer = self._timer or asyncio.get_running_loop().call_later(TICK, self._tick)
        line = None
        try:
            it.launch = await self._in_turn(self._backend.open, lane, share, leaving)
            line = await self._spawn(it)
        except DeviceError as error:
            raise WorkerError(f"the worker of {lane} did not start: {error}") from None
        finally:
            if line is None and self._lanes.get(lane) is it:  # else `stop` has seen to it
                del self._lanes[lane]
                await self._in_turn(self._backend.close, lane)
        self._adopt(it, line)

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        """Give a lane its next batch: the input tensors of each request. It holds none, and its worker is ready."""
        it = self._lanes.get(lane)
        if it is None or it.line is None or it.line in self._flights or model not in it.models:
            raise WorkerError(f"lane {lane!r} cannot take batch {batch}: {_why_not(it, model)}")
        line = it.line
        kept: list[object] = []
        requests = [[self._part(tensor, kept) for tensor in payload] for payload in payloads]
        rows = sum([payload[0].shape[0] for payload in payloads]) if it.models[model].batched else len(payloads)
        room = None
        if (size := rows * line.footprints[model]) >= LARGE:
            room = self._arena.allocate(size)
        self._flights[line] = _Flight(batch, model, rows, time.monotonic(), kept, room)
        line.send(RunBatch(batch, model, requests, (room.offset, room.size) if room else (0, 0)))

    def poll(self) -> None:
        """Take what workers have answered by now. The event loop comes to that as well, but not before all callers
        that had something to say: where those are more than it can bear, lanes would wait for it and run nothing."""
        for line in list(self._flights):
            line.receive()

    async def stop(self, lane: LaneId, grace: float) -> None:
        """Let a lane finish its batch, within `grace` seconds. Harmless where there is no such lane."""
        it = self._lanes.pop(lane, None)
        if it is None:
            return
        if it.revival:
            it.revival.cancel()
        it.state = "stopping"
        await asyncio.gather(*(line.stop(grace) for line, of in list(self._lines.items()) if of is it))
        it.state = "stopped"
        if it.line in self._flights:  # its process goes on for others, and what it answers is not waited for
            self._listener.died(lane, f"it did not stop within {grace:g} s")
        await self._in_turn(self._backend.close, lane)

    async def close(self, grace: float) -> None:
        """Stop all lanes; none starts any more."""
        self._closed = True
        if self._timer:
            self._timer.cancel()
        await asyncio.gather(*(self.stop(lane, grace) for lane in list(self._lanes)))
        self._spares.keep(set())
        # Others may have no lane any more, and be about to exit: a shared one, one whose device is lost.
        await asyncio.gather(*(process.stop("the server has stopped") for process in self._processes))

    def is_ready(self, lane: LaneId) -> bool:
        """Whether the lane can take a batch, or is at work on one."""
        return lane in self._lanes and self._lanes[lane].state == "ready"

    def shares_process(self, lane: LaneId) -> bool:
        """Whether the lane's process may serve others, too."""
        return lane in self._lanes and bool(self._lanes[lane].launch.process)

    @property
    def ahead(self) -> int:
        """How many processes wait for lanes to start."""
        return self._spares.ready

    def status(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                lane=lane.name,
                state=lane.state,
                share=lane.share,
                pid=lane.line.process.pid if lane.line else None,
                used_share=lane.used_share,
                over_share=lane.over_share,
                restarts=lane.restarts,
                models=tuple(lane.models),
                reason=lane.reason,
            )
            for lane in self._lanes.values()
        ]

    def _part(self, tensor: Tensor, kept: list[object]) -> TensorPart:
        """How a tensor travels. Whatever the worker looks at stays in `kept`."""
        kept.append(tensor)
        size = len(tensor.data)
        if tensor.block is not None:
            start = cast(Block, tensor.block).offset + tensor.start
            return TensorPart(tensor.name, tensor.datatype, tensor.shape, None, start, size)
        if size >= LARGE and (block := self._arena.allocate(size)) is not None:
            block.view[:] = tensor.data
            kept.append(block)
            return TensorPart(tensor.name, tensor.datatype, tensor.shape, None, block.offset, size)
        return TensorPart(tensor.name, tensor.datatype, tensor.shape, cast(memoryview, tensor.data))

    async def _in_turn(self, call: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """What the backend does, in a thread: a driver may take its time. One after the other, as they were asked for,
        and to its end, also where nobody stays to hear of it."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._turns, call, *args))

    async def _spawn(self, lane: _Lane) -> WorkerConnection:
        """A worker that is ready. Raises WorkerError, and leaves nothing behind, where it does not get there."""
        launch = lane.launch
        if reason := _STOPPED if lane.stops else self._lost.get(lane.name.device, ""):
            raise WorkerError(f"the worker of {lane.name} did not start: {reason}")
        line = WorkerConnection(self._process(lane), answered=self._answered, left=self._left)
        self._lines[line] = lane
        line.send(
            Setup(
                arena=self._arena.size,
                models=tuple(lane.models.values()),
                cores=launch.cores,
                threads=launch.threads,
                cpu_limit=launch.cpu_limit,
                fake=launch.fake,
                cuda=launch.cuda,
                groups=launch.groups,
                env=launch.env,
            )
        )
        reason = _STOPPED
        try:
            async with asyncio.timeout(self._patience):
                failure = await line.started
                if not failure and not lane.stops:
                    await self._in_turn(self._backend.on_worker_started, lane.name, line.process.pid)
            # It may have died since, or `stop` was called, before this task had its turn.
            if line.gone.done():
                reason = line.gone.result()
            elif not lane.stops:
                reason = failure
        except TimeoutError:
            reason = f"it was not ready after {self._patience:g} s; is a model too large, or its disk too slow?"
        except (ConfigError, DeviceError) as error:
            reason = str(error)
        finally:
            if reason:
                if line.process.lines <= {line}:
                    line.process.kill(reason)
                await line.stop(grace=0.0)
        if reason:
            raise WorkerError(f"the worker of {lane.name} did not start: {reason}")
        return line

    def _process(self, lane: _Lane) -> WorkerProcess:
        """The process that is to serve a lane."""
        name = lane.launch.process
        shared = self._shared.get(name)
        if shared is not None and not shared.ending:
            return shared
        outfit = self._outfit(lane)
        process = self._spares.take(outfit, name or lane.name) or self._begin(name or lane.name, outfit)
        if name:
            self._shared[name] = process
        return process

    def _begin(self, name: str, outfit: WorkerTemplate, ahead: Sequence[str] | None = None) -> WorkerProcess:
        process = WorkerProcess(name, self._arena.fd, shared=outfit.shared, ahead=ahead)
        self._processes.add(process)
        process.gone.add_done_callback(lambda gone: self._processes.discard(process))
        return process

    def _outfit(self, lane: _Lane) -> WorkerTemplate:
        """What a process needs that serves a lane, with all others that are to share it."""
        process = lane.launch.process
        served = [it for it in self._lanes.values() if it.launch.process == process] if process else [lane]
        models = [(model, it.launch.fake) for it in served for model in it.models.values()]
        modules = {module for model, fake in models for module in runners.modules_of(model, fake=fake)}
        return WorkerTemplate(bool(process), frozenset(modules))

    def _adopt(self, lane: _Lane, line: WorkerConnection) -> None:
        lane.line = line
        lane.state = "ready"
        lane.since = time.monotonic()
        lane.samples.clear()
        lane.revival = None
        self._listener.ready(lane.name)

    def _answered(self, line: WorkerConnection, answer: BatchResult, size: int) -> None:
        flight = self._flights.pop(line)
        lane = self._lines[line]
        if lane.state == "stopped":
            return
        if lane.sample_due:
            self._sample(lane)
        if size >= LARGE:
            self._learn(line, flight, answer)
        reasons = [parts for parts in answer.requests if isinstance(parts, str)]
        if reasons and len(reasons) == len(answer.requests):
            self._listener.failed(lane.name, flight.batch, reasons[0])
            return
        answers: list[Payload | RequestError] = [
            FailedError(parts) if isinstance(parts, str) else tuple([_tensor(part, flight.room) for part in parts])
            for parts in answer.requests
        ]
        self._listener.finished(lane.name, flight.batch, answers, answer.timing)

    def _learn(self, line: WorkerConnection, flight: _Flight, answer: BatchResult) -> None:
        """These outputs were larger than their room: leave more to the next."""
        parts = [
            part
            for parts in answer.requests
            if not isinstance(parts, str)
            for part in parts
            if part.datatype != "BYTES"
        ]
        size = sum(aligned(part.size if part.data is None else len(part.data)) for part in parts)
        known = line.footprints[flight.model]
        line.footprints[flight.model] = max(known, -(-size // max(flight.rows, 1)))

    def _left(self, line: WorkerConnection, reason: str) -> None:
        """A lane's worker is gone: expected or not, ready or not."""
        flight = self._flights.pop(line, None)
        lane = self._lines.pop(line)
        if lane.line is line:
            lane.line = None
            if not lane.stops:
                self._restart(lane, reason)
            elif flight and lane.state == "stopping":
                self._listener.died(lane.name, reason)

    def _restart(self, lane: _Lane, reason: str) -> None:
        lane.reason = reason
        lane.quick_deaths = lane.quick_deaths + 1 if time.monotonic() - lane.since < STEADY else 1
        logger.warning("the worker of %s died: %s", lane.name, reason)
        if lane.name.device in self._lost:
            lane.state = "lost"
        else:
            self._begin_revival(lane, self._revive(lane))
        self._listener.died(lane.name, reason)

    def _begin_revival(self, lane: _Lane, work: Coroutine[None, None, None]) -> None:
        lane.state = "restarting"
        lane.revival = asyncio.get_running_loop().create_task(work)

    async def _revive(self, lane: _Lane) -> None:
        rejections = 0  # by the system, which is no fault of the lane's
        while lane.quick_deaths < self._lives:
            await asyncio.sleep(min(FIRST_DELAY * 2 ** min(lane.quick_deaths + rejections - 1, 10), LONGEST_DELAY))
            lane.restarts += 1
            try:
                line = await self._spawn(lane)
            except WorkerError as error:
                if isinstance(error, ProcessLimitError):
                    rejections += 1
                else:
                    lane.quick_deaths += 1
                lane.reason = str(error)
                logger.warning("%s", error)
            else:
                self._adopt(lane, line)
                return
        lane.state = "failed"
        logger.error("%s is given up: its worker died %d times in a row: %s", lane.name, lane.quick_deaths, lane.reason)

    def _tick(self) -> None:
        if self._closed:
            return
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
        self._look_for_lost()
        if not any(lane.state in ("starting", "restarting") for lane in self._lanes.values()):
            self._spares.keep({self._outfit(lane) for lane in self._lanes.values()})
        now = time.monotonic()
        for line, flight in self._flights.items():
            if now - flight.since > self._hang:
                line.process.kill(f"a batch of {flight.rows} of {flight.model!r} took longer than {self._hang:g} s")
        for lane in self._lanes.values():
            # In the middle of a batch more is used than is earned: its end is the time to look.
            lane.sample_due = lane.line in self._flights
            if not lane.sample_due:
                self._sample(lane)

    def _look_for_lost(self) -> None:
        """End the workers of devices that are lost, and start those of devices that are back."""
        lost = {device: f"{device} is lost: {reason}" for device, reason in self._backend.lost().items()}
        for device, reason in lost.items():
            if device not in self._lost:
                logger.error("%s", reason)
        for device in self._lost.keys() - lost.keys():
            logger.warning("%s is back", device)
        self._lost = lost
        for line, lane in list(self._lines.items()):
            if (device := lane.name.device) in lost:
                line.process.kill(lost[device])
                line.clear(lost[device])  # a process that waits for a driver may not end for long, killed or not
        for lane in self._lanes.values():
            if lane.revival and lane.name.device in lost:
                lane.revival.cancel()
                lane.revival = None
                lane.state, lane.reason = "lost", lost[lane.name.device]
            elif lane.state == "lost" and lane.name.device not in lost:
                lane.quick_deaths = 1
                self._begin_revival(lane, self._return(lane))

    async def _return(self, lane: _Lane) -> None:
        """To a device that is back, but may not have kept what was set up for the lane."""
        await self._in_turn(self._backend.close, lane.name)
        try:
            lane.launch = await self._in_turn(self._backend.open, lane.name, lane.share)
        except DeviceError as error:
            lane.state, lane.reason = "failed", str(error)
            logger.error("%s is given up: %s", lane.name, error)
        else:
            await self._revive(lane)

    def _sample(self, lane: _Lane) -> None:
        """Look from outside at what a lane uses."""
        lane.sample_due = False
        used = cpu_time(lane.line.process.pid) if lane.line else None
        if used is None or lane.launch.budget is None:
            return
        now = time.monotonic()
        samples = lane.samples
        samples.append((now, used))
        while len(samples) > 2 and now - samples[1][0] >= WINDOW:
            samples.popleft()
        since, before = samples[0]
        if now - since < WINDOW:
            return
        lane.used_share = lane.share * (used - before) / ((now - since) * lane.launch.budget)
        over_share = lane.used_share > lane.share + EXCESS
        if over_share and not lane.over_share:
            logger.warning(
                "%s uses %s of its device, and its share is %s",
                lane.name,
                show_share(round(lane.used_share)),
                show_share(lane.share),
            )
        lane.over_share = over_share


def _why_not(lane: _Lane | None, model: str) -> str:
    if lane is None:
        return "there is no such lane"
    if lane.line is None:
        return f"its worker is {lane.state}"
    return "it runs another" if model in lane.models else f"it has no model {model!r}, only {', '.join(lane.models)}"


def _tensor(part: TensorPart, room: Block | None) -> Tensor:
    if part.data is not None or room is None:
        return Tensor(part.name, part.datatype, part.shape, part.data or b"")
    start = part.start - room.offset
    return Tensor(part.name, part.datatype, part.shape, room.view[start : start + part.size], room, start)
