"""Represent named tensors as raw bytes, and the datatypes of the Open Inference Protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

# Protocol name → numpy type. BYTES has rows of any length; BF16 has no numpy type and travels as uint16.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(np.uint16),
}


class Tensor(msgspec.Struct, frozen=True):
    """Hold a tensor as bytes.

    data: little-endian, row-major, without padding; for BYTES, each element is a uint32 length and its bytes. block,
    start: where the data lies in memory that workers share, if it does: at byte `start` of `block`
    (`worker.arena.Block`). The block is released with the last tensor that holds it.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    block: object | None = None
    start: int = 0

    def array(self) -> np.ndarray[Any, Any]:
        """Return a view on `data`, without a copy. Not for BYTES."""
        return np.frombuffer(self.data, dtype=DTYPES[self.datatype]).reshape(self.shape)


class TensorSpec(msgspec.Struct, frozen=True):
    """Describe an input or output of a model. shape: batch dimension included, -1 where any size is valid."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model's metadata in the protocol.

    max_batch_size: the largest first dimension; 0 where the model has no batch dimension. labels: class names of an
    output, by its name.
    """

    name: str
    version: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    labels: dict[str, tuple[str, ...]] = {}


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors' data."""
    return sum([len(tensor.data) for tensor in tensors])


def nbytes(datatype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of fixed-size elements."""
    return math.prod(shape) * DTYPES[datatype].itemsize
