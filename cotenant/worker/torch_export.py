"""Read the inputs and outputs of a `torch.export` model from its file, without PyTorch, which takes seconds to import.

A `.pt2` file is a zip archive; the program is JSON in it, `models/model.json`
(https://docs.pytorch.org/docs/stable/export/pt2_archive.html; schema: torch/_export/serde/schema.py).
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from cotenant.core.tensor import TensorSpec
from cotenant.errors import ModelError

# torch/_export/serde/schema.py, ScalarType
_TYPES = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip


class _Meta(msgspec.Struct):
    dtype: int
    sizes: list[dict[str, Any]]


class _Graph(msgspec.Struct):
    tensor_values: dict[str, _Meta]


class _Signature(msgspec.Struct):
    input_specs: list[dict[str, Any]]
    output_specs: list[dict[str, Any]]


class _Call(msgspec.Struct):
    in_spec: str
    out_spec: str


class _Entry(msgspec.Struct):
    fqn: str
    signature: _Call | None


class _Module(msgspec.Struct):
    graph: _Graph
    signature: _Signature
    module_call_graph: list[_Entry]


class _Program(msgspec.Struct):
    graph_module: _Module


def load_exported(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return inputs by the names of the arguments, and outputs by the keys of a dict that the module returns, or else
    OUTPUT__0 and so on."""
    try:
        return _edges(path)
    except (zipfile.BadZipFile, msgspec.DecodeError, KeyError, OSError) as error:
        raise ModelError(
            f"{path}: not what torch.export.save of PyTorch 2.9 or later writes: {error}; export it again"
        ) from None


def _edges(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    with zipfile.ZipFile(path) as archive:
        file = next((name for name in archive.namelist() if name.endswith("/models/model.json")), "models/model.json")
        module = msgspec.json.decode(archive.read(file), type=_Program).graph_module
    call = next((entry.signature for entry in module.module_call_graph if not entry.fqn), None)
    if call is not None and re.search(r'"type": "builtins.dict", "context": "\[.+\]"', call.in_spec):
        raise ModelError(f"{path}: exported with keyword arguments; export it with its inputs in `args` alone")
    names = _names(module.signature.input_specs, "user_input", path)
    results = _names(module.signature.output_specs, "user_output", path)
    keys = _keys(call.out_spec) if call is not None else []
    called = keys if len(keys) == len(results) else [f"OUTPUT__{index}" for index in range(len(results))]
    values = module.graph.tensor_values
    return (
        tuple(_spec(path, name, values[name]) for name in names),
        tuple(_spec(path, name, values[value]) for name, value in zip(called, results, strict=True)),
    )


def _names(specs: list[dict[str, Any]], kind: str, path: Path) -> list[str]:
    names = []
    for spec in specs:
        if kind in spec:
            argument = spec[kind]["arg"]
            if "as_tensor" not in argument:
                raise ModelError(f"{path}: takes or gives more than tensors; export it with plain tensors only")
            names.append(argument["as_tensor"]["name"])
    return names


def _keys(spec: str) -> list[str]:
    """Return the keys of the dict that it describes; none where it is not a dict."""
    _, tree = msgspec.json.decode(spec, type=tuple[int, dict[str, Any]])
    if tree.get("type") != "builtins.dict":
        return []
    return [str(key) for key in msgspec.json.decode(tree["context"])]


def _spec(path: Path, name: str, meta: _Meta) -> TensorSpec:
    datatype = _TYPES.get(meta.dtype)
    if datatype is None:
        raise ModelError(f"{path}: {name!r} has a type that the protocol does not know; export it with a common one")
    return TensorSpec(name, datatype, tuple(size.get("as_int", -1) for size in meta.sizes))
