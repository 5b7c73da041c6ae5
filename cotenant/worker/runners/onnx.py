"""Models of ONNX Runtime, on the processor or, where its build can, on a GPU."""

from __future__ import annotations

from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, one_line
from cotenant.worker.wire import WorkerModel

# Its exceptions have no class of their own in common.
_FAILURES = tuple(it for it in vars(state).values() if isinstance(it, type) and issubclass(it, Exception))


class Onnx:
    """An ONNX model. On the processor it keeps to `threads` threads, and none of them spins while it waits: spinning
    is processor time that the share would pay for.

    Its device memory is not known: ONNX Runtime does not tell.
    """

    device = 0.0
    memory = 0
    known = False

    def __init__(self, model: WorkerModel, threads: int, stream: int | None = None) -> None:
        self.model = model
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # its errors are raised as well
        providers: list[Any] = ["CPUExecutionProvider"]
        if stream is not None:
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise ModelError(
                    f"{model.path}: ONNX Runtime {onnxruntime.__version__} here runs nothing on a GPU; install "
                    "onnxruntime-gpu in its place, or serve the model as TorchScript or torch.export"
                )
            # Only what its kernels of CUDA lack runs on the processor.
            where = {"device_id": 0} | ({"user_compute_stream": str(stream)} if stream else {})
            providers.insert(0, ("CUDAExecutionProvider", where))
        try:
            self._session = onnxruntime.InferenceSession(model.path, options, providers=providers)
        except _FAILURES as error:
            raise ModelError(f"{model.path}: ONNX Runtime cannot load it: {one_line(error)}") from None
        self._outputs = [node.name for node in self._session.get_outputs()]

    def stage(self, name: str, shape: tuple[int, ...]) -> None:
        return None

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        try:
            return list(zip(self._outputs, self._session.run(self._outputs, inputs), strict=True))
        except _FAILURES as error:
            raise ModelError(one_line(error)) from None

    def least(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        del self._session
