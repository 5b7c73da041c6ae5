"""What runs a batch: a model of ONNX Runtime or of PyTorch, or a sleep as long as the profile says.

Each library is imported where a model needs it: PyTorch takes seconds, and hundreds of megabytes.
"""

from __future__ import annotations

from typing import Literal, Protocol

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, filled_array, one_line
from cotenant.worker.wire import WorkerModel, aligned


class Runner(Protocol):
    """device: seconds that the last batch took by the device's own clock, copies included. memory: bytes of the device
    that the weights and the largest batch so far take. Both 0 where the device is the processor, or does not tell.
    known: others of this process have run the largest batch already, with the same weights."""

    model: WorkerModel
    known: bool

    @property
    def device(self) -> float: ...

    @property
    def memory(self) -> int: ...

    def stage(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """Where an input of that shape is best put together for the next run; None where any place will do."""
        ...

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        """Named outputs, good until the next run. Strings are in arrays of objects. Raises ModelError for inputs that
        the model cannot take, or that its device has no memory for; DeviceError where the device runs nothing any more
        in this process."""
        ...

    def least(self, rows: int) -> float:
        """Seconds that a batch takes even where the run itself is shorter."""
        ...

    def close(self) -> None:
        """Let go of the model: of its weights once no other runner of this process has them."""
        ...


def modules_of(model: WorkerModel, *, fake: bool) -> tuple[str, ...]:
    """What `load_runner` imports for it, which is most of what comes before the model itself."""
    runner = f"{__name__}.{_library(model, fake)}"
    # The first file of `torch.export` brings a thousand modules along.
    return (runner, "torch.export.pt2_archive") if model.platform == "pytorch_export" and not fake else (runner,)


def load_runner(model: WorkerModel, *, threads: int, fake: bool, stream: int | None = None) -> tuple[Runner, int]:
    """A runner that has run its largest and its smallest batch, or the smallest where the model is known, and the bytes
    that its outputs take for one row, each aligned. Raises ModelError, and DeviceError where there is no GPU to run on.

    stream: the handle of the CUDA stream, on the first device that this process sees, that batches run on; 0 for one of
    the runner's own; None for the processor.
    """
    runner = _runner(model, threads, fake, stream)
    return runner, sum(aligned(array.nbytes) for _, array in warm_up(runner, 1))


def warm_up(runner: Runner, times: int) -> list[tuple[str, Array]]:
    """Run the largest batch, unless it is known, and then the smallest, each so often; gives the last outputs. Raises
    ModelError."""
    model = runner.model
    for rows in (model.max_batch, 1) if model.batched and not runner.known else (1,):
        for _ in range(times):
            try:
                outputs = runner.run(
                    {spec.name: filled_array(spec, rows, 1, batched=model.batched) for spec in model.inputs}
                )
            except (ModelError, MemoryError) as error:
                raise ModelError(f"model {model.name!r} cannot run a batch of {rows}: {one_line(error)}") from None
    return outputs


def _library(model: WorkerModel, fake: bool) -> Literal["fake", "pytorch", "onnx"]:
    if fake:
        return "fake"
    return "pytorch" if model.platform.startswith("pytorch") else "onnx"


def _runner(model: WorkerModel, threads: int, fake: bool, stream: int | None) -> Runner:
    library = _library(model, fake)
    if library == "fake":
        from cotenant.worker.runners.fake import Fake

        return Fake(model)
    if library == "pytorch":
        try:
            from cotenant.worker.runners.pytorch import import_torch
        except ModuleNotFoundError:
            raise ModelError(f"{model.path}: PyTorch is not installed; run `pip install 'cotenant[torch]'`") from None
        return import_torch(model, threads, stream)
    from cotenant.worker.runners.onnx import Onnx

    return Onnx(model, threads, stream)
