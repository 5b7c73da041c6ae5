"""Run ONNX models with ONNX Runtime, on the CPU or, if its build supports CUDA, on a GPU."""

from __future__ import annotations

from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from cotenant.errors import ModelError
from cotenant.worker.external_data import check_external_data
from cotenant.worker.runners.arrays import Array, one_line
from cotenant.worker.wire import WorkerModel

# ONNX Runtime's exceptions have no common base class of their own.
_FAILURES = tuple(value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception))


class Onnx:
    """Run an ONNX model.

    On the CPU it uses `threads` threads, none of which spins while it waits: the share would pay for spinning. ONNX
    Runtime does not report device memory.
    """

    device = 0.0
    memory = 0
    warmed = False

    def __init__(self, model: WorkerModel, threads: int, stream: int | None = None) -> None:
        check_external_data(model.path)
        self.model = model
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # errors are raised anyway
        providers: list[Any] = ["CPUExecutionProvider"]
        if stream is not None:
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise ModelError(
                    f"{model.path}: ONNX Runtime {onnxruntime.__version__} here runs nothing on a GPU; install "
                    "onnxruntime-gpu in its place, or serve the model as TorchScript or torch.export"
                )
            # The CPU provider runs only operators without a CUDA kernel.
            cuda_options = {"device_id": 0} | ({"user_compute_stream": str(stream)} if stream else {})
            providers.insert(0, ("CUDAExecutionProvider", cuda_options))
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

    def minimum_seconds(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        del self._session
