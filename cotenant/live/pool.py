"""The workers, one for each lane: start them, give them batches, watch them, start them again when they die.

Nothing here decides what runs: the pool is told, and tells its listener what came of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from cotenant.backends import Backend, Launch
from cotenant.core.tensor import Tensor
from cotenant.core.units import show_share
from cotenant.errors import FailedError, RequestError, WorkerError
from cotenant.live.process import Process, own_memory, processor_time
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import LARGE, Answer, Part, Run, Setup, Timing, WorkerModel, aligned

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.1  # seconds before a dead worker is started again; doubles with each quick death
LONGEST_DELAY = 10.0
STEADY = 10.0  # a worker that lived for so many seconds did not die quickly
TICK = 1.0  # seconds between two looks at all workers
WINDOW = 2.0  # seconds over which an obeyed share is taken, at least
EXCESS = 30  # ‰ above its share from which on a lane is in breach

Payload = tuple[Tensor, ...]


class Listener(Protocol):
    """Told from the event loop, never from within `Pool.run`."""

    def ready(self, lane: str) -> None:
        """The lane's worker is up and warm: for the first time, or again."""
        ...

    def finished(self, lane: str, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        """answers: the outputs of each request of the batch, or why the model failed on that one."""
        ...

    def failed(self, lane: str, batch: int, reason: str) -> None:
        """The model failed on every request of this batch; the worker lives."""
        ...

    def died(self, lane: str, reason: str) -> None:
        """The lane's worker is gone, and what it ran is lost. `ready` follows, unless it dies again and again."""
        ...


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """state: starting, ready, restarting, or failed (given up).

    share: ‰ that it should keep to; obeyed: ‰ that it used of late, None where that is not known. breach: it used
    more than its share. memory: bytes that are its own. reason: of its last death.
    """

    lane: str
    state: str
    share: int
    pid: int | None
    obeyed: float | None
    breach: bool
    restarts: int
    memory: int
    models: tuple[str, ...]
    reason: str


class _Flight(msgspec.Struct):
    """A batch under way. kept: what must stay in memory meanwhile. room: for its large outputs."""

    batch: int
    model: str
    rows: int
    since: float
    kept: list[object]
    room: Block | None


class _Lane:
    def __init__(self, name: str, share: int, launch: Launch, models: Sequence[WorkerModel]) -> None:
        self.name = name
        self.share = share
        self.launch = launch
        self.models = {model.name: model for model in models}
        self.state = "starting"
        self.process: Process | None = None
        self.revival: asyncio.Task[None] | None = None
        self.since = 0.0  # when `process` became ready
        self.quick_deaths = 0
        self.restarts = 0
        self.reason = ""
        self.samples: deque[tuple[float, float]] = deque()  # time, and processor time used until then
        self.sample_due = False
        self.obeyed: float | None = None
        self.breach = False


class Pool:
    """patience: seconds that a worker has to become ready. hang: seconds after which a batch is given up, and its
    worker with it. lives: quick deaths in a row after which a lane is given up. All methods belong to the event loop.
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
    ) -> None:
        self._backend = backend
        self._arena = arena
        self._listener = listener
        self._patience = patience
        self._hang = hang
        self._lives = lives
        self._lanes: dict[str, _Lane] = {}
        self._processes: dict[Process, _Lane] = {}
        self._flights: dict[Process, _Flight] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, lane: str, share: int, models: Sequence[WorkerModel]) -> None:
        """Raises WorkerError, with the reason, where the worker does not become ready."""
        if lane in self._lanes:
            raise WorkerError(f"lane {lane!r} has a worker already; stop it first")
        it = self._lanes[lane] = _Lane(lane, share, self._backend.open(lane, share), models)
        self._timer = self._timer or asyncio.get_running_loop().call_later(TICK, self._tick)
        process = None
        try:
            process = await self._spawn(it, models)
        finally:
            if process is None and self._lanes.get(lane) is it:  # else `stop` has seen to it
                del self._lanes[lane]
                self._backend.close(lane)
        self._adopt(it, process)

    def run(self, lane: str, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        """Give a lane its next batch: the input tensors of each request. It holds none, and its worker is ready."""
        it = self._lanes.get(lane)
        if it is None or it.process is None or it.process in self._flights or model not in it.models:
            raise WorkerError(f"lane {lane!r} cannot take batch {batch}: {_why_not(it, model)}")
        process = it.process
        kept: list[object] = []
        requests = [[self._part(tensor, kept) for tensor in payload] for payload in payloads]
        rows = sum([payload[0].shape[0] for payload in payloads]) if it.models[model].batched else len(payloads)
        room = None
        if (size := rows * process.footprints[model]) >= LARGE:
            room = self._arena.allocate(size)
        self._flights[process] = _Flight(batch, model, rows, time.monotonic(), kept, room)
        process.send(Run(batch, model, requests, (room.offset, room.size) if room else (0, 0)))

    def poll(self) -> None:
        """Take what workers have answered by now. The event loop comes to that as well, but not before all callers
        that had something to say: where those are more than it can bear, lanes would wait for it and run nothing."""
        for process in list(self._flights):
            process.receive()

    async def stop(self, lane: str, grace: float) -> None:
        """Let a lane finish its batch, within `grace` seconds. Harmless where there is no such lane."""
        it = self._lanes.pop(lane, None)
        if it is None:
            return
        if it.revival:
            it.revival.cancel()
        it.state = "stopping"
        await asyncio.gather(*(process.stop(grace) for process, of in list(self._processes.items()) if of is it))
        self._backend.close(lane)

    async def close(self, grace: float) -> None:
        """Stop all lanes."""
        if self._timer:
            self._timer.cancel()
        await asyncio.gather(*(self.stop(lane, grace) for lane in list(self._lanes)))

    def status(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                lane=lane.name,
                state=lane.state,
                share=lane.share,
                pid=lane.process.pid if lane.process else None,
                obeyed=lane.obeyed,
                breach=lane.breach,
                restarts=lane.restarts,
                memory=own_memory(lane.process.pid) if lane.process else 0,
                models=tuple(lane.models),
                reason=lane.reason,
            )
            for lane in self._lanes.values()
        ]

    def _part(self, tensor: Tensor, kept: list[object]) -> Part:
        """How a tensor travels. Whatever the worker looks at stays in `kept`."""
        kept.append(tensor)
        size = len(tensor.data)
        if tensor.block is not None:
            start = cast(Block, tensor.block).offset + tensor.start
            return Part(tensor.name, tensor.datatype, tensor.shape, None, start, size)
        if size >= LARGE and (block := self._arena.allocate(size)) is not None:
            block.view[:] = tensor.data
            kept.append(block)
            return Part(tensor.name, tensor.datatype, tensor.shape, None, block.offset, size)
        return Part(tensor.name, tensor.datatype, tensor.shape, cast(memoryview, tensor.data))

    async def _spawn(self, lane: _Lane, models: Sequence[WorkerModel]) -> Process:
        """A worker that is ready. Raises WorkerError, and leaves nothing behind, where it does not get there."""
        launch = lane.launch
        process = Process(lane.name, self._arena.fd, launch.env, answered=self._answered, left=self._left)
        self._processes[process] = lane
        process.send(
            Setup(
                arena=self._arena.size,
                models=tuple(models),
                cores=launch.cores,
                threads=launch.threads,
                pace=launch.pace,
                fake=launch.fake,
            )
        )
        reason = "it was stopped while it loaded its models"
        try:
            async with asyncio.timeout(self._patience):
                await process.started
            # It may have died since, before this task had its turn.
            reason = process.gone.result() if process.gone.done() else process.started.result()
        except TimeoutError:
            reason = f"it was not ready after {self._patience:g} s; is a model too large, or its disk too slow?"
        finally:
            if reason:
                process.kill(reason)
                await process.stop(grace=0.0)
        if reason:
            raise WorkerError(f"the worker of {lane.name} did not start: {reason}")
        self._backend.attach(lane.name, process.pid)
        return process

    def _adopt(self, lane: _Lane, process: Process) -> None:
        lane.process = process
        lane.state = "ready"
        lane.since = time.monotonic()
        lane.samples.clear()
        lane.revival = None
        self._listener.ready(lane.name)

    def _answered(self, process: Process, answer: Answer, size: int) -> None:
        flight = self._flights.pop(process)
        lane = self._processes[process]
        if lane.sample_due:
            self._sample(lane)
        if size >= LARGE:
            self._learn(process, flight, answer)
        reasons = [parts for parts in answer.requests if isinstance(parts, str)]
        if reasons and len(reasons) == len(answer.requests):
            self._listener.failed(lane.name, flight.batch, reasons[0])
            return
        answers: list[Payload | RequestError] = [
            FailedError(parts) if isinstance(parts, str) else tuple([_tensor(part, flight.room) for part in parts])
            for parts in answer.requests
        ]
        self._listener.finished(lane.name, flight.batch, answers, answer.timing)

    def _learn(self, process: Process, flight: _Flight, answer: Answer) -> None:
        """These outputs were larger than their room: leave more to the next."""
        parts = [
            part
            for parts in answer.requests
            if not isinstance(parts, str)
            for part in parts
            if part.datatype != "BYTES"
        ]
        size = sum(aligned(part.size if part.data is None else len(part.data)) for part in parts)
        known = process.footprints[flight.model]
        process.footprints[flight.model] = max(known, -(-size // max(flight.rows, 1)))

    def _left(self, process: Process, reason: str) -> None:
        """A process is gone: expected or not, ready or not."""
        lost = self._flights.pop(process, None)
        lane = self._processes.pop(process)
        if lane.process is process:
            lane.process = None
            if lane.state != "stopping":
                self._restart(lane, reason)
            elif lost:
                self._listener.died(lane.name, reason)

    def _restart(self, lane: _Lane, reason: str) -> None:
        lane.reason = reason
        lane.quick_deaths = lane.quick_deaths + 1 if time.monotonic() - lane.since < STEADY else 1
        lane.state = "restarting"
        logger.warning("the worker of %s died: %s", lane.name, reason)
        lane.revival = asyncio.get_running_loop().create_task(self._revive(lane))
        self._listener.died(lane.name, reason)

    async def _revive(self, lane: _Lane) -> None:
        while lane.quick_deaths < self._lives:
            await asyncio.sleep(min(FIRST_DELAY * 2 ** (lane.quick_deaths - 1), LONGEST_DELAY))
            lane.restarts += 1
            try:
                process = await self._spawn(lane, list(lane.models.values()))
            except WorkerError as error:
                lane.quick_deaths += 1
                lane.reason = str(error)
                logger.warning("%s", error)
            else:
                self._adopt(lane, process)
                return
        lane.state = "failed"
        logger.error("%s is given up: its worker died %d times in a row: %s", lane.name, lane.quick_deaths, lane.reason)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
        now = time.monotonic()
        for process, flight in self._flights.items():
            if now - flight.since > self._hang:
                process.kill(f"a batch of {flight.rows} of {flight.model!r} took longer than {self._hang:g} s")
        for lane in self._lanes.values():
            # In the middle of a batch more is used than is earned: its end is the time to look.
            lane.sample_due = lane.process in self._flights
            if not lane.sample_due:
                self._sample(lane)

    def _sample(self, lane: _Lane) -> None:
        """Look from outside at what a lane uses."""
        lane.sample_due = False
        used = processor_time(lane.process.pid) if lane.process else None
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
        lane.obeyed = lane.share * (used - before) / ((now - since) * lane.launch.budget)
        breach = lane.obeyed > lane.share + EXCESS
        if breach and not lane.breach:
            logger.warning(
                "%s uses %s of its device, and its share is %s",
                lane.name,
                show_share(round(lane.obeyed)),
                show_share(lane.share),
            )
        lane.breach = breach


def _why_not(lane: _Lane | None, model: str) -> str:
    if lane is None:
        return "there is no such lane"
    if lane.process is None:
        return f"its worker is {lane.state}"
    return "it runs another" if model in lane.models else f"it has no model {model!r}, only {', '.join(lane.models)}"


def _tensor(part: Part, room: Block | None) -> Tensor:
    if part.data is not None or room is None:
        return Tensor(part.name, part.datatype, part.shape, part.data or b"")
    start = part.start - room.offset
    return Tensor(part.name, part.datatype, part.shape, room.view[start : start + part.size], room, start)
