"""Forward what drivers command of workers to a node, and tell them what comes of it, as a pool of this machine does."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence

import msgspec

from cotenant.control.events import (
    DeviceRestored,
    DevicesLost,
    PartitionClosed,
    SupervisorEvent,
    WorkerBusy,
    WorkerReady,
    WorkerRefused,
    WorkersExited,
)
from cotenant.core.identity import LaneId
from cotenant.errors import ModelError, NodeError, RequestError, WorkerError
from cotenant.live.batch_listener import BatchListener, Payload
from cotenant.live.confinement import Confinement
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.limits import MAX_ERROR
from cotenant.live.nodes import messages
from cotenant.live.nodes.batches import Body, ModelTensors, put_tensors, tensors_by_model
from cotenant.live.nodes.link import Link
from cotenant.live.nodes.node import Node
from cotenant.worker.arena import Block
from cotenant.worker.wire import Timing

logger = logging.getLogger(__name__)

LONGEST = 1e6  # seconds that a batch may be said to have taken


class _Worker(msgspec.Struct, eq=False):
    """Track one incarnation of a lane's worker. sent: the node has been told to start it."""

    lane: LaneId
    incarnation: int
    standby: bool
    sent: bool = False
    ready: bool = False
    shared: bool = False


class _Flight(msgspec.Struct):
    """A batch in flight. payloads: stay in memory until they are sent, and as long as they are answered."""

    batch: int
    tensors: ModelTensors
    rows: int
    requests: int
    since: float
    payloads: Sequence[Payload]


