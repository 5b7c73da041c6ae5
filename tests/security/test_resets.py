"""Callers that open and leave at once: streams of HTTP/2 that are reset, requests that are cancelled as they end."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable

import pytest

from cotenant.errors import CancelledError, RequestError
from cotenant.live.driver import Driver, Tensors
from cotenant.runtime.events import Died
from tests.live.stub import running
from tests.security.server import PATIENCE, Served, post
from tests.security.test_lanes import LANE, TIMING, Counting, driven

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RESET, SETTINGS, PING = 1, 3, 4, 6
END_HEADERS = 4
GROWTH = 128 << 20  # bytes: 5,000 calls that were kept would take more


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def head(method: str) -> bytes:
    """A head of a call, each of its fields in full (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    parts = [
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(text)]) + text.encode() for name, text in fields.items()
    ]
    return b"".join(parts)


def open_and_reset(address: str, method: str) -> None:
    """Open five connections, and on each a thousand streams that are reset at once."""
    opened = b"".join(
        frame(HEADERS, END_HEADERS, stream, head(method)) + frame(RESET, 0, stream, b"\0\0\0\x08")
        for stream in range(1, 2001, 2)
    )
    host, port = address.split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as sock:
            try:
                sock.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
                sock.sendall(opened + frame(PING, 0, 0, bytes(8)))
                while sock.recv(1 << 16):
                    sock.settimeout(0.2)
            except (TimeoutError, ConnectionError):
                continue  # it has nothing more to say, or has had enough of this caller


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_streams_that_are_reset_at_once_cost_little_and_stop_nothing(server: Served, method: str) -> None:
    before = server.resident()
    open_and_reset(server.grpc, method)
    assert server.serves()
    assert server.resident() - before < GROWTH


def test_calls_that_are_reset_leave_nothing_that_runs() -> None:
    with running() as front_ends:
        before = front_ends.call(lambda: len(asyncio.all_tasks()))
        open_and_reset(front_ends.rpc, "ModelInfer")
        most = time.monotonic() + PATIENCE
        while (after := front_ends.call(lambda: len(asyncio.all_tasks()))) > before and time.monotonic() < most:
            time.sleep(0.05)
        assert after <= before and not front_ends.core.held


def test_callers_that_leave_at_once_stop_nothing(server: Served) -> None:
    body = post("/v2/models/identity/infer", b'{"inputs":[]}')
    for size in range(0, len(body), 7):
        with server.connect() as sock:
            sock.sendall(body[:size])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
    assert server.serves()


Answer = Tensors | RequestError
Ending = Callable[[Driver, int, int], None]
ENDS: dict[str, tuple[Ending, ...]] = {
    "cancelled, then answered": (lambda d, r, b: d.cancel(r), lambda d, r, b: d.finished(LANE, b, [()], TIMING)),
    "answered, then cancelled": (lambda d, r, b: d.finished(LANE, b, [()], TIMING), lambda d, r, b: d.cancel(r)),
    "cancelled twice": (lambda d, r, b: d.cancel(r), lambda d, r, b: d.cancel(r)),
    "cancelled, then its batch fails": (lambda d, r, b: d.cancel(r), lambda d, r, b: d.failed(LANE, b, "broken")),
    "its worker dies, then it is cancelled": (
        lambda d, r, b: d.tell(Died(LANE, "killed")),
        lambda d, r, b: d.cancel(r),
        lambda d, r, b: d.finished(LANE, b, [()], TIMING),
    ),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_request_that_is_cancelled_as_it_ends_ends_once(ends: tuple[Ending, ...]) -> None:
    batches: list[int] = []

    async def main() -> None:
        answers: list[Answer] = []
        observer = Counting()
        driver = driven(lambda lane, batch, model, payloads: batches.append(batch), observer)
        request = driver.submit("m", (), answers.append, within=1.0)
        for end in ends:
            end(driver, request, batches[0])
        assert len(answers) == len(observer.outcomes) == 1 and driver.in_flight == 0

    asyncio.run(main())


def test_request_that_is_cancelled_from_its_own_answer_ends_once() -> None:
    batches: list[int] = []

    async def main() -> None:
        answers: list[Answer] = []
        driver = driven(lambda lane, batch, model, payloads: batches.append(batch), Counting())

        def answered(answer: Answer) -> None:
            answers.append(answer)
            driver.cancel(request)

        request = driver.submit("m", (), answered, within=1.0)
        driver.finished(LANE, batches[0], [()], TIMING)
        request = driver.submit("m", (), answered, within=1.0)
        driver.cancel(request)
        assert answers[0] == () and isinstance(answers[1], CancelledError) and len(answers) == 2

    asyncio.run(main())
