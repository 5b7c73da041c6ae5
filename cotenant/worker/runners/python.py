"""Run models that are functions or classes of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.core.tensor import DTYPES, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker.python_model import brief, line_of, load_callable
from cotenant.worker.runners.arrays import Array
from cotenant.worker.wire import WorkerModel


class Python:
    """Call a model with arrays by name. What it allocates on a device of its own accord is not seen."""

    device = 0.0
    memory = 0
    warmed = False

    def __init__(self, model: WorkerModel, stream: int | None = None) -> None:
        if stream:
            raise ModelError(
                f"{model.path}: a Python model does not keep to a green context; serve it with another backend"
            )
        self.model = model
        self._path = Path(model.path)
        self._call = load_callable(self._path)

    def join(self, name: str, parts: Sequence[Array], shape: tuple[int, ...]) -> None:
        return None

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        for array in inputs.values():
            array.flags.writeable = False  # a large one is the caller's own bytes, which other steps and retries read
        try:
            returned = self._call(**inputs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 user code
            place = f"{self._path.name}{line_of(self._path, error)}"
            raise ModelError(f"{place}: {brief(error)}") from None
        rows = next(iter(inputs.values())).shape[0] if self.model.batched and inputs else None
        return [(spec.name, _array(spec, value, rows)) for spec, value in self._by_output(returned)]

    def _by_output(self, returned: Any) -> list[tuple[TensorSpec, Any]]:
        specs = self.model.outputs
        if isinstance(returned, Mapping):
            missing = [spec.name for spec in specs if spec.name not in returned]
            if missing:
                raise ModelError(f"no output {missing[0]!r}; the model returns {', '.join(map(str, returned))}")
            return [(spec, returned[spec.name]) for spec in specs]
        if len(specs) > 1:
            raise ModelError(
                f"the model returns a {type(returned).__name__} for {len(specs)} outputs; return a dict of them"
            )
        return [(specs[0], returned)]

    def improve(self) -> bool:
        return False

    def minimum_seconds(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        del self._call


def _array(spec: TensorSpec, value: Any, rows: int | None) -> Array:
    """Return an output as an array of its datatype. rows: of the batch; None where there is none. Raises ModelError."""
    strings = spec.datatype == "BYTES"
    wanted = np.dtype(object) if strings else DTYPES[spec.datatype]
    try:
        array = np.asarray(value, dtype=object if strings else None)
    except ValueError as error:  # such as rows of different lengths
        raise ModelError(f"output {spec.name!r} is not an array: {error}") from None
    integers = array.dtype.kind in "iu" and wanted.kind in "iu"
    if not strings and not integers and not np.can_cast(array.dtype, wanted, "same_kind"):
        raise ModelError(f"output {spec.name!r} is {array.dtype}, but {spec.datatype} is declared; convert it")
    shape = spec.shape if rows is None else (rows, *spec.shape[1:])
    if len(array.shape) != len(shape) or any(
        want not in (-1, have) for have, want in zip(array.shape, shape, strict=True)
    ):
        raise ModelError(f"output {spec.name!r} has the shape {list(array.shape)}; {list(shape)} is declared")
    if integers and array.size:
        _check_range(spec, array)
    try:
        with np.errstate(over="raise"):
            return array.astype(wanted, copy=False)
    except FloatingPointError:
        raise ModelError(f"output {spec.name!r} has numbers that are too large for {spec.datatype}") from None


def _check_range(spec: TensorSpec, array: Array) -> None:
    """Raise ModelError where integers do not fit into the datatype of an output."""
    allowed = np.iinfo(DTYPES[spec.datatype])
    for value in (int(array.min()), int(array.max())):
        if not allowed.min <= value <= allowed.max:
            raise ModelError(f"output {spec.name!r} has {value}, which {spec.datatype} cannot hold")
