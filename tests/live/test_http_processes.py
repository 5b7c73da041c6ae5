"""HTTP processes: what goes between them and the server's process, and what admission publishes.

`test_http` holds them to the answers of the front end in the server's process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest

from cotenant.app import http_process
from cotenant.core.tensor import Tensor, TensorSpec
from cotenant.errors import UnavailableError, WorkerError
from cotenant.live.access import Access, Caller, Permission, Role
from cotenant.live.http import HttpServer, request_cycle
from cotenant.live.http_processes import link, supervisor
from cotenant.live.http_processes.board import FRESH, SIZE, UNKNOWN, Board
from cotenant.live.http_processes.loans import Borrower, Lender
from cotenant.live.http_processes.messages import ToServer, Unread, error_of, failure
from cotenant.live.http_processes.publisher import AdmissionPublisher
from cotenant.live.http_processes.remote_core import WINDOW
from cotenant.live.http_processes.session import HttpProcessSession
from cotenant.live.http_processes.supervisor import SILENCE, STARTING, HttpProcesses
from cotenant.live.limits import MAX_AT_ONCE, Limits
from cotenant.worker.arena import Arena, Block
from cotenant.worker.wire import LARGE, TensorPart
from tests.live.remote import Remote, StubLoop
from tests.live.stub import StubCore
from tests.live.test_http import ONE, Answer, Wire, ask, infer, request


@pytest.fixture
def remote(core: StubCore) -> Remote:
    return Remote(core)


@pytest.fixture
def wire(remote: Remote) -> Wire:
    return Wire(remote.server)


HELD = infer(ONE, path="/v2/models/held/infer")


def large(model: str = "identity") -> bytes:
    data = bytes(4 * LARGE)
    tensor = {"name": "x", "shape": [1, LARGE], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    path = f"/v2/models/{model}/infer"
    return request("POST", path, head + data, Inference_Header_Content_Length=str(len(head)))


def message_of(answer: Answer) -> str:
    return str(answer.json["error"])


# Processes

BREAKS = "socket.socket(fileno=0).send(bytes([3, *bytes(7)]) + b'abc')"
LEAVES = "socket.socket(fileno=0).close()"
EXITS = """
connection, data = socket.socket(fileno=0), b""
while bytes([0x92, 12]) not in data:  # until a `Drain`
    data += connection.recv(1 << 16)
raise SystemExit(3)"""


class Processes:
    """HTTP processes of which each does no more than what it is told, and then waits until it is killed. lost: set once
    one is not heard of any more. ended: how the processes had ended when their memory was returned; None: not yet."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.lost = asyncio.Event()
        self.ended: list[int | None] = []
        self.spawned: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        patch.chdir(folder)
        patch.setattr(supervisor, "EXIT", 60.0)
        cancel, close, spawn = HttpProcessSession.cancel, HttpProcessSession.close, HttpProcesses._spawn

        def cancelled(session: HttpProcessSession) -> None:
            cancel(session)
            self.lost.set()

        def closed(session: HttpProcessSession) -> None:
            self.ended.append(self.spawned[0].returncode)
            close(session)

        def spawned(http_processes: HttpProcesses, place: Any) -> Any:
            process, connection = spawn(http_processes, place)
            self.spawned.append(process)
            return process, connection

        patch.setattr(HttpProcessSession, "cancel", cancelled)
        patch.setattr(HttpProcessSession, "close", closed)
        patch.setattr(HttpProcesses, "_spawn", spawned)

    @asynccontextmanager
    async def run(
        self, core: StubCore, does: str, count: int = 1, clock: Callable[[], float] = monotonic
    ) -> AsyncIterator[HttpProcesses]:
        (self._folder / "told.py").write_text(f"import signal, socket\nsignal.alarm(60)\n{does}\nsignal.pause()\n")
        http_processes = HttpProcesses(
            core,
            core.arena,
            count,
            "told",
            HttpServer(core).handler,
            limits=Limits(memory=1 << 20),
            access=Access(),
            tls=None,
            log_level="info",
            log_format="text",
            log_access=False,
            clock=clock,
        )
        try:
            async with asyncio.timeout(20):
                await http_processes.listen("127.0.0.1", 0)
                yield http_processes
                await http_processes.stop(0)
        finally:
            for process in self.spawned:
                process.kill()
                process.wait()


