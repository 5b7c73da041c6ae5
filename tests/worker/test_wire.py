from __future__ import annotations

import socket
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.worker.wire import (
    BatchResult,
    FromWorker,
    Inbox,
    RunBatch,
    TensorPart,
    Timing,
    ToWorker,
    WorkerReady,
    aligned,
    encode_message,
)

TIMING = Timing(1.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def run_of(data: bytes) -> RunBatch:
    return RunBatch(7, "m", [[TensorPart("x", "UINT8", (1, len(data)), memoryview(data))]], (4096, 8192))


def received(pieces: list[bytes]) -> list[bytes]:
    """What an inbox makes of a stream that arrives in these pieces."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def write() -> None:
            for piece in pieces:
                theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=write)
        writer.start()
        inbox = Inbox(ours)
        messages = []
        while inbox.fill():
            while (message := inbox.take()) is not None:
                messages.append(message)
        writer.join()
        assert inbox.take() is None
    return messages


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, 65500, 65536, 300_000]), min_size=1, max_size=6),
    cut=st.integers(500, 70_000),
)
def test_wire_messages_survive_any_split_of_the_stream(sizes: list[int], cut: int) -> None:
    runs = [run_of(bytes([index]) * size) for index, size in enumerate(sizes)]
    stream = b"".join(encode_message(run) for run in runs)
    messages = received([stream[at : at + cut] for at in range(0, len(stream), cut)])
    decoded = [msgspec.msgpack.decode(message, type=ToWorker) for message in messages]
    for got, sent in zip(decoded, runs, strict=True):
        assert isinstance(got, RunBatch)
        assert (got.batch, got.model, got.room) == (7, "m", (4096, 8192))
        (part,), (original,) = got.requests[0], sent.requests[0]
        assert (part.name, part.shape, bytes(part.data or b"")) == ("x", original.shape, bytes(original.data or b""))


@pytest.mark.parametrize(
    "message",
    [
        WorkerReady({"m": 64}),
        BatchResult(3, [[TensorPart("y", "FP32", (2,), None, 4096, 8)], "no such index"], TIMING),
    ],
)
def test_wire_worker_messages_round_trip(message: FromWorker) -> None:
    (data,) = received([bytes(encode_message(message))])
    assert msgspec.msgpack.decode(data, type=FromWorker) == message


def test_timing_latency_is_the_sum_of_its_parts() -> None:
    assert TIMING.latency == pytest.approx(1.0)


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_aligned_rounds_up(size: int, expected: int) -> None:
    assert aligned(size) == expected
