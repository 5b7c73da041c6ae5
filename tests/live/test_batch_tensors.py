"""Requests that travel to a worker as one, and outputs that come back as one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.tensor import Tensor
from cotenant.errors import WorkerError
from cotenant.live.batch_tensors import joined_parts, separated
from cotenant.worker.arena import Block
from cotenant.worker.wire import LARGE, TensorPart


def tensor(name: str, rows: int, *, width: int = 2, kind: str = "FP32", first: float = 0.0) -> Tensor:
    data = np.arange(first, first + rows * width, dtype=np.float32)
    return Tensor(name, kind, (rows, width), data.tobytes())


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_requests_that_are_joined_and_separated_are_the_same(counts: list[int]) -> None:
    payloads = [(tensor("a", rows, first=rows), tensor("b", rows, width=3)) for rows in counts]
    parts, rows = joined_parts(payloads)
    assert list(rows) == counts and [part.shape for part in parts] == [(sum(rows), 2), (sum(rows), 3)]
    assert separated(parts, rows, None) == payloads


@pytest.mark.parametrize(
    "other",
    [
        (tensor("b", 1), tensor("a", 1)),
        (tensor("a", 1),),
        (tensor("a", 1), tensor("b", 1), tensor("c", 1)),
        (tensor("a", 1), tensor("b", 1, width=3)),
        (tensor("a", 1), tensor("b", 1, kind="INT32")),
        (tensor("a", 1), tensor("b", 1, kind="BYTES")),
        (tensor("a", 1), tensor("b", 1, width=LARGE // 4)),
        (tensor("a", 1), msgspec.structs.replace(tensor("b", 1), block=Block(0, 8, memoryview(bytes(8))))),
    ],
)
def test_requests_that_differ_in_more_than_their_rows_are_not_joined(other: tuple[Tensor, ...]) -> None:
    ordinary = (tensor("a", 2), tensor("b", 2))
    assert joined_parts([ordinary, ordinary])[1] == (2, 2)
    assert joined_parts([ordinary, other]) == joined_parts([other, ordinary]) == ([], ())


def test_strings_are_not_joined() -> None:
    words = (tensor("a", 1, kind="BYTES"),)
    assert joined_parts([words, words]) == ([], ())


def test_outputs_in_the_room_of_a_batch_are_separated_there() -> None:
    room = Block(4096, 64, memoryview(bytes(range(64))))
    (one,), (two,) = separated([TensorPart("y", "UINT8", (3, 4), None, 4104, 12)], [1, 2], room)
    assert (one.shape, bytes(one.data), one.start, one.block) == ((1, 4), bytes(range(8, 12)), 8, room)
    assert (two.shape, bytes(two.data), two.start, two.block) == ((2, 4), bytes(range(12, 20)), 12, room)


@pytest.mark.parametrize(
    "part",
    [
        TensorPart("y", "FP32", (2, 2), memoryview(bytes(16))),
        TensorPart("y", "FP32", (), memoryview(bytes(16))),
        TensorPart("y", "FP32", (3, 2), memoryview(bytes(25))),
        TensorPart("y", "BYTES", (3, 1), memoryview(bytes(12))),
        TensorPart("y", "UINT8", (3, 4), None, 8192, 12),
    ],
)
def test_outputs_that_are_not_the_rows_of_the_batch_break_the_protocol(part: TensorPart) -> None:
    with pytest.raises(WorkerError, match="output 'y'"):
        separated([part], [1, 2], Block(4096, 64, memoryview(bytes(64))))
