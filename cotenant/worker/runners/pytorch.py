"""Models of PyTorch: TorchScript, `torch.export`, or a Python file that makes a module.

A process loads a model's weights once for each device, and all its lanes run that one module, each on its own stream.
A module that is trained is another matter: each lane has its own.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cotenant.core.tensor import TensorSpec
from cotenant.errors import DeviceError, ModelError
from cotenant.worker.runners import warm_up
from cotenant.worker.runners.arrays import Array, filled_array, one_line
from cotenant.worker.runners.torch_device import CpuDevice, CudaDevice, TorchDevice
from cotenant.worker.wire import WorkerModel

TYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "UINT16": torch.uint16, "UINT32": torch.uint32, "UINT64": torch.uint64,
    "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT64": torch.int64, "FP16": torch.float16,
    "FP32": torch.float32, "FP64": torch.float64, "BF16": torch.bfloat16,
}  # fmt: skip
WARM = 3  # batches of a size before the first that counts: libraries choose kernels and fill their caches

Module = Callable[..., Any]

_modules: weakref.WeakValueDictionary[tuple[str, int, str], Any] = weakref.WeakValueDictionary()
# Of modules that have run batches of that many rows: bytes of the device that these take.
_known: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
_loading = threading.Lock()


def import_torch(model: WorkerModel, threads: int, stream: int | None) -> Torch:
    """Raises ModelError for what cannot be loaded, DeviceError where there is no GPU."""
    torch.set_num_threads(threads)
    place = CpuDevice() if stream is None else CudaDevice(stream)
    return Torch(model, place, load_model(model, place.device))


def load_model(model: WorkerModel, device: torch.device) -> Module:
    """The model's module on that device. Whoever asks for the same file gets the same one, for as long as somebody
    has it; but one that is trained is anew each time."""
    load = {"pytorch_libtorch": _script, "pytorch_export": _export, "pytorch_module": _python}[model.platform]
    try:
        key = (model.path, Path(model.path).stat().st_mtime_ns, str(device))
    except OSError as error:
        raise ModelError(f"{model.path}: PyTorch cannot load it: {error.strerror}") from None
    with _loading:
        module = None if model.gradients else _modules.get(key)
        if module is None:
            try:
                module = load(model, device)
            except torch.OutOfMemoryError as error:
                raise ModelError(f"{model.path}: no device memory for its weights: {_brief(error)}") from None
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # its weights are there before any stream reads them
            if not model.gradients:
                _modules[key] = module
    return module


def _script(model: WorkerModel, device: torch.device) -> Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is to give way to torch.export, say later versions
            module: Any = torch.jit.load(model.path, map_location=device)
        _move_constants(module, device)
        module.train(model.gradients)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{model.path}: PyTorch {torch.__version__} finds no TorchScript in it: {_brief(error)}; "
            "save it with torch.jit.save"
        ) from None
    return module  # type: ignore[no-any-return]


def _move_constants(module: Any, device: torch.device) -> None:
    """What a traced module makes as it runs, it makes where it was traced. Here its graphs are told the device, since
    PyTorch moves weights only."""
    for part in module.modules():
        for node in part.graph.findAllNodes("prim::Constant") if hasattr(part, "graph") else ():
            if node.output().type().kind() == "DeviceObjType":
                node.s_("value", str(device))


def _export(model: WorkerModel, device: torch.device) -> Module:
    from torch.export.passes import move_to_device_pass

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it does itself with the file's memory
            program = torch.export.load(model.path)
        return _Program((program if device.type == "cpu" else move_to_device_pass(program, device)).module())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 of files of other versions it raises whatever its schema stumbles upon
        raise ModelError(
            f"{model.path}: PyTorch {torch.__version__} cannot load what torch.export saved: {_brief(error)}; "
            "export it again with this version"
        ) from None


class _Program(torch.nn.Module):
    """What was exported. PyTorch's module of it is in cycles of references; its weights go with this, and not only when
    Python collects those."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        weakref.finalize(self, _empty, module).atexit = False

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)


def _empty(module: torch.nn.Module) -> None:
    for it in (*module.parameters(), *module.buffers()):
        it.data = it.data.new_empty(0)


