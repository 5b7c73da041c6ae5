"""Read the rows of a file of inputs for a model: .npy, .npz or .jsonl."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from cotenant.core.tensor import DTYPES, TensorSpec
from cotenant.errors import ConfigError
from cotenant.worker.runners.arrays import Array

SUFFIXES = (".npy", ".npz", ".jsonl")


class InputRows(Protocol):
    """Give the rows of a file in batches. total: rows in the file."""

    total: int

    def batches(self, begin: int, size: int) -> Iterator[dict[str, Array]]:
        """Yield the inputs of `size` rows at a time, from row `begin` on. Raises ConfigError for rows that do not
        fit."""
        ...


def open_inputs(path: Path, specs: Sequence[TensorSpec], *, batched: bool) -> InputRows:
    """Open a file of inputs. specs: what the model takes. Raises ConfigError, naming file and way out."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file of inputs")
    shapes = {spec.name: _row_shape(spec, batched) for spec in specs}
    try:
        match path.suffix:
            case ".npy":
                if len(specs) != 1:
                    names = ", ".join(shapes)
                    raise ConfigError(f"{path}: a .npy file has one array, and the model takes {names}; give a .npz")
                arrays = {specs[0].name: np.load(path, mmap_mode="r", allow_pickle=False)}
                return _Arrays(path, specs, arrays, shapes)
            case ".npz":
                with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                    missing = [name for name in shapes if name not in stored.files]
                    if missing:
                        there = ", ".join(stored.files) or "none"
                        raise ConfigError(f"{path}: it has no array {missing[0]!r}; its arrays are {there}")
                    return _Arrays(path, specs, {name: stored[name] for name in shapes}, shapes)
            case ".jsonl":
                return _JsonLines(path, specs, shapes)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix}: {error}") from None
    raise ConfigError(f"{path}: inputs are read from {', '.join(SUFFIXES)}")


def _row_shape(spec: TensorSpec, batched: bool) -> tuple[int, ...]:
    return tuple(spec.shape[1:] if batched else spec.shape)


def _check_shape(place: str, spec: TensorSpec, found: Sequence[int], wanted: Sequence[int]) -> None:
    if len(found) != len(wanted) or any(size not in (-1, got) for size, got in zip(wanted, found, strict=True)):
        raise ConfigError(f"{place}: a row of {spec.name!r} has the shape {list(found)}, not {list(wanted)}")


def _converted(place: str, spec: TensorSpec, array: Array) -> Array:
    """Return an array of the model's datatype, where that loses no kind of value."""
    if spec.datatype == "BYTES":
        return array.astype(object)
    wanted = np.dtype(DTYPES[spec.datatype])
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise ConfigError(f"{place}: {spec.name!r} takes {spec.datatype}, and the file has {array.dtype}")
    return np.ascontiguousarray(array, wanted)


class _Arrays:
    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        arrays: Mapping[str, Array],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError(f"{path}: its arrays differ in rows: {counts}")
        for spec in specs:
            _check_shape(str(path), spec, arrays[spec.name].shape[1:], shapes[spec.name])
        self.total = next(iter(counts.values()))
        self._path = path
        self._specs = specs
        self._arrays = arrays

    def batches(self, begin: int, size: int) -> Iterator[dict[str, Array]]:
        for start in range(begin, self.total, size):
            place = f"{self._path}, row {start + 1}"
            yield {
                spec.name: _converted(place, spec, self._arrays[spec.name][start : start + size])
                for spec in self._specs
            }


class _JsonLines:
    """Lines are objects of inputs by name, one row each, without its batch dimension."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]]) -> None:
        with path.open("rb") as lines:
            self.total = sum(1 for line in lines if line.strip())
        self._path = path
        self._specs = specs
        self._shapes = shapes

    def batches(self, begin: int, size: int) -> Iterator[dict[str, Array]]:
        with self._path.open("rb") as lines:
            rows: list[dict[str, Array]] = []
            for row in self._rows(lines, begin):
                rows.append(row)
                if len(rows) == size:
                    yield self._stacked(rows)
                    rows = []
            if rows:
                yield self._stacked(rows)

    def _rows(self, lines: IO[bytes], begin: int) -> Iterator[dict[str, Array]]:
        passed = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if passed >= begin:
                yield self._row(f"{self._path}, line {number}", line)
            passed += 1

    def _row(self, place: str, line: bytes) -> dict[str, Array]:
        try:
            values: Any = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place}: no JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{place}: give an object of inputs by name")
        row = {}
        for spec in self._specs:
            if spec.name not in values:
                raise ConfigError(f"{place}: input {spec.name!r} is missing")
            try:
                if spec.datatype == "BYTES":
                    array = np.array(values[spec.name], object)
                else:
                    array = np.array(values[spec.name], DTYPES[spec.datatype])
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{place}: {spec.name!r} takes {spec.datatype}: {error}") from None
            _check_shape(place, spec, array.shape, self._shapes[spec.name])
            row[spec.name] = array
        return row

    def _stacked(self, rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        try:
            return {spec.name: np.stack([row[spec.name] for row in rows]) for spec in self._specs}
        except ValueError:
            raise ConfigError(f"{self._path}: rows differ in shape; ask for batches of 1") from None
