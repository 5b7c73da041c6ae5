"""What runs a batch: a model of ONNX Runtime, or a sleep as long as the profile says."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cotenant.core.tensor import DTYPES, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker.wire import WorkerModel, aligned

Array = NDArray[Any]


class Runner(Protocol):
    model: WorkerModel

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        """Named outputs. Strings are in arrays of objects. Raises ModelError for inputs that the model cannot take."""
        ...

    def least(self, rows: int) -> float:
        """Seconds that a batch takes even where the run itself is shorter."""
        ...

    def close(self) -> None:
        """Let go of the model: of its weights once no other runner of this process has them."""
        ...


class Onnx:
    """An ONNX model on the processor. It keeps to `threads` threads, and none of them spins while it waits: spinning
    is processor time that the share would pay for."""

    def __init__(self, model: WorkerModel, threads: int) -> None:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        # ONNX Runtime's exceptions have no class of their own in common.
        self._failures = tuple(it for it in vars(state).values() if isinstance(it, type) and issubclass(it, Exception))
        self.model = model
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # its errors are raised as well
        try:
            self._session = onnxruntime.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
        except self._failures as error:
            raise ModelError(f"{model.path}: ONNX Runtime cannot load it: {one_line(error)}") from None
        self._outputs = [node.name for node in self._session.get_outputs()]

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        try:
            return list(zip(self._outputs, self._session.run(self._outputs, inputs), strict=True))
        except self._failures as error:
            raise ModelError(one_line(error)) from None

    def least(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        del self._session


class Fake:
    """Runs nothing. An output repeats the input in its position where the two are alike, and is zero elsewhere."""

    def __init__(self, model: WorkerModel) -> None:
        if len(model.latencies) < model.max_batch:
            raise ModelError(
                f"model {model.name!r} has latencies for {len(model.latencies)} rows, and {model.max_batch} as its "
                "largest batch; profile it up to there"
            )
        self.model = model

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        model = self.model
        rows = next(iter(inputs.values())).shape[0] if model.batched else 1
        sources = (*model.inputs, *(None for _ in model.outputs))
        return [
            (spec.name, inputs[source.name])
            if source and (source.datatype, source.shape[1:]) == (spec.datatype, spec.shape[1:])
            else (spec.name, filled(spec, rows, 0, batched=model.batched))
            for spec, source in zip(model.outputs, sources, strict=False)
        ]

    def least(self, rows: int) -> float:
        return self.model.latencies[min(rows, len(self.model.latencies)) - 1]

    def close(self) -> None:
        pass


def load(model: WorkerModel, *, threads: int, fake: bool, stream: int | None = None) -> tuple[Runner, int]:
    """A runner that has run its largest and its smallest batch, and the bytes that its outputs take for one row, each
    aligned. Raises ModelError.

    stream: the handle of the CUDA stream, on the first device that this process sees, that batches run on; 0 for one of
    the runner's own; None for the processor.
    """
    runner: Runner = Fake(model) if fake else Onnx(model, threads)
    for rows in (model.max_batch, 1) if model.batched else (1,):
        try:
            outputs = runner.run({spec.name: filled(spec, rows, 1, batched=model.batched) for spec in model.inputs})
        except (ModelError, MemoryError) as error:
            raise ModelError(f"model {model.name!r} cannot run a batch of {rows}: {one_line(error)}") from None
    return runner, sum(aligned(array.nbytes) for _, array in outputs)


def filled(spec: TensorSpec, rows: int, value: int, *, batched: bool) -> Array:
    """Ones suit all that models take: token ids, masks, pictures. A size that is not known is 1."""
    shape = tuple(max(size, 1) if size < 0 else size for size in spec.shape)
    shape = (rows, *shape[1:]) if batched else shape
    if spec.datatype == "BYTES":
        return np.full(shape, str(value), object)
    return np.full(shape, value, DTYPES[spec.datatype])


_NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


def datatype(array: Array) -> str:
    """The protocol's name of what is in an array."""
    return "BYTES" if array.dtype == object else _NAMES[array.dtype]


def decode_strings(data: memoryview, shape: tuple[int, ...]) -> Array:
    """BYTES as the protocol writes them → an array of str. Raises ValueError for what is not UTF-8, or not so many."""
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
    """The inverse."""
    encoded = [str(value).encode() for value in array.flat]
    return b"".join(piece for text in encoded for piece in (len(text).to_bytes(4, "little"), text))


def one_line(error: Exception) -> str:
    """Its message without line breaks, and without the codes that ONNX Runtime puts in front."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(str(error).split()))
