"""Run PyTorch modules on the CPU or a GPU, there as CUDA graphs where they can be captured."""

from __future__ import annotations

import bisect
import functools
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from cotenant.core.tensor import TensorSpec
from cotenant.errors import DeviceError, ModelError
from cotenant.worker.runners import warm_up
from cotenant.worker.runners.arrays import Array, filled_inputs
from cotenant.worker.runners.torch_device import CpuDevice, CudaDevice, TorchDevice
from cotenant.worker.runners.torch_modules import Module, arguments, brief, load_model, never_captured
from cotenant.worker.wire import WorkerModel

TYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "UINT16": torch.uint16, "UINT32": torch.uint32, "UINT64": torch.uint64,
    "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT64": torch.int64, "FP16": torch.float16,
    "FP32": torch.float32, "FP64": torch.float64, "BF16": torch.bfloat16,
}  # fmt: skip
WARMUP_BATCHES = 3  # until libraries have chosen kernels and filled their caches
SIZES_SECONDS = 1.0  # for batches of sizes that a thread has not run yet, before a lane serves
GRAPHS_SECONDS = 3.0  # for capturing a model that need not be captured
# By module and batch size, the device bytes that a batch of that size takes.
_batch_memory: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
# Staging memory of batches that broke their device: to free it is to ask the device, which aborts the process.
_lost: list[object] = []
_met = threading.local()  # sizes: those that a thread has run, by module


def import_torch(
    model: WorkerModel, threads: int, stream: int | None, memory: mmap.mmap | None, *, serve_first: bool = False
) -> Torch:
    """Load a model on the CPU, or on the GPU of a CUDA stream. serve_first: see `Torch`. Raises ModelError, and
    DeviceError if there is no GPU."""
    torch.set_num_threads(threads)
    place = CpuDevice() if stream is None else CudaDevice(stream, memory)
    return Torch(model, place, load_model(model, place.device), serve_first=serve_first)


