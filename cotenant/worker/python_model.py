"""Models that are functions or classes of Python, marked by a decorator.

    import cotenant

    @cotenant.model(inputs={"text": "BYTES[1]"}, outputs={"length": "INT32[1]"}, max_batch_size=8)
    def length(text):
        return [[len(row[0])] for row in text]

The decorator says what `config.pbtxt` would, as literals: the server reads them from the source and runs nothing of it;
the worker does. Inputs are numpy arrays, by name, the batch dimension first where there is one; strings are `str`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from cotenant.errors import ModelError

MARK = "__cotenant_model__"
MAX_SOURCE = 16 << 20  # bytes of a file that is looked through

# What a tensor may be declared as; Triton's names but for STRING, which the protocol calls BYTES.
DATATYPES = frozenset(
    {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"}
)
_TENSOR = re.compile(r"(?P<datatype>[A-Z0-9]+)\[(?P<dims>[-0-9, ]*)\]")

Marked = TypeVar("Marked", bound=Callable[..., Any])


class DeclaredTensor(msgspec.Struct, frozen=True):
    """Describe an input or output. dims: without the batch dimension; -1 is any size."""

    name: str
    datatype: str
    dims: tuple[int, ...]


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a decorator says. None, or nothing: it is left to `config.pbtxt`. sample_dims: of inputs with dims of
    any size, for profiling."""

    inputs: tuple[DeclaredTensor, ...] = ()
    outputs: tuple[DeclaredTensor, ...] = ()
    max_batch_size: int | None = None
    sample_dims: dict[str, tuple[int, ...]] = {}


def model(
    *,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    max_batch_size: int | None = None,
    sample_dims: Mapping[str, Sequence[int]] | None = None,
) -> Callable[[Marked], Marked]:
    """Mark a function, or a class whose instances are called, as a model.

    inputs, outputs: what each is, such as ``"FP32[3, 224, 224]"``, without the batch dimension; ``-1`` is any size, and
    ``BYTES`` are strings. Inputs are the arguments' names. Where there are several outputs, the function returns a dict
    of them. max_batch_size: rows of a batch; 0, the default, means no batch dimension: one request at a time.
    sample_dims: of inputs with dims of any size, sizes that are usual, for profiling.

    An instance of a class is made once in each worker, before the first batch. What is left out is in the model's
    `config.pbtxt`. Raises ModelError for what is no such declaration.
    """
    declaration = declared(
        {
            "inputs": inputs,
            "outputs": outputs,
            "max_batch_size": max_batch_size,
            "sample_dims": sample_dims,
        },
        "@cotenant.model",
    )

    def mark(target: Marked) -> Marked:
        setattr(target, MARK, declaration)
        return target

    return mark


def declared(given: Mapping[str, Any], place: str) -> Declaration:
    """Return a declaration from a decorator's arguments, None for those left out. Raises ModelError that names the
    place."""
    rows = given.get("max_batch_size")
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ModelError(f"{place}: max_batch_size is {rows!r}; it is a number of rows, 0 for no batch dimension")
    inputs, outputs = (
        tuple(_tensor(name, text, f"{place}: {kind}") for name, text in _mapping(given.get(kind), kind, place).items())
        for kind in ("inputs", "outputs")
    )
    sizes = _mapping(given.get("sample_dims"), "sample_dims", place)
    for name, dims in sizes.items():
        if name not in {tensor.name for tensor in inputs}:
            raise ModelError(f"{place}: sample_dims: there is no input {name!r}")
        if not isinstance(dims, list | tuple) or any(type(dim) is not int or dim < 1 for dim in dims):
            raise ModelError(f"{place}: sample_dims of {name!r} are {dims!r}; give sizes such as [16]")
    return Declaration(
        inputs=inputs,
        outputs=outputs,
        max_batch_size=rows,
        sample_dims={name: tuple(dims) for name, dims in sizes.items()},
    )