def _python(model: WorkerModel, device: torch.device) -> Module:
    """The file's function `model()` makes the module, or else its one class of modules does."""
    path = Path(model.path)
    name = "_model_" + re.sub(r"\W", "_", model.name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[name] = source  # dataclasses and the like look themselves up
    try:
        spec.loader.exec_module(source)
        module = _maker(source, path)()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"it gives a {type(module).__name__}; give a torch.nn.Module")
        return module.to(device).train(model.gradients)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 it is somebody's program
        raise ModelError(f"{path}{_line(path, error)}: {type(error).__name__}: {_brief(error)}") from None


def _maker(source: object, path: Path) -> Callable[[], Any]:
    found = vars(source)
    if callable(found.get("model")):
        return found["model"]  # type: ignore[no-any-return]
    classes = [
        it
        for it in found.values()
        if isinstance(it, type) and issubclass(it, torch.nn.Module) and it.__module__ == source.__name__  # type: ignore[attr-defined]
    ]
    if len(classes) != 1:
        raise ModelError(f"{path}: nothing in it makes the model; define `def model() -> torch.nn.Module`")
    (made,) = classes
    weights = path.with_name("model.pt")  # Triton's place for them

    def make() -> torch.nn.Module:
        module: torch.nn.Module = made()
        if weights.exists():
            module.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        return module

    return make


