"""Giant integers, failures in the server and garbage of a worker leave no lane busy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

import pytest

from cotenant.backends.fake import Fake
from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome
from cotenant.errors import FailedError, RequestError, WorkerError
from cotenant.live.driver import Driver, Tensors
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, LaneModel, LaneSpec, Ready, Reply
from cotenant.worker import wire
from cotenant.worker.wire import BatchResult, TensorPart, Timing, WorkerReady, encode_message
from tests.live.workers import PATIENCE, floats, pool_of, sleeper
from tests.security.server import ORDINARY, Served

LANE = LaneId.parse("cpu-0/0")
SPEC = LaneSpec(id=LANE, models=(LaneModel(model="m", latencies=(0.01,)),))
TIMING = Timing(0, 0, 0, 0, 0, 0)


class Counting:
    """An observer that fails where it is told to."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.outcomes: list[Outcome] = []
        self.breaks = breaks

    def ended(self, reply: Reply, now: float) -> None:
        self.outcomes.append(reply.outcome)

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None:
        if self.breaks:
            raise ZeroDivisionError


def driven(run: Callable[[LaneId, int, str, Sequence[Tensors]], None], observer: Counting) -> Driver:
    driver = Driver(Dispatcher(), run, observer, clock=lambda: 0.0, drained=lambda lane: None)
    driver.tell(Applied((SPEC,)))
    driver.tell(Ready(LANE))
    return driver


def test_dimension_above_64_bits_is_answered_and_leaves_the_lane_free(server: Served) -> None:
    for size in (2**63, 2**64, 2**70, 10**400):
        status, answer = server.infer("picture", {**ORDINARY["picture"], "shape": [1, 3, 0, size], "data": []})
        assert status in (400, 500) and "error" in answer
    assert server.serves()


def test_batch_that_cannot_be_sent_fails_and_the_lane_takes_the_next() -> None:
    batches: list[int] = []

    def run(lane: LaneId, batch: int, model: str, payloads: Sequence[Tensors]) -> None:
        batches.append(batch)
        if len(batches) % 2:
            raise OverflowError("an integer of 65 bits")

    async def main() -> None:
        answers: list[Tensors | RequestError] = []
        observer = Counting()
        driver = driven(run, observer)
        for _ in range(3):
            driver.submit("m", (), answers.append, within=1.0)
            if driver.busy_since(LANE) is not None:
                driver.finished(LANE, batches[-1], [()], TIMING)
        assert [isinstance(answer, FailedError) for answer in answers] == [True, False, True]
        assert observer.outcomes == [Outcome.FAILED, Outcome.SERVED, Outcome.FAILED]
        assert driver.busy_since(LANE) is None and driver.in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("answers", [[], [(), ()]])
def test_batch_whose_answers_cannot_be_read_fails_and_frees_its_lane(answers: list[Tensors]) -> None:
    batches: list[int] = []

    async def main() -> None:
        got: list[Tensors | RequestError] = []
        driver = driven(lambda lane, batch, model, payloads: batches.append(batch), Counting())
        driver.submit("m", (), got.append, within=1.0)
        driver.finished(LANE, batches[0], answers, TIMING)
        assert isinstance(got[0], FailedError) and driver.busy_since(LANE) is None
        driver.finished(LANE, batches[0], [()], TIMING)  # a second time
        driver.submit("m", (), got.append, within=1.0)
        driver.finished(LANE, batches[0], [()], TIMING)  # of the batch before
        assert len(got) == 1
        driver.finished(LANE, batches[1], [()], TIMING)
        assert got[1] == ()

    asyncio.run(main())


def test_observer_that_breaks_does_not_keep_a_lane_busy() -> None:
    batches: list[int] = []

    async def main() -> None:
        got: list[Tensors | RequestError] = []
        driver = driven(lambda lane, batch, model, payloads: batches.append(batch), Counting(breaks=True))
        driver.submit("m", (), got.append, within=1.0)
        driver.finished(LANE, batches[0], [()], TIMING)
        assert got == [()] and driver.busy_since(LANE) is None

    asyncio.run(main())


OUTSIDE = TensorPart("y", "FP32", (1, 2), None, 1 << 40, 8)
GARBAGE = {
    "no message": b"\x05\0\0\0\0\0\0\0\xc1\xc1\xc1\xc1\xc1",
    "a message of 2^63 bytes": b"\0\0\0\0\0\0\0\x80",
    "another batch": bytes(encode_message(BatchResult(77, [[]], TIMING))),
    "two answers to one request": bytes(encode_message(BatchResult(1, [[], []], TIMING))),
    "ready a second time": bytes(encode_message(WorkerReady({}))),
    "an output outside its room": bytes(encode_message(BatchResult(1, [[OUTSIDE]], TIMING))),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_worker_that_breaks_the_protocol_is_ended_and_replaced(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: list[socket.socket] = []  # the ends that workers have of their sockets
    make = socket.socketpair

    def socketpair() -> tuple[socket.socket, socket.socket]:
        ours, other = make()
        theirs.append(other.dup())
        return ours, other

    async def main() -> None:
        async with pool_of(Fake()) as (pool, told, _):
            monkeypatch.setattr(socket, "socketpair", socketpair)
            await pool.start(LANE, share=1000, models=[sleeper(PATIENCE)])
            assert await told.next() == ("ready", LANE)
            monkeypatch.undo()
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            theirs[0].sendall(garbage)
            kind, lane, reason = await told.next()
            assert (kind, lane) == ("died", LANE) and reason.startswith("it broke the protocol: ")
            assert await told.next() == ("ready", LANE)

    try:
        asyncio.run(main())
    finally:
        for end in theirs:
            end.close()


def test_message_that_is_too_long_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1000)
    part = TensorPart("y", "FP32", (1, 250), memoryview(bytes(1000)))
    with pytest.raises(WorkerError, match=r"^a message of 1\d\d\d bytes; at most 1000 are sent$"):
        encode_message(BatchResult(1, [[part]], TIMING))
