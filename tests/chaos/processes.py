"""Worker processes of the harness: they speak the workers' protocol over real sockets, and break it when told to.

`Machine.popen` takes the place of `subprocess.Popen`. A worker repeats its inputs as its outputs, after a time that
follows from the batch. What it does wrong is said before it happens (`Machine.batch_faults`, `Machine.start_faults`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.worker.arena import Arena
from cotenant.worker.wire import (
    BatchResult,
    Inbox,
    Resize,
    RunBatch,
    Setup,
    TensorPart,
    Timing,
    ToWorker,
    WorkerBroken,
    WorkerClosed,
    WorkerReady,
    aligned,
    encode_message,
)

if TYPE_CHECKING:
    from tests.chaos.clock import VirtualLoop

BOOT, LOAD = 0.31, 0.17  # seconds until a process reads its first message, and until a lane is loaded
WIDTH = {"small": 8, "large": 6000}  # bytes of a row: three rows of the second go through the arena
FIRST_PID = 1 << 23  # larger than any that the system gives
_decoder = msgspec.msgpack.Decoder(ToWorker)
_TIMING = Timing(0, 0, 0, 0, 0, 0)


class Machine:
    """What workers run on. batch_faults, start_faults: by device, what goes wrong next, each with its seconds.
    refusals: processes that the system will not start. undying: until when killed processes stay. standbys: a lane may
    have a second worker, which gets no batch. places: models that a device has memory for; None: any number."""

    def __init__(self, loop: VirtualLoop, problem: Callable[[str], None]) -> None:
        self.loop = loop
        self.problem = problem
        self.arena: Arena
        self.processes: list[Process] = []
        self.batch_faults: dict[DeviceId, deque[tuple[str, float]]] = {}
        self.start_faults: dict[DeviceId, deque[str]] = {}
        self.refusals = 0
        self.undying = 0.0
        self.lost: dict[DeviceId, str] = {}
        self.standbys = False
        self.places: int | None = None
        self._started = 0

    def popen(self, command: Sequence[str], **options: Any) -> Process:
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self._started += 1
        self.processes = [process for process in self.processes if process.alive]
        process = Process(self, FIRST_PID + self._started, command, options["stdin"], options["stdout"])
        self.processes.append(process)
        return process

    def sessions(self) -> list[Session]:
        return [session for process in self.processes if process.alive for session in process.sessions]

    def begin(self, session: Session) -> None:
        """Check that nobody else serves the lane of a session but perhaps a standby, and that there is memory."""
        others = self.others(session)
        if len(others) > self.standbys:
            self.problem(f"{session.lane} is served by {1 + len(others)} workers")
        there = [each for each in self.sessions() if each.lane.device == session.lane.device and each.serves(each.lane)]
        if self.places is not None and sum(each.models for each in there) > self.places:
            self.problem(f"{session.lane.device} has no room for {sorted(each.lane for each in there)}")

    def others(self, session: Session) -> list[Session]:
        """The other workers of a session's lane."""
        return [each for each in self.sessions() if each is not session and each.serves(session.lane)]

    def next_batch_fault(self, device: DeviceId) -> tuple[str, float]:
        faults = self.batch_faults.get(device)
        return faults.popleft() if faults else ("", 0.0)

    def next_start_fault(self, device: DeviceId) -> str:
        faults = self.start_faults.get(device)
        return faults.popleft() if faults else ""