def _line(path: Path, error: Exception) -> str:
    """Where in that file, with a colon in front."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{frames[-1].lineno}" if frames else ""


class Torch:
    """A module at a place. One batch at a time: what it gives is overwritten by the next."""

    def __init__(self, model: WorkerModel, place: TorchDevice, module: Module) -> None:
        self.model = model
        self.device = 0.0
        self._place = place
        self._module = module
        self._inputs = {spec.name: spec for spec in model.inputs}
        self._by_name = set(self._inputs) <= _arguments(module)
        self._staged: dict[str, tuple[Array, torch.Tensor]] = {}
        self._graphs: dict[tuple[tuple[int, ...], ...], _Graph] = {}
        self._weights = _weight(module) if place.device.type != "cpu" else 0
        known = _known.setdefault(module, {})
        self.warmed = model.max_batch in known
        # Others of its lane leave memory behind that it would use: what it takes by itself is to be seen.
        before = 0 if self.warmed else place.release()
        if not self.warmed and place.device.type == "cuda":
            warm_up(self, WARM)
        self._record()
        self._taken = known.setdefault(model.max_batch, max(0, place.taken() - before))

    @property
    def memory(self) -> int:
        return self._weights + self._taken

    def stage(self, name: str, shape: tuple[int, ...]) -> Array:
        datatype = self._inputs[name].datatype
        try:
            tensor = self._place.stage(shape, TYPES[datatype])
        except RuntimeError as error:
            raise ModelError(f"no memory for copies of {name!r}: {_brief(error)}") from None
        array = _array(tensor)
        self._staged[name] = array, tensor
        return array

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        try:
            with self._place.scope(), self._mode():
                given = [self._place.arrive(self._host(name, inputs[name])) for name in self._inputs]
                graph = self._graphs.get(tuple([tuple(it.shape) for it in given]))
                outputs = self._compute(given) if graph is None else graph.run(given)
                left = [(spec, self._place.leave(self._checked(spec, value))) for spec, value in outputs]
            self.device = self._place.wait()
        except ModelError:
            raise
        except torch.OutOfMemoryError as error:
            raise ModelError(f"no device memory for this batch: {_brief(error)}") from None
        except Exception as error:  # noqa: BLE001 it is somebody's program
            if reason := self._place.broken():
                raise DeviceError(f"model {self.model.name!r} broke its CUDA context: {_brief(reason)}") from None
            raise ModelError(_brief(error) or type(error).__name__) from None
        finally:
            self._staged.clear()
        return [(spec.name, _array(value)) for spec, value in left]

    def minimum_seconds(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        self._graphs.clear()
        del self._module
        self._place.release()

    @contextmanager
    def _mode(self) -> Iterator[None]:
        # TorchScript would profile each new size of a batch and compile for it, in the midst of serving; what that
        # saves are a few launches. This setting is of a thread.
        with (
            torch.enable_grad() if self.model.gradients else torch.inference_mode(),
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined, unused-ignore]
        ):
            yield

    def _host(self, name: str, array: Array) -> torch.Tensor:
        """The input where copies leave from: as it was staged, or copied there now."""
        staged = self._staged.get(name)
        if staged is None or staged[0] is not array:
            place = self.stage(name, array.shape)
            place[...] = array
            staged = self._staged[name]
        return staged[1]

    def _compute(self, given: Sequence[torch.Tensor]) -> list[tuple[TensorSpec, torch.Tensor]]:
        result = self._module(**dict(zip(self._inputs, given, strict=True))) if self._by_name else self._module(*given)
        specs = self.model.outputs
        if isinstance(result, Mapping):
            missing = [spec.name for spec in specs if spec.name not in result]
            if missing:
                raise ModelError(f"no output {missing[0]!r}; the module gives {', '.join(map(str, result))}")
            return [(spec, result[spec.name]) for spec in specs]
        values = list(result) if isinstance(result, tuple | list) else [result]
        if len(values) != len(specs):
            raise ModelError(f"the module gives {len(values)} outputs, and config.pbtxt names {len(specs)}")
        return list(zip(specs, values, strict=True))

    def _checked(self, spec: TensorSpec, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"output {spec.name!r} is a {type(value).__name__}, not a tensor")
        if value.dtype != TYPES[spec.datatype]:
            raise ModelError(f"output {spec.name!r} is {value.dtype}, and {spec.datatype} in config.pbtxt")
        return value.detach()

    def _record(self) -> None:
        """CUDA graphs, the largest first: the others then fit into its memory. None where inputs have no fixed size."""
        model = self.model
        sizes = {rows for rows in model.graphs if rows <= model.max_batch}
        if any(-1 in spec.shape[model.batched :] for spec in model.inputs):
            return
        for rows in sorted(sizes, reverse=True):
            with self._mode():
                with self._place.scope():
                    ones = {spec.name: filled_array(spec, rows, 1, batched=model.batched) for spec in model.inputs}
                    given = [self._place.arrive(self._host(name, array)) for name, array in ones.items()]
                self._place.wait()
                self._staged.clear()
                try:
                    recorded = self._place.record(functools.partial(self._compute, given))
                except RuntimeError as error:
                    raise ModelError(
                        f"{model.path}: a batch of {rows} cannot be recorded as a CUDA graph: {_brief(error)}; "
                        "take `optimization { cuda { graphs } }` out of config.pbtxt"
                    ) from None
            if recorded is not None:
                self._graphs[tuple([tuple(it.shape) for it in given])] = _Graph(given, *recorded)


class _Graph:
    """Kernels recorded once, that always read and write the same memory."""

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: list[tuple[TensorSpec, torch.Tensor]],
        replay: Callable[[], None],
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._replay = replay

    def run(self, given: Sequence[torch.Tensor]) -> list[tuple[TensorSpec, torch.Tensor]]:
        for place, value in zip(self._inputs, given, strict=True):
            place.copy_(value)
        self._replay()
        return self._outputs


def _arguments(module: Module) -> set[str]:
    """Names that its inputs may be given by; none where they go by position alone."""
    forward: Any = getattr(module, "forward", module)
    if isinstance(module, torch.jit.ScriptModule):
        return {it.name for it in forward.schema.arguments}
    if isinstance(module, _Program):
        return set()
    return set(inspect.signature(forward).parameters)


def _weight(module: Module) -> int:
    """Bytes of its parameters and buffers."""
    assert isinstance(module, torch.nn.Module)
    return sum(it.nbytes for it in (*module.parameters(), *module.buffers()))


def _array(host: torch.Tensor) -> Array:
    """The same memory as numpy sees it; BF16, which it does not know, as UINT16."""
    return host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()


def _brief(error: object) -> str:
    """The first line of a message, without the advice on debugging CUDA that follows."""
    return one_line(Exception(next(iter(str(error).strip().splitlines()), "")))
