from __future__ import annotations

import struct

from cotenant.core.tensor import Tensor
from cotenant.live.oip import classify, unpack_strings


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