def _mapping(given: Any, kind: str, place: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ModelError(f'{place}: {kind} is {given!r}; write {{"name": …}}')
    return given


def _tensor(name: str, text: object, place: str) -> DeclaredTensor:
    if not name.isidentifier():
        raise ModelError(f"{place}: {name!r} is not a name of an argument in Python")
    match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
    try:
        dims = () if match is None else tuple(int(dim) for dim in match["dims"].split(","))
    except ValueError:
        dims = ()
    if match is None or match["datatype"] not in DATATYPES or not dims or any(dim < 1 and dim != -1 for dim in dims):
        raise ModelError(f'{place}: {name!r} is {text!r}; write a datatype and its dims, such as "FP32[3, 224, 224]"')
    return DeclaredTensor(name, match["datatype"], dims)


def read_declaration(path: Path) -> Declaration | None:
    """Return what a file's decorator says, without running the file; None where it has none.

    Raises ModelError with the line for what is no Python, is no declaration of literals, or is one of several.
    """
    source = path.read_bytes()[:MAX_SOURCE]
    if b"cotenant" not in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ModelError(f"{path}:{getattr(error, 'lineno', None) or 1}: no Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ModelError(f"{path}: no Python that can be read: it is nested too deeply") from None
    names = set(_names(tree))
    try:
        found = [
            (node, decorator)
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for decorator in node.decorator_list
            if ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) in names
        ]
    except RecursionError:
        raise ModelError(f"{path}: no Python that can be read: it is nested too deeply") from None
    if not found:
        return None
    if len(found) > 1:
        listed = ", ".join(f"{node.name} in line {node.lineno}" for node, _ in found)
        raise ModelError(f"{path}: several models: {listed}; give each a folder of its own")
    ((node, decorator),) = found
    place = f"{path}:{decorator.lineno}"
    if isinstance(node, ast.AsyncFunctionDef):
        raise ModelError(f"{place}: {node.name} is a coroutine function; a model is called and returns its outputs")
    return declared({} if not isinstance(decorator, ast.Call) else _literals(decorator, place), place)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield what the decorator is called in a file."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "cotenant":
                    yield f"{alias.asname or 'cotenant'}.model"
        elif isinstance(node, ast.ImportFrom) and node.module == "cotenant" and not node.level:
            for alias in node.names:
                if alias.name == "model":
                    yield alias.asname or "model"


def _literals(call: ast.Call, place: str) -> dict[str, Any]:
    known = Declaration.__struct_fields__
    given: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ModelError(f"{place}: unknown argument {keyword.arg or '**'!r} of cotenant.model; available: {known}")
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ModelError(
                f"{place}: {keyword.arg} is not a literal; the server reads it without running the file: write it out, "
                "or put it into config.pbtxt"
            ) from None
    if call.args:
        raise ModelError(f"{place}: cotenant.model takes its arguments by name")
    return given


_loading = threading.local()


def is_loading() -> bool:
    """Return whether this thread runs a file to load its model."""
    return getattr(_loading, "path", None) is not None


@contextmanager
def _load(path: Path) -> Iterator[None]:
    before, _loading.path = getattr(_loading, "path", None), path
    try:
        yield
    finally:
        _loading.path = before


def load_callable(path: Path, name: str = "") -> Callable[..., Any]:
    """Run a file, and return its model: the marked one, or that of this name. A class is instantiated.

    Raises ModelError with the line at which the file fails.
    """
    try:
        with _load(path):
            source = _run_file(path)
            target = getattr(source, name) if name else _marked(source, path)
            made = target() if isinstance(target, type) else target
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 user code
        raise ModelError(f"{path}{line_of(path, error)}: {brief(error)}") from None
    if not callable(made):
        raise ModelError(f"{path}: {target.__name__} has no __call__; define it, with the inputs as arguments")
    return made  # type: ignore[no-any-return]


def _run_file(path: Path) -> ModuleType:
    name = "_model_" + re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[name] = source  # dataclasses look themselves up there
    spec.loader.exec_module(source)
    return source


def _marked(source: ModuleType, path: Path) -> Any:
    for value in vars(source).values():
        if hasattr(value, MARK):
            return value
    raise ModelError(f"{path}: nothing in it is marked by @cotenant.model")


def line_of(path: Path, error: BaseException) -> str:
    """Return the line of the file at which an error arose, as `:LINE`; empty if unknown."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    file = path.resolve()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == file]
    return f":{frames[-1].lineno}" if frames else ""


def brief(error: BaseException) -> str:
    """Return an error's class and message on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
