"""Transport between the server and its workers: start processes, connect to them, hand over batches, end them.

It decides nothing: the supervisor commands it and is told the results; a listener is told the results of batches.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence

from cotenant.backends import Backend
from cotenant.control.events import (
    PartitionClosed,
    SupervisorEvent,
    WorkerBusy,
    WorkerReady,
    WorkerRefused,
    WorkersExited,
)
from cotenant.core.identity import LaneId
from cotenant.errors import ConfigError, DeviceError, FailedError, RequestError, WorkerError
from cotenant.live.batch_listener import BatchListener, ForwardingListener, Payload
from cotenant.live.batch_tensors import is_inline, output_size, tensor_of, tensor_part
from cotenant.live.confinement import Confinement
from cotenant.live.lane_partitions import LanePartitions
from cotenant.live.lane_workers import Flight, LaneSetup, LaneWorker, WorkerLane, new_audit, why_not
from cotenant.live.lending import Lending
from cotenant.live.process import ProcessLimitError, WorkerConnection, cpu_time
from cotenant.live.processes import WorkerProcesses
from cotenant.live.share_audit import ShareAudit
from cotenant.live.warm_pool import WorkerTemplate
from cotenant.worker import runners
from cotenant.worker.arena import Arena
from cotenant.worker.background import leave_background
from cotenant.worker.wire import LARGE, BatchResult, Resize, RunBatch, Setup, TensorPart

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds that a worker may load its models in the background


class Pool:
    """Start, stop and talk to the workers of lanes. All methods belong to the event loop.

    tell: receives the events for the supervisor. forward: receives results that need not be read, in place of
    `batches`. warm_workers: pre-started processes per worker template.
    """

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        tell: Callable[[SupervisorEvent], None],
        batches: BatchListener,
        *,
        forward: ForwardingListener | None = None,
        warm_workers: int = 0,
    ) -> None:
        self.unfinished: set[LaneId] = set()  # lanes whose last worker ended with a batch under way
        self._arena = arena
        self._tell = tell
        self._batches = batches
        self._forward = forward
        self._lanes: dict[LaneId, WorkerLane] = {}
        self._workers: dict[WorkerConnection, LaneWorker] = {}
        self._flights: dict[WorkerConnection, Flight] = {}
        self._answers = select.poll()  # sockets of workers, to be asked at once which of them have answered
        self._by_socket: dict[int, WorkerConnection] = {}
        self._lending = Lending(arena)
        self._partitions = LanePartitions(backend, self._lending)
        self.processes = WorkerProcesses(arena.fd, self._left, warm_workers=warm_workers)
        self._tasks: set[asyncio.Task[None]] = set()

    # Workers

    def confine(self, confinement: Confinement) -> None:
        """Confine processes that start from now on."""
        self.processes.confinement = confinement

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
        """Start a worker; `WorkerReady`, `WorkersExited` or `WorkerRefused` follows. fresh: open its partition first.
        leaving: see `Backend.open`. standby: beside the lane's worker, until `promote`."""
        held = self._lanes.get(lane)
        if held is None:
            held = self._lanes[lane] = WorkerLane(lane, setup)
        worker = LaneWorker(held, incarnation, standby=standby)
        if standby:
            held.standby = worker
        else:
            held.worker = worker
            self.unfinished.discard(lane)
        self._spawn_task(self._start(worker, fresh, leaving))

    def promote(self, lane: LaneId, incarnation: int) -> None:
        """Make a standby the lane's worker. One that still loads its models goes on in the foreground."""
        worker = self._worker(lane, incarnation)
        if worker is None:
            return  # its end is on its way
        held = worker.lane
        worker.standby, held.standby, held.worker = False, None, worker
        self.unfinished.discard(lane)
        if worker.ready:
            held.audit = new_audit(held)
            self._spawn_task(self._tell_backend(worker))
        elif worker.line is not None:
            self._leave_background(worker.line)
            self._hurry(worker.line)  # it may be about to enter the background

    def _hurry(self, line: WorkerConnection) -> None:
        """Let a worker load its models in the foreground where the background was too slow."""
        hurry = asyncio.get_running_loop().call_later(PATIENCE, self._leave_background, line)
        line.started.add_done_callback(lambda started: hurry.cancel())

    def _leave_background(self, line: WorkerConnection) -> None:
        if self.processes.confinement.background:
            return
        self._spawn_task(asyncio.to_thread(leave_background, line.process.pid))

    async def _tell_backend(self, worker: LaneWorker) -> None:
        """Tell the backend of a worker that was promoted; one that it cannot serve is killed."""
        assert worker.line is not None
        try:
            await self._partitions.started(worker.lane.name, worker.line.process.pid)
        except (ConfigError, DeviceError) as error:
            self.kill(worker.lane.name, worker.incarnation, str(error))

    def kill(self, lane: LaneId, incarnation: int, reason: str, *, abandon: bool = False) -> None:
        """Kill a worker, and with it all that share its process; but where it is only starting, the others stay.
        abandon: report nothing of it any more."""
        worker = self._worker(lane, incarnation)
        if worker is None:
            return
        worker.killed = worker.killed or reason
        worker.over = abandon
        line = worker.line
        if line is None:
            return  # killed once it has a process
        if worker.ready or line.process.lines <= {line}:
            line.process.kill(reason)
        line.give_up(reason)

    def retire(self, lane: LaneId, incarnation: int, grace: float) -> None:
        """Retire a worker: let it finish its batch and exit within `grace` seconds."""
        worker = self._worker(lane, incarnation)
        if worker is not None and worker.line is not None:
            worker.retiring = True
            self._spawn_task(self._retire(worker, worker.line, grace))

    def resize(self, setups: Mapping[LaneId, LaneSetup]) -> None:
        """Let lanes go on with other shares and largest batches, from their next batch on. Raises ConfigError."""
        lanes = [self._lanes[lane] for lane in setups if lane in self._lanes]
        for lane in lanes:
            lane.share = setups[lane.name].share
            lane.models = {model.name: model for model in setups[lane.name].models}
        for lane in self._partitions.resize(lanes):
            self._tell_share(lane)

    def _tell_share(self, lane: WorkerLane) -> None:
        """Tell a lane's workers of another share."""
        for worker in (lane.worker, lane.standby):
            if worker is None or worker.over or worker.line is None:
                continue  # the next one starts with it
            worker.resize_due = True
            if worker.ready:
                if worker is lane.worker:
                    lane.audit = new_audit(lane)
                if worker.line not in self._flights:
                    self._send_resize(worker, worker.line)

    def _send_resize(self, worker: LaneWorker, line: WorkerConnection) -> None:
        """Between two batches: while one runs a worker expects nothing."""
        worker.resize_due = False
        launch = worker.lane.launch
        line.send(Resize(tuple(worker.lane.models.values()), launch.cores, launch.cpu_limit))

    def close_partition(self, lane: LaneId, incarnation: int) -> None:
        """Close a lane's partition; `PartitionClosed` follows."""
        self._spawn_task(self._close_partition(lane, incarnation))

    async def close(self) -> None:
        """End processes without a lane: pre-started ones, and those about to exit."""
        self.processes.keep_warm(set())
        await asyncio.gather(*self._tasks)
        await self.processes.close()
        self._lending.stop()

    def _worker(self, lane: LaneId, incarnation: int) -> LaneWorker | None:
        """Return the worker of that incarnation unless its end was reported."""
        held = self._lanes.get(lane)
        workers = () if held is None else (held.worker, held.standby)
        for worker in workers:
            if worker is not None and worker.incarnation == incarnation and not worker.over:
                return worker
        return None

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, worker: LaneWorker, fresh: bool, leaving: Collection[LaneId]) -> None:
        lane = worker.lane
        try:
            reason = await self._until_ready(worker, fresh, leaving)
        except ProcessLimitError as error:
            worker.over = True
            self._tell(WorkerRefused(lane.name, worker.incarnation, str(error)))
            return
        except (ConfigError, DeviceError) as error:
            reason = str(error)
        except Exception as error:
            logger.exception("the worker of %s could not be started", lane.name)
            reason = f"{type(error).__name__}: {error}"
        if not reason:
            worker.ready = True
            if not worker.standby:
                lane.audit = new_audit(lane)
            if worker.resize_due and worker.line is not None:
                self._send_resize(worker, worker.line)
            self._tell(WorkerReady(lane.name, worker.incarnation))
            return
        if worker.line is not None:
            if worker.line.process.lines <= {worker.line}:
                worker.line.process.kill(reason)
            await worker.line.stop(grace=0.0)
        self._exited([worker], reason)

    async def _until_ready(self, worker: LaneWorker, fresh: bool, leaving: Collection[LaneId]) -> str:
        """Wait until a worker is ready; return "" or the reason why it is not."""
        lane = worker.lane
        if fresh:
            await self._partitions.open(worker, leaving)
        if worker.killed:
            return worker.killed
        launch = lane.launch
        with self.processes.descriptors.lent():
            process = self.processes.take(lane.name, launch.process, self._modules(lane))
            line = worker.line = WorkerConnection(process, answered=self._answered)
        self._workers[line] = worker
        self._by_socket[line.fileno] = line
        self._answers.register(line.fileno, select.POLLIN)
        line.send(
            Setup(
                arena=self._arena.size,
                models=tuple(lane.models.values()),
                cores=launch.cores,
                threads=launch.threads,
                cpu_limit=launch.cpu_limit,
                lent_by_kernel=launch.lent_by_kernel,
                board=self._lending.place(lane.name),
                fake=launch.fake,
                cuda=launch.cuda,
                groups=launch.groups,
                env=launch.env,
                # Lanes of one process serve while another loads. Nobody waits for a standby, and where nothing serves
                # yet, at the start of a server or after a takeover, loading disturbs nobody.
                background=(worker.standby or (fresh and self._serves())) and not launch.process,
                serve_first=not fresh and not worker.standby,
            )
        )
        if not worker.standby:
            self._hurry(line)
        failure = await line.started
        if not failure and (missing := sorted(lane.models.keys() - line.footprints.keys())):
            failure = f"it is ready without {', '.join(missing)}"
        if not failure and not worker.killed and not worker.standby:
            await self._partitions.started(lane.name, line.process.pid)
        # It may have died, or been killed, before this task resumed.
        if line.gone.done():
            return line.gone.result()
        return worker.killed or failure

    def _serves(self) -> bool:
        """Return whether any lane's worker is ready."""
        return any(worker.ready and not worker.standby for worker in self._workers.values())

    async def _retire(self, worker: LaneWorker, line: WorkerConnection, grace: float) -> None:
        """Stop a worker, and report its end once its process is gone and its memory free."""
        await line.stop(grace)
        if line in self._flights and not worker.over:  # its process, and so the batch, goes on for other lanes
            self.unfinished.add(worker.lane.name)
        self._exited([worker], line.gone.result() if line.gone.done() else f"it did not stop within {grace:g} s")

    async def _close_partition(self, lane: LaneId, incarnation: int) -> None:
        await self._partitions.close(lane)
        self._lanes.pop(lane, None)
        self._tell(PartitionClosed(lane, incarnation))

    def _left(self, lines: Sequence[WorkerConnection], reason: str) -> None:
        """Handle the end of workers, whether expected or not."""
        workers = [self._workers.pop(line) for line in lines]
        for line in lines:
            del self._by_socket[line.fileno]
            self._answers.unregister(line.fileno)
        for worker, line in zip(workers, lines, strict=True):
            if worker.standby:
                continue  # it has neither batch nor place on the lending board
            self._lending.clear(worker.lane.name)
            if self._flights.pop(line, None) is not None and not worker.over:
                self.unfinished.add(worker.lane.name)
        # Tasks that start or retire a worker report its end themselves.
        self._exited([worker for worker in workers if worker.ready and not worker.retiring], reason)

    def _exited(self, workers: Sequence[LaneWorker], reason: str) -> None:
        """Report the end of workers once, together."""
        ended = [worker for worker in workers if not worker.over]
        for worker in ended:
            worker.over = True
            if worker.standby and not worker.killed:
                logger.warning("the standby worker of %s ended: %s", worker.lane.name, reason)
        if ended:
            self._tell(WorkersExited(tuple((worker.lane.name, worker.incarnation) for worker in ended), reason))

    # Processes

    def _modules(self, lane: WorkerLane) -> frozenset[str]:
        """Return the modules that a lane's process needs, for the models of all lanes that share it."""
        process = lane.launch.process
        served = [each for each in self._lanes.values() if each.launch.process == process] if process else [lane]
        models = [(model, each.launch.fake) for each in served for model in each.models.values()]
        return frozenset(module for model, fake in models for module in runners.modules_of(model, fake=fake))

    def keep_warm(self) -> None:
        """Keep processes pre-started for lanes like the present ones."""
        self.processes.keep_warm(
            {WorkerTemplate(bool(lane.launch.process), self._modules(lane)) for lane in self._lanes.values()}
        )

    @property
    def warm_workers(self) -> int:
        """Return the number of pre-started processes."""
        return self.processes.warm

    # Batches

    def run(self, lane: LaneId, batch: int, model: str, payloads: Sequence[Payload]) -> None:
        """Give a lane its next batch: the input tensors of each request. The lane must be idle and its worker ready. A
        batch given to a worker whose death was not reported yet is lost with it. Raises WorkerError for a lane that
        cannot take the batch."""
        kept: list[object] = []
        self.run_parts(
            lane,
            batch,
            model,
            [[tensor_part(tensor, self._arena, kept) for tensor in payload] for payload in payloads],
            kept,
        )

    def run_parts(
        self, lane: LaneId, batch: int, model: str, requests: list[list[TensorPart]], kept: list[object]
    ) -> None:
        """Give a lane its next batch, as `run` does. requests: as they go to the worker. kept: what must stay in memory
        meanwhile."""
        held = self._lanes.get(lane)
        worker = None if held is None else held.worker
        if (
            held is None
            or worker is None
            or not worker.ready
            or worker.line in self._flights
            or model not in held.models
        ):
            raise WorkerError(f"lane '{lane}' cannot take batch {batch}: {why_not(held, model)}")
        line = worker.line
        if worker.over or line is None:
            self.unfinished.add(lane)
            return
        rows = sum([parts[0].shape[0] for parts in requests]) if held.models[model].batched else len(requests)
        room = None
        if (size := rows * line.footprints[model]) >= LARGE:
            room = self._arena.allocate(size)
        line.send(RunBatch(batch, model, requests, (room.offset, room.size) if room else (0, 0)))
        self._flights[line] = Flight(batch, model, rows, time.monotonic(), kept, room, len(requests))
        self._lending.has_work(lane, True)

    def poll(self) -> None:
        """Receive the answers that have arrived. The event loop does so too, but only after all callers that have data:
        under overload, lanes would wait for it and run nothing."""
        for socket, _ in self._answers.poll(0):
            line = self._by_socket.get(socket)  # None: what came before has ended it
            if line is not None:
                line.receive()

    def busy(self) -> Iterator[WorkerBusy]:
        """Yield the batches in flight."""
        for line, flight in list(self._flights.items()):
            worker = self._workers[line]
            batch = f"a batch of {flight.rows} of {flight.model!r}"
            yield WorkerBusy(worker.lane.name, worker.incarnation, flight.since, batch)

    def _answered(self, line: WorkerConnection, answer: BatchResult, size: int) -> None:
        """Take the answer of a worker. Raises WorkerError where it answers what it was not asked."""
        flight = self._flights.get(line)
        if flight is None or (answer.batch, len(answer.requests)) != (flight.batch, flight.requests):
            raise WorkerError(f"it answered batch {answer.batch}, which it was not given so")
        answers: list[Payload | RequestError] | None = None
        if self._forward is None or not is_inline(answer):
            answers = [
                FailedError(parts)
                if isinstance(parts, str)
                else tuple([tensor_of(part, flight.room) for part in parts])
                for parts in answer.requests
            ]
        del self._flights[line]
        worker = self._workers[line]
        if worker.over:
            return  # nobody waits for it any more
        if worker.resize_due:
            self._send_resize(worker, line)
        self._tell_answer(worker, line, flight, answer, answers, size)
        if line not in self._flights:  # else it has its next batch already, and was at work all the time
            self._lending.has_work(worker.lane.name, False)

    def _tell_answer(
        self,
        worker: LaneWorker,
        line: WorkerConnection,
        flight: Flight,
        answer: BatchResult,
        answers: Sequence[Payload | RequestError] | None,
        size: int,
    ) -> None:
        """Tell the listener what a worker has answered. answers: None where they are forwarded as they are."""
        lane = worker.lane
        if worker.sample_due:
            self._sample(worker, line)
        if size >= LARGE:
            rows = max(flight.rows, 1)
            known = line.footprints[flight.model]
            line.footprints[flight.model] = max(known, -(-output_size(answer) // rows))  # leave more to the next
        reasons = [parts for parts in answer.requests if isinstance(parts, str)]
        if reasons and len(reasons) == len(answer.requests):
            self._batches.failed(lane.name, flight.batch, reasons[0])
            return
        if answers is None:
            assert self._forward is not None
            self._forward.answered(lane.name, answer)
        else:
            self._batches.finished(lane.name, flight.batch, answers, answer.timing)

    # Observation

    def pid(self, lane: LaneId) -> int | None:
        """Return the process id of a lane's worker; None unless it is ready."""
        process = self._lanes[lane].process if lane in self._lanes else None
        return None if process is None else process.pid

    def memory(self, lane: LaneId) -> int:
        """Return 0: `process.private_memory` reads it of the lane's process, and takes too long for the event loop."""
        return 0

    def audit(self, lane: LaneId) -> ShareAudit | None:
        """Return the audit of a lane's CPU use; None where its share is not of CPU time."""
        return self._lanes[lane].audit if lane in self._lanes else None

    def shares_process(self, lane: LaneId) -> bool:
        """Return whether the lane's process may serve other lanes."""
        return lane in self._lanes and bool(self._lanes[lane].launch.process)

    def sample(self) -> None:
        """Sample the CPU time of all workers; of a busy one, when its batch ends. Also reclaim dropped memory, which
        otherwise only the next request would."""
        self._arena.reclaim()
        for line, worker in self._workers.items():
            worker.sample_due = line in self._flights
            if not worker.sample_due:
                self._sample(worker, line)

    def _sample(self, worker: LaneWorker, line: WorkerConnection) -> None:
        worker.sample_due = False
        audit = worker.lane.audit
        serves = worker.ready and not worker.retiring and not worker.over and not worker.standby
        if audit is not None and serves and (used := cpu_time(line.process.pid)) is not None:
            audit.sample(used, time.monotonic())
