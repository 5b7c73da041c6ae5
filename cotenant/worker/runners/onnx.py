"""Run ONNX models with ONNX Runtime, on the CPU or, if its build supports CUDA, on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from cotenant.errors import ModelError
from cotenant.worker.external_data import check_external_data
from cotenant.worker.runners.arrays import Array, one_line
from cotenant.worker.runners.optimised import keep, kept_path, mark_used
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
        alone = not check_external_data(model.path)  # other files may change without its own
        self.model = model
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
        kept = kept_path(Path(model.path), onnxruntime.__version__) if alone and stream is None else None
        try:
            self._session = _open(model.path, threads, providers, kept)
        except _FAILURES as error:
            raise ModelError(f"{model.path}: ONNX Runtime cannot load it: {one_line(error)}") from None
        self._outputs = [node.name for node in self._session.get_outputs()]

    def join(self, name: str, parts: Sequence[Array], shape: tuple[int, ...]) -> None:
        return None

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        try:
            return list(zip(self._outputs, self._session.run(self._outputs, inputs), strict=True))
        except _FAILURES as error:
            raise ModelError(one_line(error)) from None

    def improve(self) -> bool:
        return False

    def minimum_seconds(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        del self._session


def _options(threads: int, **entries: str) -> onnxruntime.SessionOptions:
    """Return options of a session. entries: more of the configuration, by the last part of its key."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # errors are raised anyway
    # With memory patterns the second batch of each size moves to one block of its own, which the system has to hand out
    # page by page, amid serving; without them batches are as fast, in the memory that the warm-up has left.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    return options


def _open(path: str, threads: int, providers: list[Any], kept: Path | None) -> onnxruntime.InferenceSession:
    """Open a model as it was optimised before, or optimise it and keep that. kept: where; None: nowhere."""

    def write(temporary: str) -> None:
        options = _options(threads, save_model_format="ORT")
        options.optimized_model_filepath = temporary
        onnxruntime.InferenceSession(path, options, providers=providers)

    if kept is not None:
        with contextlib.suppress(OSError, *_FAILURES):  # there is none yet, or it is broken
            return _open_kept(kept, threads, providers)
        with contextlib.suppress(OSError, *_FAILURES):  # a full disk, or what is wrong with the model and shows below
            keep(kept, write)
            return _open_kept(kept, threads, providers)
    return onnxruntime.InferenceSession(path, _options(threads), providers=providers)


def _open_kept(kept: Path, threads: int, providers: list[Any]) -> onnxruntime.InferenceSession:
    """Open a model that was optimised before. Its weights stay in the file, which all workers share."""
    mark_used(kept)
    options = _options(
        threads,
        load_model_format="ORT",
        use_memory_mapped_ort_model="1",
        use_ort_model_bytes_for_initializers="1",
    )
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(kept), options, providers=providers)