class Process:
    """Stands for a `subprocess.Popen` of a worker."""

    def __init__(self, machine: Machine, pid: int, command: Sequence[str], stdin: int, stdout: int) -> None:
        self.machine = machine
        self.pid = pid
        self.alive = True
        self.killed = False
        self.returncode: int | None = None
        self.sessions: list[Session] = []
        self._connection = socket.socket(fileno=os.dup(stdin))
        self._connection.setblocking(False)
        self._output = os.dup(stdout)
        self._shared = "shared" in command
        self._warm = "cotenant.worker.prestart" in command
        # No two start at the same moment, and none takes as long as another.
        machine.loop.call_later(BOOT + 1e-4 * (pid % 97), self._boot)

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if not self.alive:
            return
        self.killed = True
        loop = self.machine.loop
        if loop.now < self.machine.undying:
            loop.call_at(self.machine.undying, self.exit, -9)
        else:
            self.exit(-9)

    def exit(self, status: int, words: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        if words:
            with contextlib.suppress(OSError):
                os.write(self._output, words.encode() + b"\n")
        for session in self.sessions:
            session.close()
        self._close()
        os.close(self._output)
        self.returncode = status

    def hang_up(self) -> None:
        """Close all sockets, and stay."""
        for session in self.sessions:
            session.close()
        self._close()

    def _close(self) -> None:
        if self._connection.fileno() >= 0:  # it is the session's, too, where there is only one
            self.machine.loop.remove_reader(self._connection)
            self._connection.close()

    def left(self, session: Session) -> None:
        """A lane ended in good order."""
        self.sessions.remove(session)
        session.close()
        if not self._shared:
            self.exit(0)

    def _boot(self) -> None:
        if not self.alive:
            return
        if self._warm:
            with contextlib.suppress(OSError):
                self._connection.send(b"\0")
        if self._connection.fileno() < 0:
            return
        if self._shared:
            self.machine.loop.add_reader(self._connection, self._accept)
        else:
            self.sessions.append(Session(self, self._connection))

    def _accept(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._connection, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if fds:
            self.sessions.append(Session(self, socket.socket(fileno=fds[0])))
        elif not data:
            self.exit(0)


class Session:
    """One lane in a process."""

    def __init__(self, process: Process, connection: socket.socket) -> None:
        self.process = process
        self.machine = process.machine
        self.lane = LaneId(DeviceId("none"), 0)
        self.ready = False
        self.running: RunBatch | None = None
        self._loop = process.machine.loop
        self._connection = connection
        self._connection.setblocking(False)
        self._inbox = Inbox(connection)
        self._ended = False
        self._closed = False
        self._setup: Setup | None = None
        self._unsent = bytearray()
        self._loop.add_reader(connection, self._receive)

    def serves(self, lane: LaneId) -> bool:
        """A worker that cannot die, or whose device is lost, is nobody's fault."""
        excused = self.process.killed or lane.device in self.machine.lost
        return self.lane == lane and not self._closed and not self._ended and not excused

    @property
    def models(self) -> int:
        return 0 if self._setup is None else len(self._setup.models)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()

    def send(self, data: bytes | bytearray) -> None:
        if self._closed:
            return
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self._unsent)  # the server is gone
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._connection, self._flush)
        else:
            self._loop.remove_writer(self._connection)

    def _receive(self) -> None:
        try:
            self._ended = not self._inbox.fill()
        except BlockingIOError:
            return
        except OSError:
            self._ended = True
        while not self._closed and (data := self._inbox.take()) is not None:
            self._take(_decoder.decode(data))
        if self._ended and not self._closed:
            self._loop.remove_reader(self._connection)
            if self.running is None:
                self._finish()

    def _finish(self) -> None:
        self.send(encode_message(WorkerClosed()))
        self.process.left(self)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Setup():
                self._setup = message
                self.lane = LaneId.parse(message.env["LANE"])
                self.machine.begin(self)
                fault = self.machine.next_start_fault(self.lane.device)
                if fault != "never":
                    self._loop.call_later(LOAD * (20 if fault == "slow" else 1), self._loaded, fault)
            case RunBatch():
                if self.running is not None or not self.ready:
                    self.machine.problem(f"{self.lane} got a batch while it was at work, or not ready")
                if any(other.running is not None for other in self.machine.others(self)):
                    self.machine.problem(f"{self.lane} got a batch while another worker of it was at work")
                self._run(message)
            case Resize():
                if self.running is not None:
                    self.machine.problem(f"{self.lane} was told of another share amid a batch")

    def _loaded(self, fault: str) -> None:
        if self._closed or self._setup is None:
            return
        match fault:
            case "broken":
                self.send(encode_message(WorkerBroken("the model cannot be loaded")))
                self.process.left(self)
                return
            case "exits":
                self.process.exit(1, "MemoryError")
                return
            case "garbage":
                self.send(b"\x05\0\0\0\0\0\0\0hello")
                return
        self.ready = True
        # As `WorkerReady` of a real one: bytes that the outputs of one row take.
        ready = encode_message(WorkerReady({model.name: aligned(WIDTH["large"]) for model in self._setup.models}))
        self.send(ready * (2 if fault == "twice" else 1))

    def _run(self, run: RunBatch) -> None:
        self.running = run
        fault, more = self.machine.next_batch_fault(self.lane.device)
        rows = sum(parts[0].shape[0] for parts in run.requests)
        seconds = 0.009 * rows * (1 + 0.3 * (run.batch * 0.6180339887 % 1))
        match fault:
            case "die":
                self._loop.call_later(seconds / 2, self.process.exit, -11, "Segmentation fault")
            case "closes":
                self._loop.call_later(seconds / 2, self.process.hang_up)
            case "stall":
                pass
            case _:
                seconds += more if fault == "slow" else 0.0
                self._loop.call_later(seconds, self._answer, run, fault)

    def _answer(self, run: RunBatch, fault: str) -> None:
        if self._closed:
            return
        self.running = None
        answers: list[list[TensorPart] | str] = [*self._outputs(run)]
        batch = run.batch
        match fault:
            case "other-batch":
                batch += 1
            case "too-few":
                answers = answers[:-1]
            case "too-many":
                answers *= 2
            case "outside":
                answers = [[TensorPart("y", "UINT8", (1, 8), None, 1 << 40, 8)] for _ in answers]
            case "fails":
                answers = ["the model failed"] * len(answers)
            case "fails-partly":
                answers[0] = "the model failed on it"
        data = encode_message(BatchResult(batch, answers, _TIMING))
        match fault:
            case "twice":
                data *= 2
            case "garbage":
                data = bytearray(b"\x03\0\0\0\0\0\0\0\xc1\xc1\xc1")
            case "endless":
                data = bytearray(b"\xff" * 9)
            case "pieces" | "piece-and-die":
                self.send(data[:11])
                if fault == "pieces":
                    self._loop.call_later(0.05, self.send, data[11:])
                else:
                    self._loop.call_later(0.05, self.process.exit, -9)
                data = bytearray()
        self.send(data)
        if self._ended and not self._closed:
            self._finish()

    def unasked(self, how: str) -> None:
        """Say something that nobody asked for."""
        words = {
            "answer": encode_message(BatchResult(1, [], _TIMING)),
            "ready": encode_message(WorkerReady({})),
            "closed": encode_message(WorkerClosed()),
        }
        self.send(words.get(how, b"\0" * 24))

    def _outputs(self, run: RunBatch) -> list[list[TensorPart]]:
        """Repeat the inputs: in the room that is given as long as they fit, else inline."""
        memory = memoryview(self.machine.arena._memory)
        start, size = run.room
        end, outputs = start + size, []
        for (part,) in run.requests:
            data = memory[part.start : part.start + part.size] if part.data is None else part.data
            if start + aligned(len(data)) <= end:
                memory[start : start + len(data)] = data
                outputs.append([TensorPart("y", part.datatype, part.shape, None, start, len(data))])
                start += aligned(len(data))
            else:
                outputs.append([TensorPart("y", part.datatype, part.shape, memoryview(bytes(data)))])
        return outputs
