"""Convert numpy arrays as runners take and return them; strings are object arrays."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.tensor import DTYPES, TensorSpec
from cotenant.worker.wire import WorkerModel

Array = NDArray[Any]


def filled_array(spec: TensorSpec, rows: int, value: int, *, batched: bool) -> Array:
    """Return an array filled with `value` for warm-up; open dimensions become 1."""
    shape = tuple(max(size, 1) if size < 0 else size for size in spec.shape)
    shape = (rows, *shape[1:]) if batched else shape
    if spec.datatype == "BYTES":
        return np.full(shape, str(value), object)
    return np.full(shape, value, DTYPES[spec.datatype])


def filled_inputs(model: WorkerModel, rows: int) -> dict[str, Array]:
    """Return the inputs of a batch of ones, by name."""
    return {spec.name: filled_array(spec, rows, 1, batched=model.batched) for spec in model.inputs}


_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


def datatype(array: Array) -> str:
    """Return the protocol's datatype of an array."""
    return "BYTES" if array.dtype == object else _NAMES[array.dtype]


def decode_strings(data: memoryview, shape: tuple[int, ...]) -> Array:
    """Decode BYTES in the protocol's wire form into an array of str.

    Raises ValueError for elements that are missing or not UTF-8.
    """
    count = math.prod(shape)
    strings = np.empty(count, object)
    at = 0
    for index in range(count):
        size = int.from_bytes(data[at : at + 4], "little")
        end = at + 4 + size
        if end > len(data):
            raise ValueError(f"BYTES of shape {list(shape)} end after {index} of {count} elements")
        strings[index] = str(data[at + 4 : end], "utf-8")
        at = end
    return strings.reshape(shape)


def encode_strings(array: Array) -> bytes:
    """Encode an array of str or bytes as BYTES in the protocol's wire form."""
    encoded = [value if isinstance(value, bytes) else str(value).encode() for value in array.flat]
    return b"".join(piece for text in encoded for piece in (len(text).to_bytes(4, "little"), text))


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, without ONNX Runtime's error codes."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