class RemotePool:
    """Run workers on a node. Every lane has the name that it has here. ceilings: shares are ceilings.

    A session that is lost takes all with it: devices are told as lost, and nothing that the node then says of them
    counts, since it says it to a session that there is no more.
    """

    def __init__(
        self, node: Node, tell: Callable[[SupervisorEvent], None], batches: BatchListener, *, ceilings: bool = False
    ) -> None:
        self.unfinished: set[LaneId] = set()
        self.ceilings = ceilings
        self._node = node
        self._tell = tell
        self._batches = batches
        self._setups: dict[LaneId, LaneSetup] = {}
        self._tensors: dict[LaneId, dict[str, ModelTensors]] = {}  # of each setup's models, by name
        self._workers: dict[tuple[LaneId, int], _Worker] = {}
        self._serving: dict[LaneId, _Worker] = {}  # each lane's worker that is no standby
        self._flights: dict[LaneId, _Flight] = {}
        self._abandoned: set[tuple[LaneId, int]] = set()  # batches whose answers nobody waits for
        self._sent: dict[LaneId, dict[str, messages.NodeModel]] = {}  # models by name, as the node has them
        self._open: set[LaneId] = set()  # lanes that the node has a partition for
        self._closing: dict[LaneId, int] = {}
        self._readings: dict[LaneId, messages.LaneReading] = {}
        self._warm = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._here = functools.lru_cache(maxsize=1 << 12)(lambda lane: lane.on(node.name))  # what lanes are called here
        self._there = functools.lru_cache(maxsize=1 << 12)(lambda lane: lane.local)  # and on the node
        self._number = node.open_pool(self)

    def is_of(self, node: Node) -> bool:
        """Return whether this is that node's: another may have got its name."""
        return self._node is node

    # Workers

    def confine(self, confinement: Confinement) -> None:
        """Do nothing: a node confines its workers as its own settings say."""

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
        worker = _Worker(lane, incarnation, standby)
        if not standby or lane not in self._setups:
            self._set_up(lane, setup)
        self._workers[lane, incarnation] = worker
        if not standby:
            self._serving[lane] = worker
            self.unfinished.discard(lane)
        self._spawn_task(self._spawn(worker, fresh=fresh, leaving=leaving))

    def _set_up(self, lane: LaneId, setup: LaneSetup) -> None:
        self._setups[lane] = setup
        self._tensors[lane] = tensors_by_model(setup.models)

    async def _spawn(self, worker: _Worker, *, fresh: bool, leaving: Collection[LaneId]) -> None:
        """Send the models that the node lacks, then start the worker."""
        key = worker.lane, worker.incarnation
        if key not in self._workers:
            return  # it was killed, and its partition may be closed
        try:
            link = self._node.link
            models = await self._node.send_models(self._setups[worker.lane].models)
            if link is not self._node.link:
                raise NodeError(f"{self._node.name} was cut off meanwhile")
        except (NodeError, ModelError) as error:
            self._exited([key], str(error))
            return
        if key not in self._workers:
            return  # it was killed meanwhile
        worker.sent = True
        self._open.add(worker.lane)
        setup = self._setups[worker.lane]  # it may have been resized
        self._sent[worker.lane] = {sent.model.name: sent for sent in models}
        link.send(
            messages.Spawn(
                self._number,
                worker.lane.local,
                worker.incarnation,
                setup.share,
                self._models(worker.lane),
                fresh,
                tuple(each.local for each in leaving),
                worker.standby,
            )
        )

    def promote(self, lane: LaneId, incarnation: int) -> None:
        worker = self._workers.get((lane, incarnation))
        if worker is None:
            return  # its end is on its way
        worker.standby = False
        self._serving[lane] = worker
        self.unfinished.discard(lane)
        if worker.sent:
            self._send(messages.Promote(self._number, lane.local, incarnation))

    def kill(self, lane: LaneId, incarnation: int, reason: str, *, abandon: bool = False) -> None:
        worker = self._workers.get((lane, incarnation))
        if worker is None:
            return
        if worker.sent:
            self._send(messages.Kill(self._number, lane.local, incarnation, reason[:MAX_ERROR], abandon))
        if abandon:
            self._forget(worker)
        elif not worker.sent:
            self._later(lambda: self._exited([(lane, incarnation)], reason))

    def retire(self, lane: LaneId, incarnation: int, grace: float) -> None:
        worker = self._workers.get((lane, incarnation))
        if worker is None:
            return
        if worker.sent:
            self._send(messages.Retire(self._number, lane.local, incarnation, grace))
        else:
            self._later(lambda: self._exited([(lane, incarnation)], "it was stopped"))

    def resize(self, setups: Mapping[LaneId, LaneSetup]) -> None:
        lanes = []
        for lane, setup in setups.items():
            if lane not in self._setups:
                continue
            self._set_up(lane, setup)
            if lane in self._open:
                lanes.append(messages.ResizedLane(lane.local, setup.share, self._models(lane)))
        if lanes:
            self._send(messages.ResizeLanes(self._number, tuple(lanes)))

    def _models(self, lane: LaneId) -> tuple[messages.NodeModel, ...]:
        """Return a lane's models as they are wanted now, with the paths that their files have on the node."""
        sent = self._sent[lane]
        return tuple(
            messages.NodeModel(
                msgspec.structs.replace(model, path=sent[model.name].model.path), sent[model.name].digest
            )
            for model in self._setups[lane].models
        )

    def close_partition(self, lane: LaneId, incarnation: int) -> None:
        self._setups.pop(lane, None)
        self._tensors.pop(lane, None)
        self._serving.pop(lane, None)
        self._readings.pop(lane, None)
        self._sent.pop(lane, None)
        if lane in self._open and self._node.is_up:
            self._closing[lane] = incarnation
            self._send(messages.ClosePartition(self._number, lane.local, incarnation))
        else:
            self._open.discard(lane)
            self._later(lambda: self._tell(PartitionClosed(lane, incarnation)))

    async def close(self) -> None:
        """End what is left on the node."""
        self._workers.clear()  # those whose models are still being sent are not started
        self._send(messages.ClosePool(self._number))
        self._node.close_pool(self._number)
        await asyncio.gather(*self._tasks)

    def _send(self, message: messages.Message, body: Body | None = None) -> None:
        if self._node.is_up:
            self._node.link.send(message, body or ())

    def _later(self, call: Callable[[], None]) -> None:
        """Tell from the event loop: who commands does not expect an answer from within."""
        asyncio.get_running_loop().call_soon(call)

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Batches

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        worker, tensors = self._serving.get(lane), self._tensors.get(lane, {}).get(model)
        if worker is None or not worker.ready or lane in self._flights or tensors is None:
            raise WorkerError(f"lane '{lane}' cannot take batch {batch}: its worker is not ready for it")
        if not self._node.is_up:
            self.unfinished.add(lane)
            return
        rows = sum([payload[0].shape[0] for payload in payloads]) if tensors.model.batched else len(payloads)
        body: Body = []
        requests, _ = put_tensors(payloads, body)
        self._flights[lane] = _Flight(batch, tensors, rows, len(payloads), time.monotonic(), payloads)
        self._node.link.send(messages.Batch(self._number, self._there(lane), batch, model, requests), body)

    def poll(self) -> None:
        """Do nothing: the event loop receives what the node sends."""

    def busy(self) -> Iterator[WorkerBusy]:
        for lane, flight in list(self._flights.items()):
            batch = f"a batch of {flight.rows} of {flight.tensors.model.name!r}"
            yield WorkerBusy(lane, self._serving[lane].incarnation, flight.since, batch)

    # What the node says

    def attached(self, link: Link) -> None:
        """Hear that a session begins: the node's devices can be used again, but for those that it will say are lost."""
        for device in self._node.devices():
            self._tell(DeviceRestored(device))

    def received(self, message: messages.Message, body: memoryview | None, block: Block | None) -> None:
        """Take what the node says of this pool. Raises NodeError for what cannot be true."""
        name = self._node.name
        match message:
            case messages.Answers():
                self._answered(message, body, block)
            case messages.BatchFailed(_, local, batch, reason):
                lane = local.on(name)
                if self._landed(lane, batch) is not None:
                    self._batches.failed(lane, batch, reason[:MAX_ERROR])
            case messages.Ready(_, local, incarnation, memory, shared):
                self._is_ready(local.on(name), incarnation, memory, shared=shared)
            case messages.Exited(_, workers, reason):
                self._exited([(lane.on(name), incarnation) for lane, incarnation in workers], reason[:MAX_ERROR])
            case messages.NotStarted(_, local, incarnation, reason):
                worker = self._workers.get((local.on(name), incarnation))
                if worker is not None:
                    self._forget(worker)
                    self._tell(WorkerRefused(worker.lane, incarnation, f"{name}: {reason[:MAX_ERROR]}"))
            case messages.Closed(_, local, _):
                lane = local.on(name)
                self._open.discard(lane)
                closing = self._closing.pop(lane, None)
                if closing is not None:
                    self._tell(PartitionClosed(lane, closing))
            case messages.Observed(_, readings, warm, _):
                self._readings = {reading.lane.on(name): reading for reading in readings}
                self._warm = warm
            case _:
                raise NodeError(f"{type(message).__name__} is nothing that a pool tells")

    def _is_ready(self, lane: LaneId, incarnation: int, memory: int, *, shared: bool) -> None:
        worker = self._workers.get((lane, incarnation))
        if worker is None or worker.ready:
            return  # it is not waited for any more
        worker.ready, worker.shared = True, shared
        self._readings[lane] = messages.LaneReading(lane, None, False, memory)
        self._tell(WorkerReady(lane, incarnation))

    def _exited(self, keys: Sequence[tuple[LaneId, int]], reason: str) -> None:
        """Report the end of workers once, together."""
        ended = [self._workers[key] for key in keys if key in self._workers]
        for worker in ended:
            self._forget(worker)
        if ended:
            workers = tuple((worker.lane, worker.incarnation) for worker in ended)
            self._tell(WorkersExited(workers, f"{self._node.name}: {reason}"))

    def _forget(self, worker: _Worker) -> None:
        self._workers.pop((worker.lane, worker.incarnation), None)
        if self._serving.get(worker.lane) is worker:
            del self._serving[worker.lane]
            self._readings.pop(worker.lane, None)
            flight = self._flights.pop(worker.lane, None)
            if flight is not None:
                self.unfinished.add(worker.lane)
                self._abandoned.add((worker.lane, flight.batch))

    def _landed(self, lane: LaneId, batch: int) -> _Flight | None:
        """Return the batch that is answered; None for one that nobody waits for any more."""
        flight = self._flights.get(lane)
        if flight is not None and flight.batch == batch:
            return self._flights.pop(lane)
        if (lane, batch) not in self._abandoned:
            raise NodeError(f"it answered batch {batch} of {lane}, which it was not given")
        self._abandoned.discard((lane, batch))
        return None

    def _answered(self, message: messages.Answers, body: memoryview | None, block: Block | None) -> None:
        lane = self._here(message.lane)
        flight = self._landed(lane, message.batch)
        if flight is None:
            return
        if len(message.requests) != flight.requests:
            raise NodeError(f"it answered {len(message.requests)} of {flight.requests} requests")
        answers = flight.tensors.outputs(message.requests, body, block)
        timing = _checked_timing(message.timing, message.lasted, self._node.round_trip)
        failed = [answer for answer in answers if isinstance(answer, RequestError)]
        if failed and len(failed) == len(answers):
            self._batches.failed(lane, flight.batch, str(failed[0]))
        else:
            self._batches.finished(lane, flight.batch, answers, timing)

    def cut(self, reason: str) -> None:
        """Hear that the session is over: nothing runs on the node any more."""
        self.unfinished.update(self._flights)
        self._flights.clear()
        self._abandoned.clear()
        self._open.clear()
        self._readings.clear()
        self._warm = 0
        self._tell(DevicesLost(dict.fromkeys(self._node.devices(), reason)))
        self._exited([key for key, worker in self._workers.items() if worker.sent], reason)
        for lane, incarnation in self._closing.items():
            self._tell(PartitionClosed(lane, incarnation))
        self._closing.clear()

    # Observation

    def sample(self) -> None:
        """Do nothing: a node samples its workers itself."""

    def keep_warm(self) -> None:
        """Do nothing: a node keeps processes pre-started as its own settings say."""

    @property
    def warm_workers(self) -> int:
        return self._warm

    def pid(self, lane: LaneId) -> int | None:
        """Return None: the worker is no process of this machine."""
        return None

    def memory(self, lane: LaneId) -> int:
        reading = self._readings.get(lane)
        return 0 if reading is None else max(reading.memory, 0)

    def audit(self, lane: LaneId) -> messages.LaneReading | None:
        return self._readings.get(lane)

    def shares_process(self, lane: LaneId) -> bool:
        return lane in self._serving and self._serving[lane].shared


def _checked_timing(timing: Timing, lasted: float, round_trip: float) -> Timing:
    """Return a node's timing with a beginning by the clock here. Raises NodeError for times that no batch takes."""
    _, gather, infer, scatter, pause, cpu, device, memory, lent, warming_up = msgspec.structs.astuple(timing)
    seconds = gather, infer, scatter, pause, cpu, device, lent, lasted
    if not (min(seconds) >= 0 and sum(seconds) < LONGEST) or memory < 0:  # a NaN fails a comparison
        raise NodeError(f"it says that a batch took {max(seconds, key=abs)} s")
    started = time.monotonic() - round_trip / 2 - max(lasted, gather + infer + scatter + pause)
    return Timing(started, gather, infer, scatter, pause, cpu, device, memory, lent, warming_up)
