"""Load PyTorch modules: TorchScript, `torch.export`, or a Python file that builds one.

A process loads the weights of a model once per device; all its lanes run that module, each on its own stream. A module
that trains is not shared: each lane has its own.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cotenant.errors import ModelError
from cotenant.worker.python_model import line_of
from cotenant.worker.runners.arrays import one_line
from cotenant.worker.wire import WorkerModel

# Operators that take a number from the host beside a tensor of the device.
ARITHMETIC = {"aten::add", "aten::sub", "aten::mul", "aten::div", "aten::floor_divide", "aten::remainder"}

Module = Callable[..., Any]

_modules: weakref.WeakValueDictionary[tuple[str, int, str], Any] = weakref.WeakValueDictionary()
never_captured: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that cannot be, or gain nothing from it
_loading = threading.Lock()


def load_model(model: WorkerModel, device: torch.device) -> Module:
    """Return the model's module on a device: one per file and device while in use, but a new one for each training
    lane.

    Raises ModelError for a file that cannot be loaded.
    """
    load = {"pytorch_libtorch": _load_torchscript, "pytorch_export": _load_export, "pytorch_module": _load_python}[
        model.platform
    ]
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
                raise ModelError(f"{model.path}: no device memory for its weights: {brief(error)}") from None
            if device.type == "cuda":
                # The weights must be there before any stream reads them.
                torch.cuda.current_stream(device).synchronize()
            if not model.gradients:
                _modules[key] = module
    return module


def _load_torchscript(model: WorkerModel, device: torch.device) -> Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later versions warn that torch.export replaces TorchScript
            module: Any = torch.jit.load(model.path, map_location=device)
        _move_constants(module, device)
        if _keeps_state(module):
            never_captured.add(module)
        module.train(model.gradients)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{model.path}: PyTorch {torch.__version__} finds no TorchScript in it: {brief(error)}; "
            "save it with torch.jit.save"
        ) from None
    return module  # type: ignore[no-any-return]


def _move_constants(module: Any, device: torch.device) -> None:
    """Put the constants of traced graphs where they belong.

    Tensors that a graph creates must be on the device, since PyTorch moves weights only. Integers that it computes
    shapes with must be on the host, where PyTorch moves them from: each would make the host wait for the device, which
    a CUDA graph cannot hold.
    """
    for part in module.modules():
        graph = _graph_of(part)
        for node in () if graph is None else graph.findAllNodes("prim::Constant"):
            kind = node.output().type().kind()
            if kind == "DeviceObjType":
                node.s_("value", str(device))
            elif kind == "TensorType" and _is_for_shapes(node):
                value = node.t("value")
                if not value.dim() and not value.is_floating_point():
                    node.t_("value", _on_host(value))


def _is_for_shapes(node: Any) -> bool:
    """Tell whether what a node of a graph computes ends in integers of the host."""
    users = [use.user for use in node.output().uses()]
    return all(user.kind() == "aten::Int" or (user.kind() in ARITHMETIC and _is_for_shapes(user)) for user in users)


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.cpu()


def _load_export(model: WorkerModel, device: torch.device) -> Module:
    from torch.export.passes import move_to_device_pass

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own handling of the file's memory
            program = torch.export.load(model.path)
        return _ExportedModule((program if device.type == "cpu" else move_to_device_pass(program, device)).module())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 for a file of another version it raises anything
        raise ModelError(
            f"{model.path}: PyTorch {torch.__version__} cannot load what torch.export saved: {brief(error)}; "
            "export it again with this version"
        ) from None


class _ExportedModule(torch.nn.Module):
    """Hold an exported program whose weights are freed with it; PyTorch's own module is in reference cycles."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        weakref.finalize(self, _free_weights, module).atexit = False

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)


def _free_weights(module: torch.nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.new_empty(0)


def _load_python(model: WorkerModel, device: torch.device) -> Module:
    """Build the module with the file's function `model()`, or else with its only module class."""
    path = Path(model.path)
    name = "_model_" + re.sub(r"\W", "_", model.name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[name] = source  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(source)
        module = _module_factory(source, path)()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"it returns a {type(module).__name__}; return a torch.nn.Module")
        return module.to(device).train(model.gradients)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 user code
        raise ModelError(f"{path}{line_of(path, error)}: {type(error).__name__}: {brief(error)}") from None


def _module_factory(source: object, path: Path) -> Callable[[], Any]:
    names = vars(source)
    if callable(names.get("model")):
        return names["model"]  # type: ignore[no-any-return]
    classes = [
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == source.__name__  # type: ignore[attr-defined]
    ]
    if len(classes) != 1:
        raise ModelError(f"{path}: it builds no model; define `def model() -> torch.nn.Module`")
    (module_class,) = classes
    weights = path.with_name("model.pt")  # where Triton keeps them

    def build() -> torch.nn.Module:
        module: torch.nn.Module = module_class()
        if weights.exists():
            module.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        return module

    return build


def _keeps_state(module: Any) -> bool:
    """Tell whether a scripted module changes attributes as it runs, on the host."""
    return any(graph.findAllNodes("prim::SetAttr") for graph in map(_graph_of, module.modules()) if graph is not None)


def _graph_of(part: Any) -> Any:
    """Return the graph of a part of a scripted module; None for a container, which computes nothing."""
    try:
        return part.graph
    except (AttributeError, RuntimeError):  # releases of PyTorch say it differently
        return None


def arguments(module: Module) -> set[str]:
    """Return the names of keyword inputs; none if inputs are positional only."""
    forward: Any = getattr(module, "forward", module)
    if isinstance(module, torch.jit.ScriptModule):
        return {argument.name for argument in forward.schema.arguments}
    if isinstance(module, _ExportedModule):
        return set()
    return set(inspect.signature(forward).parameters)


def brief(error: object) -> str:
    """Return the first line of a message, without the advice on debugging CUDA that follows."""
    return one_line(Exception(next(iter(str(error).strip().splitlines()), "")))
