from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from cotenant.core.tensor import DTYPES, Tensor
from cotenant.live.elements import classify, unpack_strings


def test_classification_with_labels_names_the_highest_values() -> None:
    scores = Tensor("y", "FP32", (2, 3), struct.pack("<6f", 0.1, 0.7, 0.2, 0.5, 0.1, 0.4))
    best = classify(scores, 2, batched=True, labels=("cat", "dog"))
    assert (best.datatype, best.shape) == ("BYTES", (2, 2))
    assert [bytes(it) for it in unpack_strings(best)] == [
        b"0.700000:1:dog",
        b"0.200000:2",
        b"0.500000:0:cat",
        b"0.400000:2",
    ]


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "INT64", "UINT64", "INT8", "BOOL"])
def test_classification_ranks_as_sorting_does(datatype: str) -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 40, 300):
        row = rng.integers(0, 9, size).astype(DTYPES[datatype])  # many are equal
        if row.dtype.kind == "f":
            row[rng.random(size) < 0.2] = np.nan
            row[rng.random(size) < 0.1] = -np.inf
        elif datatype != "BOOL":
            row[rng.random(size) < 0.3] = np.iinfo(row.dtype).max
        values = [-math.inf if value != value else value for value in row.tolist()]
        ranked = sorted(range(size), key=lambda index: -values[index])
        for count in (1, 3, size, size + 5):
            labels = classify(Tensor("y", datatype, (2, size), 2 * row.tobytes()), count, batched=True)
            assert [int(bytes(item).split(b":")[1]) for item in unpack_strings(labels)] == 2 * ranked[:count]
