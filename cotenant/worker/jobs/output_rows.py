"""Write the outputs of batch inference so that a restart goes on after the last finished batch.

Outputs are appended to a file each in the checkpoint folder, and a small file there says how much of them counts: what
was written after it, by an attempt that crashed, is cut off by the next. At the end the output file is put together
beside its place and moved there in one step, so that whoever finds it finds all of it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.worker.runners.arrays import Array

SUFFIXES = (".npy", ".npz", ".jsonl")
_STATE = "inference.json"
_COPY = 1 << 20  # bytes at a time


class _Part(msgspec.Struct, frozen=True):
    """What is there of an output. shape: of one row."""

    dtype: str
    shape: tuple[int, ...]


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that are done, and the bytes of each file that they take. asked: what the job was, so that another does not
    go on with its outputs."""

    asked: str
    rows: int = 0
    sizes: dict[str, int] = {}
    parts: dict[str, _Part] = {}


class OutputRows:
    """Append batches of outputs. path: of the output file. folder: for what is unfinished. asked: identifies what is
    computed. Raises ConfigError for a path that cannot be written."""

    def __init__(self, path: Path, folder: Path, asked: str) -> None:
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: outputs are written to {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK) or path.is_dir():
            raise ConfigError(f"{path}: cannot be written by the user that the server runs as")
        self._path = path
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._state = self._restored(asked)

    @property
    def rows(self) -> int:
        """Rows that are done."""
        return self._state.rows

    def append(self, outputs: Sequence[tuple[str, Array]], rows: int) -> None:
        """Add a batch. Raises ConfigError for outputs that the file cannot hold, OSError for a full disk."""
        state = self._state
        parts = state.parts or {name: _Part(array.dtype.str, array.shape[1:]) for name, array in outputs}
        if self._path.suffix == ".jsonl":
            self._write("rows", b"".join(_line(outputs, row) for row in range(rows)))
        else:
            self._append_arrays(outputs, parts)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        self._keep(_State(asked=state.asked, rows=state.rows + rows, sizes=sizes, parts=parts))

    def _append_arrays(self, outputs: Sequence[tuple[str, Array]], parts: dict[str, _Part]) -> None:
        if self._path.suffix == ".npy" and len(outputs) != 1:
            names = ", ".join(name for name, _ in outputs)
            raise ConfigError(f"{self._path}: the model has the outputs {names}; write a .npz or a .jsonl")
        for name, array in outputs:
            if array.dtype == object:
                raise ConfigError(f"{self._path}: output {name!r} is of strings; write a .jsonl")
            found = _Part(array.dtype.str, array.shape[1:])
            if found != parts.get(name):
                raise ConfigError(f"{self._path}: output {name!r} differs in shape from row to row; write a .jsonl")
            self._write(name, np.ascontiguousarray(array).tobytes())

    def finish(self) -> None:
        """Put the output file in its place, and remove what was unfinished."""
        for file in self._files.values():
            file.close()
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                self._assemble(file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        finally:
            beside.unlink(missing_ok=True)
        for name in self._state.sizes:
            self._part(name).unlink(missing_ok=True)
        (self._folder / _STATE).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave what is unfinished to the next attempt."""
        for file in self._files.values():
            file.close()

    def _assemble(self, file: IO[bytes]) -> None:
        state = self._state
        if self._path.suffix == ".jsonl":
            self._copy("rows", file)
        elif self._path.suffix == ".npy":
            for name, part in state.parts.items():
                _write_header(file, part, state.rows)
                self._copy(name, file)
        else:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, part in state.parts.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        _write_header(entry, part, state.rows)
                        self._copy(name, entry)

    def _copy(self, name: str, into: IO[bytes]) -> None:
        left = self._state.sizes.get(name, 0)
        if not left:
            return
        with self._part(name).open("rb") as source:
            while left:
                data = source.read(min(_COPY, left))
                if not data:
                    raise OSError(f"{self._part(name)} is shorter than it was")
                into.write(data)
                left -= len(data)

    def _write(self, name: str, data: bytes) -> None:
        if name not in self._files:
            self._files[name] = self._part(name).open("ab")
        self._files[name].write(data)

    def _part(self, name: str) -> Path:
        """Return the file of an output, whose name may be anything."""
        return self._folder / f"{base64.urlsafe_b64encode(name.encode()).decode()}.part"

    def _keep(self, state: _State) -> None:
        beside = self._folder / f"{_STATE}.new"
        beside.write_bytes(msgspec.json.encode(state))
        beside.replace(self._folder / _STATE)
        self._state = state

    def _restored(self, asked: str) -> _State:
        """Return what earlier attempts have done, with the files cut to it; nothing where that is unknown."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            state = msgspec.json.decode((self._folder / _STATE).read_bytes(), type=_State)
            if state.asked == asked and all(
                self._part(name).stat().st_size >= size for name, size in state.sizes.items()
            ):
                for name, size in state.sizes.items():
                    os.truncate(self._part(name), size)
                    self._files[name] = self._part(name).open("ab")
                return state
        for part in self._folder.glob("*.part"):
            part.unlink()
        return _State(asked=asked)


def _write_header(file: IO[bytes], part: _Part, rows: int) -> None:
    header = {"descr": part.dtype, "fortran_order": False, "shape": (rows, *part.shape)}
    np.lib.format.write_array_header_1_0(file, header)


def _line(outputs: Sequence[tuple[str, Array]], row: int) -> bytes:
    return json.dumps({name: _plain(array[row]) for name, array in outputs}).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a row as JSON takes it."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return _texts(listed)


def _texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_texts(each) for each in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value
