"""Execute batches by runners: ONNX Runtime, PyTorch, XGBoost, LightGBM, Python, or a sleep as long as the profile says.

Each library is imported only for a model that needs it: PyTorch takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Literal, Protocol

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, filled_inputs, one_line
from cotenant.worker.wire import WorkerModel, aligned


class Runner(Protocol):
    """Run batches of one model.

    device: seconds of the last batch by the device's own clock, copies included. memory: device bytes of the weights
    and the largest batch so far. Both are 0 on the CPU, or if the device does not tell. warmed: another runner of this
    process has already run the largest batch with the same weights.
    """

    model: WorkerModel
    warmed: bool

    @property
    def device(self) -> float: ...

    @property
    def memory(self) -> int: ...

    def join(self, name: str, parts: Sequence[Array], shape: tuple[int, ...]) -> Array | None:
        """Join the rows of requests to an input of the next run, where the device reads it; None if any array of this
        shape will do. Raises ModelError if there is no memory for it."""
        ...

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        """Return the named outputs, valid until the next run; strings are in object arrays.

        Raises ModelError for inputs that the model rejects or the device has no memory for, DeviceError if the device
        no longer runs anything in this process.
        """
        ...

    def minimum_seconds(self, rows: int) -> float:
        """Return the seconds that a batch takes even if the run itself is shorter."""
        ...

    def improve(self) -> bool:
        """Do a part of what makes later batches faster, while none waits; return whether there is more to do."""
        ...

    def close(self) -> None:
        """Release the model; its weights go with the last runner of this process that shares them."""
        ...


def modules_of(model: WorkerModel, *, fake: bool) -> tuple[str, ...]:
    """Return the modules that `load_runner` imports for a model, which take most of a worker's start."""
    library = _library(model, fake)
    runner = f"{__name__}.{library}"
    if library == "pytorch" and model.platform == "pytorch_export":
        return runner, "torch.export.pt2_archive"  # loading the first such file imports a thousand modules
    return (runner, f"{__name__}.{model.platform.partition('_')[0]}") if library == "trees" else (runner,)


def load_runner(
    model: WorkerModel,
    *,
    threads: int,
    fake: bool,
    stream: int | None = None,
    memory: mmap.mmap | None = None,
    serve_first: bool = False,
) -> tuple[Runner, int]:
    """Load a model and warm it up; return its runner and the bytes of the outputs of one row, each output aligned.

    stream: handle of the CUDA stream on the first visible device that batches run on; 0 for a stream of the runner's
    own; None for the CPU. memory: the arena, which a GPU may read by itself. serve_first: leave to `improve` what it
    can do. Raises ModelError, and DeviceError if there is no GPU to run on.
    """
    runner = _runner(model, threads, fake, stream, memory, serve_first)
    return runner, sum(aligned(array.nbytes) for _, array in warm_up(runner, 1))


def warm_up(runner: Runner, times: int) -> list[tuple[str, Array]]:
    """Run the largest batch (unless the runner is warmed) and then the smallest, `times` each; return the last outputs.

    Raises ModelError if the model cannot run a batch.
    """
    model = runner.model
    for rows in dict.fromkeys((model.max_batch, 1) if model.batched and not runner.warmed else (1,)):
        for _ in range(times):
            try:
                outputs = runner.run(filled_inputs(model, rows))
            except (ModelError, MemoryError) as error:
                raise ModelError(f"model {model.name!r} cannot run a batch of {rows}: {one_line(error)}") from None
    return outputs


def _library(model: WorkerModel, fake: bool) -> Literal["fake", "pytorch", "trees", "python", "onnx"]:
    if fake:
        return "fake"
    if model.platform.startswith("pytorch"):
        return "pytorch"
    if model.platform == "python":
        return "python"
    return "trees" if model.platform in ("xgboost_json", "lightgbm_text") else "onnx"


def _runner(
    model: WorkerModel, threads: int, fake: bool, stream: int | None, memory: mmap.mmap | None, serve_first: bool
) -> Runner:
    library = _library(model, fake)
    if library == "fake":
        from cotenant.worker.runners.fake import Fake

        return Fake(model)
    if library == "pytorch":
        try:
            from cotenant.worker.runners.pytorch import import_torch
        except ModuleNotFoundError:
            raise ModelError(f"{model.path}: PyTorch is not installed; run `pip install 'cotenant[torch]'`") from None
        return import_torch(model, threads, stream, memory, serve_first=serve_first)
    if library == "trees":
        from cotenant.worker.runners.trees import load_trees

        return load_trees(model, threads, stream)
    if library == "python":
        from cotenant.worker.runners.python import Python

        return Python(model, stream)
    from cotenant.worker.runners.onnx import Onnx

    return Onnx(model, threads, stream)
