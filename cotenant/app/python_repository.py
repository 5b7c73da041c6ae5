"""Make a model repository of functions and classes of this program, so that workers can run them.

A worker is a process of its own: it runs the file that a function stands in, as a module that is not `__main__`.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cotenant.errors import ConfigError, ModelError
from cotenant.worker.python_model import MARK, Declaration, is_loading
from cotenant.worker.repository import CONFIG, write_config

PythonModels = Callable[..., Any] | Sequence[Callable[..., Any]]


def check_not_loading() -> None:
    """Raise ConfigError where a worker runs the program to find a model: it must not serve, too."""
    if is_loading():
        raise ConfigError(
            "a worker runs this file to find its model, and must not serve; put the call under "
            '`if __name__ == "__main__":`'
        )


@contextmanager
def python_repository(models: PythonModels) -> Iterator[Path]:
    """Hold a repository of marked functions and classes, by their names, within the block. Raises ModelError."""
    listed = [models] if callable(models) else list(models)
    if not listed:
        raise ModelError("no models; give functions or classes that @cotenant.model marks")
    with tempfile.TemporaryDirectory(prefix="cotenant-") as root:
        for target in listed:
            _write_model(Path(root), target)
        yield Path(root)


def _write_model(root: Path, target: Callable[..., Any]) -> None:
    name = getattr(target, "__qualname__", repr(target))
    declaration = getattr(target, MARK, None)
    if not isinstance(declaration, Declaration):
        raise ModelError(f"{name} is not marked; put @cotenant.model(inputs=…, outputs=…) above it")
    if not name.isidentifier():
        raise ModelError(f"{name}: a worker cannot find it; define it at the top of a file")
    if not declaration.inputs or not declaration.outputs:
        raise ModelError(f"{name}: @cotenant.model needs inputs and outputs; there is no config.pbtxt that has them")
    folder = root / name
    if folder.exists():
        raise ModelError(f"{name}: two models of this name; rename one")
    (folder / "1").mkdir(parents=True)
    (folder / CONFIG).write_text(write_config(_config(declaration)))
    (folder / "1" / "model.py").write_text(_program(name, _source_of(target, name)))


def _source_of(target: Callable[..., Any], name: str) -> Path:
    try:
        file = Path(inspect.getsourcefile(target) or "").resolve()
    except TypeError:
        file = Path()
    if not file.is_file():
        raise ModelError(f"{name}: it is in no file that a worker could run; save it as one, and import it from there")
    return file


def _config(declaration: Declaration) -> dict[str, Any]:
    fields: dict[str, Any] = {"backend": "python", "max_batch_size": declaration.max_batch_size or 0}
    for field, tensors in (("input", declaration.inputs), ("output", declaration.outputs)):
        fields[field] = [
            {
                "name": tensor.name,
                "data_type": f"TYPE_{tensor.datatype.replace('BYTES', 'STRING')}",
                "dims": tensor.dims,
            }
            for tensor in tensors
        ]
    if declaration.sample_dims:
        inputs = {name: {"dims": dims} for name, dims in declaration.sample_dims.items()}
        fields["model_warmup"] = [{"inputs": inputs}]
    return fields


def _program(name: str, source: Path) -> str:
    """Return a file that finds the model in the program. The hash has profiles measured again when that changes."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return f"""# {digest}
import sys
from pathlib import Path

import cotenant
from cotenant.worker.python_model import load_callable

sys.path += [path for path in {[path for path in sys.path if path]!r} if path not in sys.path]
call = load_callable(Path({str(source)!r}), {name!r})


@cotenant.model()
def model(**inputs):
    return call(**inputs)
"""
