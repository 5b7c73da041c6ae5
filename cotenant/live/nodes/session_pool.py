"""Carry out a front end's commands on a pool of this machine, and tell it what comes of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from cotenant.backends import Backend
from cotenant.control.events import PartitionClosed, SupervisorEvent, WorkerReady, WorkerRefused, WorkersExited
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.units import WHOLE
from cotenant.errors import CotenantError, NodeError, RequestError, WorkerError
from cotenant.live.batch_listener import Payload
from cotenant.live.confinement import Confinement
from cotenant.live.lane_workers import LaneSetup
from cotenant.live.limits import MAX_RANK
from cotenant.live.nodes.batches import Body, ModelTensors, put_tensors, tensors_by_model
from cotenant.live.nodes.link import Link
from cotenant.live.nodes.messages import (
    Answers,
    Batch,
    BatchFailed,
    Closed,
    ClosePartition,
    Exited,
    Kill,
    LaneReading,
    Message,
    NodeModel,
    NotStarted,
    Observed,
    Promote,
    Ready,
    ResizeLanes,
    Retire,
    Spawn,
)
from cotenant.live.nodes.model_files import inner_path
from cotenant.live.pool import Pool
from cotenant.live.process import private_memory
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import BatchResult, TensorPart, Timing, WorkerModel

logger = logging.getLogger(__name__)

MAX_LANES = 1 << 12  # of a pool
MAX_MODELS = 1 << 10  # of a lane
MAX_TENSORS = 1 << 10  # of a model
MAX_BATCH = 1 << 16  # rows
PATIENCE = 30.0  # seconds for workers to end


class SessionPool:
    """Hold a pool of a front end's session. number: as the front end counts its pools. models: folders of models, by
    their digests."""

    def __init__(
        self,
        number: int,
        backend: Backend,
        arena: Arena,
        link: Link,
        models: Mapping[bytes, Path],
        *,
        warm_workers: int,
        confinement: Confinement,
    ) -> None:
        self._number = number
        self._backend = backend
        self._devices = {DeviceId(kind.name, n) for kind in backend.fleet() for n in range(kind.count or 0)}
        self._link = link
        self._models = models
        self._pool = Pool(backend, arena, self._tell, self, forward=self, warm_workers=warm_workers)
        self._pool.confine(confinement)
        self._lanes: dict[LaneId, dict[str, ModelTensors]] = {}  # models by name, until the partition is closed
        self._last: dict[LaneId, int] = {}  # the incarnation that was spawned last
        self._folders: dict[LaneId, set[Path]] = {}
        self._starting: set[tuple[LaneId, int]] = set()
        self._ready: set[tuple[LaneId, int]] = set()
        self._serving: dict[LaneId, int] = {}  # the incarnation that is no standby
        self._batches: dict[LaneId, tuple[int, float]] = {}  # in flight: number, and since when
        self._changed = asyncio.Event()

    @property
    def folders(self) -> set[Path]:
        """The folders of models that its lanes use."""
        return {folder for folders in self._folders.values() for folder in folders}

    # Commands

    def carry_out(self, message: Message) -> None:
        """Carry out one command other than `run`. Raises NodeError for one that is no valid one."""
        match message:
            case Spawn():
                self._spawn(message)
            case Promote(_, lane, incarnation):
                self._serve(lane, incarnation)
                self._pool.promote(lane, incarnation)
            case Kill(_, lane, incarnation, reason, abandon):
                self._pool.kill(lane, incarnation, reason, abandon=abandon)
                if abandon:
                    self._ended([(lane, incarnation)])
            case Retire(_, lane, incarnation, grace):
                self._pool.retire(lane, incarnation, _checked_grace(grace))
            case ResizeLanes(_, lanes):
                self._resize({each.lane: self._setup(each.lane, each.share, each.models) for each in lanes})
            case ClosePartition(_, lane, incarnation):
                self._pool.close_partition(lane, incarnation)
            case _:
                raise NodeError(f"{type(message).__name__} is not a command of a pool")

    def _spawn(self, spawn: Spawn) -> None:
        lane, worker = spawn.lane, (spawn.lane, spawn.incarnation)
        setup = self._setup(lane, spawn.share, spawn.models)
        if worker in self._starting | self._ready:
            raise NodeError(f"worker {spawn.incarnation} of {lane} was spawned before")
        if len(self._lanes) >= MAX_LANES and lane not in self._lanes:
            raise NodeError(f"more than {MAX_LANES} lanes at once")
        self._lanes[lane] = tensors_by_model(setup.models)
        self._last[lane] = max(self._last.get(lane, 0), spawn.incarnation)
        self._starting.add(worker)
        if not spawn.standby:
            self._serve(lane, spawn.incarnation)
        self._pool.spawn(
            lane, spawn.incarnation, setup, fresh=spawn.fresh, leaving=spawn.leaving, standby=spawn.standby
        )

    def _serve(self, lane: LaneId, incarnation: int) -> None:
        self._serving[lane] = incarnation
        self._batches.pop(lane, None)

    def _is_ready(self, lane: LaneId) -> bool:
        return (lane, self._serving.get(lane, 0)) in self._ready

    def _setup(self, lane: LaneId, share: int, models: Sequence[NodeModel]) -> LaneSetup:
        if lane.device not in self._devices:
            raise NodeError(f"{lane}: this node has no device {lane.device}")
        if not 1 <= share <= WHOLE or not 1 <= len(models) <= MAX_MODELS:
            raise NodeError(f"{lane}: a share of {share} ‰, and {len(models)} models")
        checked = tuple(self._checked(lane, model) for model in models)
        self._folders[lane] = {self._models[model.digest] for model in models if model.digest}
        return LaneSetup(share, checked)

    def _checked(self, lane: LaneId, sent: NodeModel) -> WorkerModel:
        """Return a model with the path that its file has here."""
        model = sent.model
        specs = (*model.inputs, *model.outputs)
        if not 1 <= model.max_batch <= MAX_BATCH or len(model.latencies) > MAX_BATCH:
            raise NodeError(f"{lane}: model {model.name!r} has batches of {model.max_batch}")
        if len(specs) > MAX_TENSORS or any(len(spec.shape) > MAX_RANK for spec in specs):
            raise NodeError(f"{lane}: model {model.name!r} has {len(specs)} inputs and outputs, or one of many ranks")
        if not model.path:
            return model
        if sent.digest not in self._models:
            raise NodeError(f"{lane}: model {model.name!r} was not offered")
        return msgspec.structs.replace(model, path=str(self._models[sent.digest] / inner_path(model.path)))

    def _resize(self, setups: Mapping[LaneId, LaneSetup]) -> None:
        for lane, setup in setups.items():
            if lane in self._lanes:
                self._lanes[lane] = tensors_by_model(setup.models)
        try:
            self._pool.resize(setups)
        except CotenantError as error:  # their workers start again with what is wanted now
            for lane, incarnation in [worker for worker in self._starting | self._ready if worker[0] in setups]:
                self._pool.kill(lane, incarnation, str(error))

    def run(self, batch: Batch, body: memoryview | None, block: Block | None) -> None:
        """Give a lane a batch. Raises NodeError for one that is no valid one."""
        lane, tensors = batch.lane, self._lanes.get(batch.lane, {}).get(batch.model)
        if tensors is None:
            raise NodeError(f"batch {batch.batch} is for model {batch.model!r}, which is not on {lane}")
        payloads = None if tensors.are_plain_inputs(batch.requests) else tensors.inputs(batch.requests, body, block)
        if lane in self._batches:
            raise NodeError(f"{lane} has a batch already")
        try:
            if payloads is None:
                self._pool.run_parts(lane, batch.batch, batch.model, batch.requests, [])
            else:
                self._pool.run(lane, batch.batch, batch.model, payloads)
        except WorkerError as error:
            if self._is_ready(lane):
                self._link.send(BatchFailed(self._number, lane, batch.batch, str(error)))
            return  # else its worker has ended, and with it the batch, as the front end is about to hear
        if self._is_ready(lane):
            self._batches[lane] = batch.batch, time.monotonic()

    # What comes of them

    def _tell(self, event: SupervisorEvent) -> None:
        match event:
            case WorkerReady(lane, incarnation):
                self._starting.discard((lane, incarnation))
                self._ready.add((lane, incarnation))
                shared = self._pool.shares_process(lane)
                self._link.send(Ready(self._number, lane, incarnation, self._memory(lane), shared))
            case WorkersExited(workers, reason):
                self._ended(workers)
                self._link.send(Exited(self._number, tuple(workers), reason))
            case WorkerRefused(lane, incarnation, reason):
                self._ended([(lane, incarnation)])
                self._link.send(NotStarted(self._number, lane, incarnation, reason))
            case PartitionClosed(lane, incarnation):
                self._lanes.pop(lane, None)
                self._folders.pop(lane, None)
                self._last.pop(lane, None)
                self._link.send(Closed(self._number, lane, incarnation))
        self._changed.set()

    def _ended(self, workers: Sequence[tuple[LaneId, int]]) -> None:
        for worker in workers:
            lane, incarnation = worker
            self._starting.discard(worker)
            self._ready.discard(worker)
            if self._serving.get(lane) == incarnation:
                del self._serving[lane]
                self._batches.pop(lane, None)
        self._changed.set()

    def answered(self, lane: LaneId, answer: BatchResult) -> None:
        """Send the answers of a batch on as they are."""
        number, since = self._batches.pop(lane, (answer.batch, time.monotonic()))
        lasted = time.monotonic() - since
        self._link.send(Answers(self._number, lane, number, answer.requests, answer.timing, lasted))

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        """Send the answers of a batch."""
        number, since = self._batches.pop(lane, (batch, time.monotonic()))
        body: Body = []
        requests: list[list[TensorPart] | str] = []
        size = 0
        for answer in answers:
            if isinstance(answer, RequestError):
                requests.append(str(answer))
            else:
                (parts,), size = put_tensors([answer], body, size)
                requests.append(parts)
        lasted = time.monotonic() - since
        self._link.send(Answers(self._number, lane, number, requests, timing, lasted), body)

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        """Tell that a batch has failed."""
        self._batches.pop(lane, None)
        self._link.send(BatchFailed(self._number, lane, batch, reason))

    # Observation

    def observe(self) -> None:
        """Tell how the workers are. Called twice a second."""
        self._pool.sample()
        readings = []
        for lane in self._lanes:
            if self._is_ready(lane):
                audit = self._pool.audit(lane)
                used, over = (None, False) if audit is None else (audit.used_share, audit.over_share)
                readings.append(LaneReading(lane, used, over, self._memory(lane)))
        lost = self._backend.lost()
        self._link.send(Observed(self._number, tuple(readings), self._pool.warm_workers, lost))
        if not self._starting:
            self._pool.keep_warm()

    def _memory(self, lane: LaneId) -> int:
        pid = self._pool.pid(lane)
        return 0 if pid is None else private_memory(pid)

    # The end

    async def end(self, reason: str, grace: float) -> None:
        """End all workers, those with a batch within `grace` seconds, and close all partitions."""
        for lane, incarnation in self._starting:
            self._pool.kill(lane, incarnation, reason)
        for lane, incarnation in self._ready:
            self._pool.retire(lane, incarnation, grace)
        await self._until(lambda: not self._starting and not self._ready)
        for lane, incarnation in list(self._last.items()):
            self._pool.close_partition(lane, incarnation)
        await self._until(lambda: not self._lanes)
        await self._pool.close()

    async def _until(self, done: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.error("workers or partitions of a front end that has left do not end: %s", sorted(self._lanes))


def _checked_grace(grace: float) -> float:
    if not 0 <= grace <= 3600:
        raise NodeError(f"a grace of {grace} s")
    return grace
