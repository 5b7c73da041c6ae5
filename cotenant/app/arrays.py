"""Convert tensors of the protocol from and to numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.errors import InvalidError
from cotenant.live.elements import pack_strings, unpack_strings

Arrays = dict[str, NDArray[Any]]


def to_tensors(info: ModelInfo, inputs: Mapping[str, ArrayLike]) -> tuple[Tensor, ...]:
    """Return the inputs of a model as tensors. Lists take the datatype of the model's input; an array has to have it.

    BF16 is given as uint16, BYTES as strings or bytes. Raises InvalidError for a name that the model does not have, and
    for values that do not fit its datatype.
    """
    specs = {spec.name: spec for spec in info.inputs}
    tensors = []
    for name, values in inputs.items():
        if name not in specs:
            raise InvalidError(f"model {info.name!r} has no input {name!r}; it takes {', '.join(specs)}")
        tensors.append(_to_tensor(specs[name], values))
    return tuple(tensors)


def to_arrays(tensors: Iterable[Tensor]) -> Arrays:
    """Return tensors as arrays by name, each a copy; BYTES as an array of objects that are bytes."""
    return {tensor.name: _to_array(tensor) for tensor in tensors}


def _to_tensor(spec: TensorSpec, values: ArrayLike) -> Tensor:
    if spec.datatype == "BYTES":
        strings = np.asarray(values, dtype=object)
        packed = pack_strings([item.encode() if isinstance(item, str) else bytes(item) for item in strings.ravel()])
        return Tensor(spec.name, spec.datatype, strings.shape, packed)
    dtype = DTYPES[spec.datatype]
    if isinstance(values, np.ndarray) and values.dtype != dtype:
        raise InvalidError(f"input {spec.name!r} is {values.dtype}, but the model takes {dtype}; convert it")
    try:
        array = np.ascontiguousarray(values, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidError(f"input {spec.name!r} cannot be read as {dtype}: {error}") from None
    return Tensor(spec.name, spec.datatype, np.shape(values), array.tobytes())


def _to_array(tensor: Tensor) -> NDArray[Any]:
    if tensor.datatype != "BYTES":
        return tensor.array().copy()
    strings = np.empty(len(unpacked := unpack_strings(tensor)), dtype=object)
    strings[:] = [bytes(item) for item in unpacked]
    return strings.reshape(tensor.shape)
