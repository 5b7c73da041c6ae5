"""Generate random inputs, to warm up and profile models."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker.repository.config import CONFIG, WarmupInput
from cotenant.worker.repository.layout import Entry


def sample_inputs(entry: Entry, info: ModelInfo, rows: int, rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Return random inputs of that many rows.

    Integers are 0 or 1, which suit token ids and masks; floats lie in [0, 1). Raises ModelError where a dimension other
    than the batch is dynamic and `model_warmup` in config.pbtxt does not give it.
    """
    if not 1 <= rows <= max(1, info.max_batch_size):
        raise ModelError(f"{entry.path}: {rows} rows at once; this model takes 1 to {max(1, info.max_batch_size)}")
    return tuple(_sample(entry, info, spec, rows, rng) for spec in info.inputs)


def _sample(entry: Entry, info: ModelInfo, spec: TensorSpec, rows: int, rng: np.random.Generator) -> Tensor:
    warmups = (warmup.inputs[spec.name] for warmup in entry.config.model_warmup if spec.name in warmup.inputs)
    warmup = next(warmups, WarmupInput())
    lead = (rows,) if info.max_batch_size else ()
    fixed = spec.shape[len(lead) :]
    dims = warmup.dims or fixed
    agree = len(dims) == len(fixed) and all(declared in (-1, dim) for dim, declared in zip(dims, fixed, strict=True))
    if not agree or min(dims, default=1) < 0:
        example = [dim if dim >= 0 else 16 for dim in fixed]
        given = f"model_warmup gives {list(warmup.dims)}" if warmup.dims else "nothing says which are usual"
        raise ModelError(
            f"input {spec.name!r} has dims {list(fixed)}, and {given}; put into {entry.folder / CONFIG}: "
            f'`model_warmup {{ inputs {{ key: "{spec.name}" value {{ dims: {example} }} }} }}`'
        )
    shape = (*lead, *dims)
    return Tensor(spec.name, spec.datatype, shape, _data(spec.datatype, shape, rng, zero=warmup.zero_data))


def _data(datatype: str, shape: tuple[int, ...], rng: np.random.Generator, *, zero: bool) -> bytes:
    if datatype == "BYTES":
        text = b"" if zero else b"text"
        return (len(text).to_bytes(4, "little") + text) * int(np.prod(shape))
    values: NDArray[Any]
    if zero:
        values = np.zeros(shape, DTYPES[datatype])
    elif datatype == "BF16":  # the upper half of a float32
        values = (rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif datatype.startswith("FP"):
        values = rng.random(shape, np.float32).astype(DTYPES[datatype])
    else:
        values = rng.integers(0, 2, shape).astype(DTYPES[datatype])
    return values.tobytes()
