from __future__ import annotations

import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cotenant.core.tensor import Tensor
from cotenant.errors import FailedError
from cotenant.live.rows import concatenate, split_rows


def strings(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), width=st.integers(0, 3), texts=st.booleans())
def test_rows_that_were_split_are_whole_again_together(sizes: list[int], width: int, texts: bool) -> None:
    rows = sum(sizes)
    if texts:
        data = strings(*(b"x" * (n % 4) for n in range(rows * width)))
        given = Tensor("x", "BYTES", (rows, width), data)
    else:
        given = Tensor("x", "INT64", (rows, width), np.arange(rows * width).tobytes())
    parts = split_rows(given, sizes)
    assert [part.shape for part in parts] == [(size, width) for size in sizes]
    assert concatenate(parts) == given


def test_split_rows_are_views_that_say_where_they_lie() -> None:
    block = object()
    given = Tensor("x", "FP32", (4, 2), bytearray(range(32)), block, 1000)
    first, second = split_rows(given, [1, 2])
    assert (first.start, second.start) == (1000, 1008)
    assert first.block is second.block is block
    given.data[8] = 99  # type: ignore[index]
    assert second.data[0] == 99


def test_strings_that_end_too_early_cannot_be_split() -> None:
    with pytest.raises(FailedError, match=r"^tensor 'x' ends before its shape \[2\] says$"):
        split_rows(Tensor("x", "BYTES", (2,), strings(b"abc")[:-1] + strings()), [1, 1])


def test_rows_of_different_shapes_cannot_be_put_together() -> None:
    one, two = Tensor("y", "UINT8", (1, 1), b"a"), Tensor("y", "UINT8", (1, 2), b"bc")
    with pytest.raises(FailedError, match=r"^rows of 'y' have different shapes"):
        concatenate([one, two])