def test_http_process_that_breaks_the_protocol_is_killed_at_once_and_its_memory_returned_thereafter(
    core: StubCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def watch() -> None:
        processes = Processes(tmp_path, monkeypatch)
        async with processes.run(core, BREAKS) as http_processes:
            await processes.lost.wait()
            await asyncio.gather(*http_processes._ending)
            monkeypatch.setattr(supervisor, "EXIT", 0.0)
        assert processes.ended[0] == -signal.SIGKILL

    asyncio.run(watch())
    assert "HTTP process 0 died: it broke the protocol" in caplog.text


def test_http_process_that_is_being_replaced_when_the_server_stops_is_killed_and_reaped(
    core: StubCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop() -> None:
        processes = Processes(tmp_path, monkeypatch)
        async with processes.run(core, LEAVES):
            await processes.lost.wait()
        assert [process.returncode for process in processes.spawned] == [-signal.SIGKILL]
        assert processes.ended == [-signal.SIGKILL]

    asyncio.run(stop())


def test_http_processes_end_also_while_no_thread_is_free(
    core: StubCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop() -> None:
        processes = Processes(tmp_path, monkeypatch)
        loop, answered = asyncio.get_running_loop(), threading.Event()
        try:
            async with processes.run(core, EXITS, count=3):
                loop.set_default_executor(ThreadPoolExecutor(1))
                loop.run_in_executor(None, answered.wait)
        finally:
            answered.set()
        assert [process.returncode for process in processes.spawned] == [3] * 3

    asyncio.run(stop())


@pytest.mark.parametrize(("beats", "patience"), [(True, SILENCE), (False, STARTING)])
def test_http_process_that_falls_silent_is_replaced_but_not_where_the_server_was_frozen(
    core: StubCore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    beats: bool,
    patience: float,
) -> None:
    now = 1000.0

    async def watch() -> None:
        nonlocal now
        processes = Processes(tmp_path, monkeypatch)
        async with processes.run(core, "", clock=lambda: now) as http_processes:
            (process,) = processes.spawned
            if beats:
                http_processes._board.beat(0, now)
            now += 10 * patience  # for which nobody has looked
            http_processes._watch()
            for _ in range(int(patience)):
                now += 1
                http_processes._watch()
            assert "sign of life" not in http_processes._places[0].verdict and process.poll() is None
            now += 1
            http_processes._watch()
            await processes.lost.wait()
            await asyncio.gather(*http_processes._ending)
            assert process.returncode == -signal.SIGKILL

    asyncio.run(watch())
    assert f"HTTP process 0 died: it gave no sign of life for {patience:g} s" in caplog.text


def test_http_process_gets_what_openssl_reads_and_no_secrets(
    core: StubCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENSSL_CONF", str(tmp_path / "openssl.cnf"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    tells = (
        "import json, os\nopen('environment', 'w').write(json.dumps(dict(os.environ)))\nsocket.socket(fileno=0).close()"
    )

    async def start() -> None:
        processes = Processes(tmp_path, monkeypatch)
        async with processes.run(core, tells):
            await processes.lost.wait()

    asyncio.run(start())
    environment = json.loads((tmp_path / "environment").read_text())
    assert environment["OPENSSL_CONF"] == str(tmp_path / "openssl.cnf")
    assert "AWS_SECRET_ACCESS_KEY" not in environment


def test_http_process_of_another_version_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_process, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(sys, "argv", ["http_process", "3", "1", "1", "0.0.0"])
    with pytest.raises(SystemExit, match=r"the server runs 0\.0\.0: it was upgraded meanwhile"):
        http_process.main()


# Models


def test_requests_for_a_model_that_is_looked_up_wait_for_one_answer(remote: Remote) -> None:
    remote.busy = True
    wires = [Wire(remote.server) for _ in range(3)]
    for wire in wires:
        wire.say(infer(ONE))
    remote.go_on()
    assert [answer.status for wire in wires for answer in wire.answers] == [200] * 3
    assert remote.frames[0] == 1 + 3  # one question, three requests


def test_model_that_changes_is_looked_up_again(core: StubCore, remote: Remote, wire: Wire) -> None:
    assert ask(wire, infer(ONE)).status == 200
    core.models["identity"] = msgspec.structs.replace(
        core.models["identity"], inputs=(TensorSpec("other", "FP32", (-1, -1)),)
    )
    remote.board.change_models()
    assert "takes each of 'other'" in message_of(ask(wire, infer(ONE)))
    assert ask(wire, infer(ONE | {"name": "other"})).status == 200


def test_request_on_its_way_while_its_model_changes_is_checked_again(
    core: StubCore, remote: Remote, wire: Wire
) -> None:
    assert ask(wire, infer(ONE)).status == 200
    remote.busy = True
    wire.say(infer(ONE))
    core.models["identity"] = msgspec.structs.replace(
        core.models["identity"], inputs=(TensorSpec("x", "FP32", (-1, 5)),)
    )
    remote.board.change_models()
    served = len(core.requests)
    remote.go_on()
    assert "has shape [1, 3]" in message_of(wire.answers[-1])
    assert len(core.requests) == served


class Threads:
    """Threads whose work is done when the test says so, in place of `run_in_thread`."""

    def __init__(self) -> None:
        self._works: list[Callable[[], None]] = []

    def __call__(self, then: Callable[[Any], None], work: Callable[..., Any], *args: Any, executor: Any = None) -> None:
        def done() -> None:
            future: Future[Any] = Future()
            try:
                future.set_result(work(*args))
            except Exception as error:  # noqa: BLE001  # the future has it
                future.set_exception(error)
            then(future)

        self._works.append(done)

    def end(self) -> int:
        """Do all the work, also what comes of it; return how much it was."""
        count = 0
        while self._works:
            self._works.pop()()
            count += 1
        return count


@pytest.mark.parametrize("processes", [1, 2])
def test_model_that_changes_while_long_json_is_read_is_checked_again(
    core: StubCore, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    threads = Threads()
    monkeypatch.setattr(request_cycle, "run_in_thread", threads)
    remote = Remote(core)
    wire = Wire(HttpServer(core) if processes == 1 else remote.server)
    assert ask(wire, infer(ONE)).status == 200
    rows = MAX_AT_ONCE // 4
    long = infer({"name": "x", "shape": [rows, 1], "datatype": "FP32", "data": [1.5] * rows})
    before = msgspec.structs.replace(core.models["identity"], max_batch_size=rows)
    narrow = msgspec.structs.replace(before, inputs=(TensorSpec("x", "FP32", (-1, 7)),))
    core.models["identity"] = before
    remote.board.change_models()

    def ask_while(change: Callable[[], None]) -> tuple[Answer, int]:
        served = len(core.requests)
        wire.say(long)
        change()
        remote.board.change_models()
        assert threads.end()
        return wire.answers[-1], len(core.requests) - served

    assert ask_while(lambda: None)[1] == 1
    answer, served = ask_while(lambda: core.models.update(identity=narrow))
    assert f"has shape [{rows}, 1]" in message_of(answer) and not served
    core.models["identity"] = before
    answer, served = ask_while(lambda: core.unloaded.add("identity"))
    assert answer.status == 404 and not served


def test_unloaded_model_is_unknown_at_once(core: StubCore, remote: Remote, wire: Wire) -> None:
    assert ask(wire, infer(ONE)).status == 200
    core.unloaded.add("identity")
    remote.board.change_models()
    assert ask(wire, infer(ONE)).status == 404


# Requests and answers


def test_requests_of_one_round_travel_in_one_frame(core: StubCore) -> None:
    loop = StubLoop(ends=False)
    remote = Remote(core, loop=loop)
    wires = [Wire(remote.server) for _ in range(20)]
    wires[0].say(infer(ONE))
    loop.end()
    before = list(remote.frames)
    for wire in wires:
        wire.say(infer(ONE))
    loop.end()
    assert [after - then for after, then in zip(remote.frames, before, strict=True)] == [1, 1]
    assert all(wire.answers[-1].status == 200 for wire in wires)


def test_what_a_busy_server_has_not_taken_is_waited_for(remote: Remote, core: StubCore) -> None:
    wires = [Wire(remote.server) for _ in range(3 * WINDOW)]
    assert ask(wires[0], infer(ONE)).status == 200
    before = remote.frames[0]
    remote.busy = True
    for wire in wires:
        wire.say(infer(ONE))
    remote.go_on()
    assert remote.frames[0] - before <= WINDOW + 1  # the others came together
    assert all(wire.answers[-1].status == 200 for wire in wires)


def test_caller_that_leaves_has_its_request_cancelled(core: StubCore, wire: Wire) -> None:
    wire.say(HELD)
    (handle,) = core.held
    wire.protocol.connection_lost(None)
    assert core.cancelled == [handle] and not core.held


def test_http_process_that_dies_has_its_requests_cancelled_and_its_memory_returned(
    core: StubCore, remote: Remote, wire: Wire
) -> None:
    free = core.arena.parts.free
    wire.say(large("held"))
    wire.say(HELD)
    handles = set(core.held)
    remote.session.cancel()
    assert set(core.cancelled) == handles and len(handles) == 2 and not core.held
    size = remote.part.size
    remote.session.close()
    remote.end()
    assert core.arena.parts.free == free  # workers may still read what it has received
    core.requests.clear()
    assert core.arena.parts.free == free + size


def test_what_an_http_process_was_lent_is_not_anothers_before_its_process_has_ended(
    core: StubCore, remote: Remote, wire: Wire
) -> None:
    assert ask(wire, infer(ONE)).status == 200
    free = core.arena.free
    block = core.arena.allocate(4 * LARGE)
    assert block is not None
    tensor = Tensor("y", "UINT8", (4 * LARGE,), block.view, block)
    remote.session._lender.parts(99, [tensor])
    del block, tensor
    remote.session.cancel()
    assert core.arena.free < free
    remote.session.close()
    assert core.arena.free == free


def test_time_on_the_way_counts_as_lost(core: StubCore, remote: Remote, wire: Wire) -> None:
    now = 100.0
    remote.core._clock = lambda: now
    remote.session._clock = lambda: now + 0.25
    assert [ask(wire, infer(ONE)).status for _ in range(2)] == [200, 200]
    assert core.lost[1] == 0.25  # the first has waited for its model besides


def test_errors_are_the_same_after_their_travel() -> None:
    error = error_of(failure(1, UnavailableError("full", retry_after=1.5)))
    assert type(error) is UnavailableError and str(error) == "full" and error.retry_after == 1.5


@pytest.mark.parametrize("direction", ["request", "answer"])
def test_request_or_answer_that_cannot_be_sent_ends_in_an_error_and_costs_no_other(
    core: StubCore, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    loop = StubLoop(ends=False)
    remote = Remote(core, loop=loop)
    wires = [Wire(remote.server) for _ in range(3)]
    for wire in wires:
        wire.say(infer(ONE))
    loop.end()
    sent = remote.core._outbox if direction == "request" else remote.session._outbox
    send, messages = sent.send, list[object]()

    def spoil(message: Any) -> None:
        messages.append(message)
        if len(messages) == 2:
            message.version = "\ud800"
        send(message)

    core.rooms["identity"] = 3, 1.0
    monkeypatch.setattr(sent, "send", spoil)
    for wire in wires:
        wire.say(infer(ONE))
    loop.end()
    assert [wire.answers[-1].status for wire in wires] == [200, 500, 200]
    loop.run_timers()
    loop.end()
    assert remote.board.room(remote.publisher.slot("identity"))[0] == 3  # what was not sent takes no room


def test_stream_of_events_goes_on_until_the_caller_leaves(core: StubCore) -> None:
    page = Page()
    wire = Wire(Remote(core, page=page).server)
    wire.say(HELD + request("GET", "/cotenant/events"))
    core.release()  # events that came before the answer to the first request follow it
    page.send(b"later\n")
    assert wire.got.endswith(b"\r\n\r\nfirst\nlater\n")
    wire.protocol.connection_lost(None)
    assert page.left == 1


def test_stream_whose_caller_has_left_before_it_began_is_ended(core: StubCore) -> None:
    page = Page()
    wire = Wire(Remote(core, page=page).server)
    wire.say(HELD + request("GET", "/cotenant/events"))
    wire.protocol.connection_lost(None)
    assert page.left == 1


class Page:
    """A feed of the page, with one listener."""

    def __init__(self) -> None:
        self.send: Callable[[bytes], None] = lambda data: None
        self.left = 0

    def admit(self) -> None:
        """Take anybody."""

    def subscribe(self, send: Callable[[bytes], None]) -> Callable[[], None]:
        self.send = send
        send(b"first\n")

        def leave() -> None:
            self.left += 1

        return leave


def test_control_is_for_callers_of_this_machine_also_through_an_http_process(core: StubCore, remote: Remote) -> None:
    here, elsewhere = Wire(remote.server), Wire(remote.server, peer="192.0.2.7")
    load = request("POST", "/v2/repository/models/identity/unload")
    assert ask(elsewhere, load).status == 403
    assert ask(here, request("POST", "/v2/logging", b'{"log_info":false}')).status == 200
    assert core.log["log_info"] is False


def test_host_and_origin_are_checked_also_through_an_http_process(core: StubCore, wire: Wire) -> None:
    unload, changed = "/v2/repository/models/identity/unload", b'{"log_info":false}'
    assert ask(wire, request("POST", unload).replace(b"localhost", b"attacker.example")).status == 403
    assert ask(wire, request("POST", unload, Origin="https://attacker.example")).status == 403
    assert not core.unloaded
    assert ask(wire, request("POST", "/v2/logging", changed, Origin="http://localhost")).status == 200


def test_access_by_digests_is_that_by_tokens() -> None:
    access = Access({Role.INFER: ["a-token-of-sixteen"]}, control="any")
    same = Access.from_digests(access.digests, control=access.control)
    same.check(Permission.INFER, Caller(peer="192.0.2.7", authorization="Bearer a-token-of-sixteen"))
    assert same.authenticates and not same.is_free(Permission.INFER)


# Memory


def test_large_tensor_crosses_without_a_copy_and_comes_back(core: StubCore, remote: Remote, wire: Wire) -> None:
    free, theirs = core.arena.free, remote.region.free
    for _ in range(3):
        answer = ask(wire, large())
        assert answer.status == 200 and len(answer.body) > 4 * LARGE
    taken = core.requests[-1].inputs[0]
    assert taken.block is not None and remote.part.offset <= taken.block.offset + taken.start  # type: ignore[attr-defined]
    del taken
    core.requests.clear()
    assert (core.arena.free, remote.region.free) == (free, theirs)


def test_tensor_without_room_is_refused(remote: Remote, wire: Wire, core: StubCore) -> None:
    assert ask(wire, infer(ONE)).status == 200
    full = remote.region.allocate(remote.region.free)
    answer = ask(wire, large())
    assert answer.status == 503 and "too much memory" in message_of(answer)
    del full
    assert ask(wire, large()).status == 200


class CallsAtOnce:
    def call_soon(self, callback: Callable[..., object], /, *args: Any) -> None:
        callback(*args)

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> None:
        callback(*args)

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> None:
        callback(*args)


@pytest.mark.parametrize(("start", "size"), [(-1, 10), (0, 1 << 30), (1 << 40, 1), (0, -1)])
def test_tensor_elsewhere_is_not_the_protocol(start: int, size: int) -> None:
    arena = Arena(1 << 20)
    part = arena.allocate(1 << 16)
    assert part is not None
    borrower = Borrower(part, CallsAtOnce(), lambda number: None)
    with pytest.raises(WorkerError, match="has no room"):
        borrower.tensors(1, [TensorPart("x", "UINT8", (1,), None, start, size)])
    arena.close()


def test_what_is_lent_stays_until_it_is_returned() -> None:
    arena = Arena(1 << 20)
    free, returned = arena.free, list[int]()
    lender = Lender(arena.allocate)
    data = bytes(range(256)) * (LARGE // 128)
    parts = lender.parts(7, [Tensor("x", "UINT8", (len(data),), data), Tensor("y", "UINT8", (1,), b"a")])
    whole = arena_block(arena)
    borrowed = Borrower(whole, CallsAtOnce(), returned.append).tensors(7, parts)
    assert len(lender) == 1 and [bytes(tensor.data) for tensor in borrowed] == [data, b"a"]
    view = borrowed[0].data
    del borrowed
    assert returned == []  # a view on it is enough
    del view
    assert returned == [7] and arena.free < free
    lender.returned(returned)
    assert arena.free == free and not lender
    arena.close()


def arena_block(arena: Arena) -> Block:
    return Block(0, arena.size, memoryview(arena._memory))


# Admission


class Rounds:
    """A loop whose rounds end in `end`."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []

    def time(self) -> float:
        return monotonic()

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self.soon.append(callback)

    def end(self) -> None:
        while self.soon:
            self.soon.pop()()


def ask_in_a_round(wire: Wire, loop: Rounds, data: bytes) -> Answer:
    wire.say(data)
    loop.end()
    return wire.answers[-1]


@pytest.fixture
def loop(remote: Remote) -> Rounds:
    loop = Rounds()
    remote.server.shedder.attach(loop)
    return loop


def test_request_without_room_is_rejected_and_goes_no_further(
    core: StubCore, remote: Remote, wire: Wire, loop: Rounds
) -> None:
    core.rooms["identity"] = 2, 1.0
    statuses = [ask_in_a_round(wire, loop, infer(ONE)).status for _ in range(5)]
    assert statuses == [200, 200, 200, 503, 503]  # the first told of the room that is left after it
    assert (len(core.requests), core.unread) == (3, [])
    remote.loop.run_timers()
    assert [model for model, _ in core.unread] == ["identity"] * 2
    assert ask_in_a_round(wire, loop, infer(ONE)).status == 200  # published again meanwhile


def test_request_with_a_timeout_of_its_own_is_left_to_the_server(core: StubCore, wire: Wire, loop: Rounds) -> None:
    core.rooms["identity"] = 0, 0.0
    statuses = [ask_in_a_round(wire, loop, infer(ONE, parameters={"timeout": 9_000_000})).status for _ in range(3)]
    assert statuses == [200, 200, 200]


def test_request_that_has_lost_too_much_is_rejected(core: StubCore, remote: Remote, wire: Wire, loop: Rounds) -> None:
    core.rooms["identity"] = 9, 0.2
    assert ask_in_a_round(wire, loop, infer(ONE)).status == 200
    assert not remote.core.would_reject("identity", "1", 0.1)
    assert remote.core.would_reject("identity", "1", 0.3)


def test_server_that_is_behind_counts_as_lag(core: StubCore, remote: Remote, wire: Wire) -> None:
    now = 100.0
    remote.core._clock = lambda: now
    assert ask(wire, infer(ONE)).status == 200 and remote.core.lag == 0
    remote.busy = True
    wire.say(infer(ONE))
    now = 100.3
    assert remote.core.lag == pytest.approx(0.3)
    shedder = remote.server.shedder
    shedder.attach(Rounds())
    assert shedder.read() and shedder.lag >= 0.3 - 1e-9  # of two times since the machine started
    assert shedder.lost == pytest.approx(shedder.lag - 0.3)  # what is on its way is counted when it arrives
    remote.go_on()
    assert remote.core.lag == 0


def test_http_process_goes_on_where_more_frames_were_taken_than_it_has_sent(remote: Remote, wire: Wire) -> None:
    remote.board.take_frame(0)
    assert remote.core.lag == 0
    assert ask(wire, infer(ONE)).status == 200
    now = 100.0
    remote.core._clock = lambda: now
    remote.busy = True
    wire.say(infer(ONE))
    now += 1
    assert remote.core.lag == 1  # counted aright thereafter


def test_link_carries_more_than_its_socket_takes_at_once_and_ends_with_what_is_no_message() -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair()
        found: list[Unread] = []
        ends: list[str] = []
        arrived, ended = asyncio.Event(), asyncio.Event()

        def lost(reason: str) -> None:
            ends.append(reason)
            ended.set()

        one = link.Link[Unread](ours, ToServer, found.append, taken=arrived.set, lost=ends.append)
        other = link.Link[Unread](theirs, ToServer, found.append, taken=arrived.set, lost=lost)
        sent = Unread("m", [0.5] * 1_000_000)
        (frame,) = link.encode_frames([sent], fail)
        size = len(frame)
        one.write(frame)
        assert 0 < len(frame) < size  # no copy of the rest, at this turn or a later one
        await asyncio.wait_for(arrived.wait(), 10)
        assert found == [sent] and not frame
        one.write(bytearray(b"\x03" + bytes(7) + b"abc"))
        await asyncio.wait_for(ended.wait(), 10)
        assert "broke the protocol" in ends[0]
        other.close()
        one.close()

    asyncio.run(talk())


def test_board_knows_what_all_http_processes_have_sent() -> None:
    view = memoryview(bytearray(SIZE))
    server, one, other = (Board(view, 2, clock=lambda: 0.0) for _ in range(3))
    assert one.room(3) == (UNKNOWN, 0.0)
    one.send(0, 3, 4)
    server.publish(3, 10, 0.5, heard=4)
    assert one.room(3) == (10, 0.5)
    one.send(0, 3, 2)
    other.send(1, 3, 5)
    assert one.room(3) == other.room(3) == (3, 0.5)
    other.send(1, 3, 9)
    assert one.room(3)[0] == 0
    assert one.room(2) == (UNKNOWN, 0.0)
    server.publish(3, UNKNOWN, 0.0, heard=20)
    assert one.room(3)[0] == UNKNOWN
    server.clear(1)
    server.publish(3, 10, 0.5, heard=6)
    assert one.room(3)[0] == 10


def test_full_model_that_nobody_has_asked_for_is_passed_on_once() -> None:
    now = 100.0
    board = Board(memoryview(bytearray(SIZE)), 2, clock=lambda: now)
    board.publish(3, 0, 0.0, heard=0)
    assert board.room(3)[0] == 0
    now += 1.01 * FRESH
    assert board.room(3)[0] == UNKNOWN
    board.send(0, 3, 1)
    assert board.room(3)[0] == 0
    board.publish(3, 2, 0.0, heard=1)
    assert board.room(3)[0] == 2


class Asked:
    """What models have room for, none by default; asked: which were looked at."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rooms: dict[str, int] = {}

    def room(self, model: str) -> tuple[int, float]:
        self.asked.append(model)
        return self.rooms.get(model, 0), 0.0


def test_server_looks_at_models_that_are_asked_for_and_not_at_others() -> None:
    now, source, loop = 100.0, Asked(), StubLoop(ends=False)
    board = Board(memoryview(bytearray(SIZE)), 2, clock=lambda: now)
    publisher = AdmissionPublisher(source, board, loop=loop, clock=lambda: now)
    for model in range(100):
        publisher.changed(publisher.slot(f"m{model}"))
    loop.end()
    assert len(source.asked) == board.crowded == 100 and not loop.timers  # all are full, and an idle server sleeps

    now, source.asked = now + 1, []
    publisher.changed(publisher.slot("m7"))
    loop.end()
    assert source.asked == ["m7"] and not loop.timers

    now, source.asked, source.rooms = now + 1, [], {"m9": 4}
    publisher.rejected("m9")
    publisher.rejected("m9")
    publisher.rejected("unheard of")
    assert len(loop.timers) == 1
    loop.run_timers()
    loop.end()
    assert source.asked == ["m9"] and board.room(publisher.slot("m9"))[0] == 4 and not loop.timers


def test_http_process_that_rejects_has_the_model_looked_at_again(
    core: StubCore, remote: Remote, wire: Wire, loop: Rounds
) -> None:
    core.rooms["identity"] = 0, 1.0
    assert [ask_in_a_round(wire, loop, infer(ONE)).status for _ in range(2)] == [200, 503]
    while remote.loop.timers:  # which end
        remote.loop.run_timers()
    core.rooms["identity"] = 1, 1.0  # another model's requests have ended
    assert ask_in_a_round(wire, loop, infer(ONE)).status == 503
    while remote.loop.timers:
        remote.loop.run_timers()
    assert ask_in_a_round(wire, loop, infer(ONE)).status == 200


def test_frames_are_as_many_as_their_size_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_MESSAGE", 100)
    messages: list[object] = [Unread(str(number), [0.5] * 5) for number in range(4)]
    frames = list(link.encode_frames(messages, fail))
    found = [msgspec.msgpack.decode(bytes(frame[8:]), type=list[Unread]) for frame in frames]
    assert [message for some in found for message in some] == messages
    assert len(frames) > 1 and all(len(frame) <= 100 for frame in frames)


def fail(message: object, error: Exception) -> None:
    raise error


def test_message_that_cannot_be_encoded_costs_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_MESSAGE", 100)
    long, odd = Unread("long", [0.5] * 50), Unread("\ud800", [])
    good = [Unread(str(number), [0.5]) for number in range(3)]
    failed: list[tuple[object, Exception]] = []
    frames = link.encode_frames([good[0], long, good[1], odd, good[2]], lambda *args: failed.append(args))
    found = [msgspec.msgpack.decode(bytes(frame[8:]), type=list[Unread]) for frame in frames]
    assert [message for some in found for message in some] == good
    assert [message for message, _ in failed] == [long, odd]
    assert isinstance(failed[0][1], WorkerError) and "at most 100" in str(failed[0][1])
