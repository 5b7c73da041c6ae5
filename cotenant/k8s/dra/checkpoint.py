"""Keep what is prepared in a file that outlives the driver, and write files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from cotenant.errors import ConfigError
from cotenant.k8s.dra.preparation import PreparedClaim

FILE = "checkpoint.json"


class _Checkpoint(msgspec.Struct):
    version: Literal[1]
    claims: list[PreparedClaim]


class Checkpoint:
    """A file in a folder of the driver's own, which one driver at a time uses."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self) -> dict[str, PreparedClaim]:
        """Return the claims that are prepared, by uid. Raises ConfigError for a file that is not ours."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from None
        try:
            claims = msgspec.json.decode(text, type=_Checkpoint).claims
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._path}: is not a checkpoint of this driver ({error}); drain the node, then delete the file"
            ) from None
        return {each.uid: each for each in claims}

    def write(self, claims: Mapping[str, PreparedClaim]) -> None:
        """Write the claims that are prepared. Raises OSError."""
        value = _Checkpoint(1, [claims[uid] for uid in sorted(claims)])
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whenever the machine stops. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names of a folder on disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