class Torch:
    """Run a module on a device. It runs one batch at a time, whose outputs the next batch overwrites.

    serve_first: be ready before CUDA graphs are captured, unless the model asks for them, and before every size ran.
    """

    def __init__(self, model: WorkerModel, place: TorchDevice, module: Module, *, serve_first: bool = False) -> None:
        self.model = model
        self.device = 0.0
        self._place = place
        self._module = module
        self._inputs = {spec.name: spec for spec in model.inputs}
        self._first = model.inputs[0].name if model.inputs else ""
        self._by_name = set(self._inputs) <= arguments(module)
        self._joined: dict[str, tuple[Array, Sequence[torch.Tensor]]] = {}  # by input: what stands for it, and its rows
        self._graphs: dict[int, _Graph] = {}  # by rows
        self._sizes: list[int] = []  # theirs, in order
        self._tried: set[int] = set()  # sizes whose capture was tried
        self._weights = _weight_bytes(module) if place.device.type != "cpu" else 0
        batch_memory = _batch_memory.setdefault(module, {})
        self.warmed = model.max_batch in batch_memory
        # Memory cached by other models of the lane would hide what this one takes: release it first.
        before = 0 if self.warmed else place.release()
        if place.device.type == "cuda" and not self.warmed:
            warm_up(self, WARMUP_BATCHES)
            self._met_sizes().update({1, model.max_batch} if model.batched else ())
        if model.must_capture or not serve_first:
            self._capture_graphs()
        if place.device.type == "cuda" and not serve_first:
            self._warm_up_sizes()
        self._taken = batch_memory.setdefault(model.max_batch, max(0, place.taken() - before))

    @property
    def memory(self) -> int:
        return self._weights + self._taken

    def join(self, name: str, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Join the parts in staging memory, unless the device reads them where they are: then the result only stands
        for them."""
        if self._place.reads(parts):
            array = np.broadcast_to(np.empty((), parts[0].dtype), shape)
            self._joined[name] = array, [_tensor(part, TYPES[self._inputs[name].datatype]) for part in parts]
            return array
        try:
            tensor = self._place.stage(shape, TYPES[self._inputs[name].datatype])
        except RuntimeError as error:
            raise ModelError(f"no memory for copies of {name!r}: {brief(error)}") from None
        array = _array(tensor)
        if len(parts) > 1:
            np.concatenate(parts, out=array)
        else:
            array[...] = parts[0]
        self._joined[name] = array, [tensor]
        return array

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        try:
            with self._place.scope(), self._mode():
                rows = len(inputs[self._first]) if self.model.batched else None
                graph = self._graph_for(rows or 1)
                if graph is None:
                    outputs = self._compute([self._given(name, inputs[name]) for name in self._inputs])
                else:
                    for name, buffer in graph.inputs.items():
                        self._given(name, inputs[name], buffer)
                    outputs = graph.run(rows)
                copied = [(spec, self._place.to_host(self._checked(spec, value))) for spec, value in outputs]
            self.device = self._place.wait()
        except ModelError:
            raise
        except torch.OutOfMemoryError as error:
            raise ModelError(f"no device memory for this batch: {brief(error)}") from None
        except Exception as error:  # noqa: BLE001 user code
            if reason := self._place.broken():
                _lost.append(dict(self._joined))
                raise DeviceError(f"model {self.model.name!r} corrupted its CUDA context: {brief(reason)}") from None
            raise ModelError(brief(error) or type(error).__name__) from None
        finally:
            self._joined.clear()
        return [(spec.name, _array(value)) for spec, value in copied]

    def minimum_seconds(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        self._graphs.clear()
        del self._module
        self._place.release()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        # TorchScript would profile and compile for each new batch size while serving, to save a few launches. The
        # setting is per thread.
        with (
            torch.enable_grad() if self.model.gradients else torch.inference_mode(),
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined, unused-ignore]
        ):
            yield

    def _graph_for(self, rows: int) -> _Graph | None:
        """Return the smallest graph that holds the batch; None if none does, or if so few rows are not padded to it."""
        larger = (self._graphs[size] for size in self._sizes[bisect.bisect_left(self._sizes, rows) :])
        return next((graph for graph in larger if graph.lowest <= rows), None)

    def _given(self, name: str, array: Array, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy an input to the device, by way of staging memory if it was not joined. into: first rows of which."""
        joined = self._joined.get(name)
        if joined is None or joined[0] is not array:
            self.join(name, [array], array.shape)
            joined = self._joined[name]
        return self._place.to_device(joined[1], into)

    def _compute(self, given: Sequence[torch.Tensor]) -> list[tuple[TensorSpec, torch.Tensor]]:
        result = self._module(**dict(zip(self._inputs, given, strict=True))) if self._by_name else self._module(*given)
        specs = self.model.outputs
        if isinstance(result, Mapping):
            missing = [spec.name for spec in specs if spec.name not in result]
            if missing:
                raise ModelError(f"no output {missing[0]!r}; the module returns {', '.join(map(str, result))}")
            return [(spec, result[spec.name]) for spec in specs]
        values = list(result) if isinstance(result, tuple | list) else [result]
        if len(values) != len(specs):
            raise ModelError(f"the module returns {len(values)} outputs, but config.pbtxt lists {len(specs)}")
        return list(zip(specs, values, strict=True))

    def _checked(self, spec: TensorSpec, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"output {spec.name!r} is a {type(value).__name__}, not a tensor")
        if value.dtype != TYPES[spec.datatype]:
            raise ModelError(f"output {spec.name!r} is {value.dtype}, but {spec.datatype} in config.pbtxt")
        return value.detach()

    def improve(self) -> bool:
        """Capture the next CUDA graph or, once all are, run a batch of a size that this thread has not run."""
        if self._to_capture():
            before = self._place.taken()
            with suppress(ModelError):  # others have been captured
                self._capture_next()
            self._taken += max(0, self._place.taken() - before)
            _batch_memory[self._module][self.model.max_batch] = self._taken
            return True
        return self._place.device.type == "cuda" and self._warm_up_next()

    def _met_sizes(self) -> set[int]:
        """Return the sizes that this thread has run of the module."""
        by_module = _met.__dict__.setdefault("sizes", weakref.WeakKeyDictionary())
        return by_module.setdefault(self._module, set())  # type: ignore[no-any-return]

    def _warm_up_sizes(self) -> None:
        """Run a batch of each size that this thread has not run, as far as the time allows."""
        until = time.monotonic() + SIZES_SECONDS
        while time.monotonic() < until and self._warm_up_next():
            pass

    def _warm_up_next(self) -> bool:
        """Run a batch of the next size that this thread has not run; return whether there was one.

        For the first of a size cuDNN chooses a kernel for each convolution, which takes 0.1 s and more; PyTorch keeps
        that by thread. Training steps are left out: each changes the weights.
        """
        model, met = self.model, self._met_sizes()
        if model.gradients or not model.batched:
            return False
        powers = {1 << power for power in range(model.max_batch.bit_length())}
        unmet = [rows for rows in range(1, model.max_batch + 1) if rows not in met and self._graph_for(rows) is None]
        if not unmet:
            return False
        with suppress(ModelError):  # it may reject some sizes, which its callers are told then
            self._run_ones(min(unmet, key=lambda rows: (rows not in powers, -rows)))
        return True

    def _run_ones(self, rows: int) -> None:
        """Run a batch of that size. Raises ModelError if the model rejects it."""
        self._met_sizes().add(rows)
        self.run(filled_inputs(self.model, rows))

    def _capture_graphs(self) -> None:
        """Capture CUDA graphs, of a model that need not be captured as far as the time allows.

        Raises ModelError for a model that must be captured and cannot be.
        """
        until = time.monotonic() + GRAPHS_SECONDS
        while self._to_capture() and (self.model.must_capture or time.monotonic() < until):
            self._capture_next()

    def _capture_next(self) -> None:
        """Capture the next CUDA graph. Raises ModelError if that fails and the model must be captured; another runs
        without this size or, where it cannot be captured at all, without graphs."""
        (rows, lowest), *_ = self._to_capture()
        self._tried.add(rows)
        try:
            if rows not in self._met_sizes():
                self._run_ones(rows)
            graph = self._captured(rows, lowest)
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001 user code
            if self.model.must_capture:
                raise ModelError(
                    f"{self.model.path}: a batch of {rows} cannot be captured as a CUDA graph: {brief(error)}; "
                    "remove `optimization { cuda { graphs } }` from config.pbtxt"
                ) from None
            # It rejects this size, or there is no memory for it now: others may be captured.
            if not isinstance(error, ModelError | torch.OutOfMemoryError):
                self._give_up_graphs()
            return
        if graph is None:
            self._give_up_graphs()
            return
        self._graphs[rows] = graph
        self._sizes = sorted(self._graphs)

    def _give_up_graphs(self) -> None:
        self._graphs.clear()
        self._sizes.clear()
        never_captured.add(self._module)

    def _to_capture(self) -> list[tuple[int, int]]:
        """Return the sizes that are still to be captured, each with the fewest rows that are padded to it.

        The largest first, so that the others fit its memory. None if an input size is not fixed, or if the module keeps
        state on the host, which a replay would leave as it is.
        """
        if not self.model.must_capture and self._module in never_captured:
            return []
        fitting = self.model.captured_sizes()
        return [size for size in (*fitting[-1:], *fitting[:-1]) if size[0] not in self._tried]

    def _captured(self, rows: int, lowest: int) -> _Graph | None:
        """Capture a batch of that size; None if replaying it would save nothing. Raises what PyTorch raises, and
        TypeError for outputs that are not rows of the batch: those of a padded batch cannot be told apart."""
        model = self.model
        with self._mode():
            with self._place.scope():
                given = {name: self._given(name, array) for name, array in filled_inputs(model, rows).items()}
            self._place.wait()
            self._joined.clear()
            runs = 1 if self._graphs else WARMUP_BATCHES
            captured = self._place.capture(functools.partial(self._compute, list(given.values())), runs)
        if captured is None:
            return None
        for spec, value in captured[0]:
            if not isinstance(value, torch.Tensor) or (model.batched and tuple(value.shape[:1]) != (rows,)):
                raise TypeError(f"the first dimension of output {spec.name!r} is not the batch")
        return _Graph(given, lowest, *captured)


class _Graph:
    """Replay a captured CUDA graph, which always reads and writes the same memory.

    lowest: number of rows from which on a batch is padded to its size.
    """

    def __init__(
        self,
        inputs: dict[str, torch.Tensor],
        lowest: int,
        outputs: list[tuple[TensorSpec, torch.Tensor]],
        replay: Callable[[], None],
    ) -> None:
        self.inputs = inputs
        self.lowest = lowest
        self._outputs = outputs
        self._replay = replay

    def run(self, rows: int | None) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Return the outputs of the first rows of its inputs; None: of all. Other rows are those of earlier batches."""
        self._replay()
        return self._outputs if rows is None else [(spec, value[:rows]) for spec, value in self._outputs]


def _weight_bytes(module: Module) -> int:
    assert isinstance(module, torch.nn.Module)
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _array(host: torch.Tensor) -> Array:
    """View a host tensor as a numpy array; BF16 as UINT16, since numpy has no such dtype."""
    return host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()


def _tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """View a numpy array as a host tensor."""
    return torch.from_numpy(array).view(dtype)
