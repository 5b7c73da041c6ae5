"""List the files of a model, and name them together by a hash: the same files have the same name on every machine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from cotenant.errors import ModelError, NodeError
from cotenant.live.nodes.messages import ModelFile

MAX_FILES = 1 << 12  # of a model
MAX_DEPTH = 16  # of folders
MAX_PATH = 1 << 10  # characters

_VERSION = re.compile("[1-9][0-9]*")


class ModelFolder(msgspec.Struct, frozen=True):
    """Describe what of a folder a model's file needs. root: of the model. files: below it. path: of the model's file,
    which is one of these. digest: of the list."""

    root: Path
    path: str
    files: tuple[ModelFile, ...]
    digest: bytes


def digest_of(files: Sequence[ModelFile]) -> bytes:
    """Return the SHA-256 of a list of files: of their names, sizes and contents."""
    listed = hashlib.sha256(b"cotenant model\0")
    for file in sorted(files, key=lambda file: file.path):
        listed.update(msgspec.msgpack.encode(file))
    return listed.digest()


class FolderReader:
    """Read folders of models, and hash each file once for as long as it stays as it is."""

    def __init__(self) -> None:
        self._digests: dict[Path, tuple[tuple[int, int, int], bytes]] = {}

    def read(self, path: Path) -> ModelFolder:
        """Return what belongs to a model's file: all of its version's folder and what lies beside the versions, or the
        file alone where it is in no version's folder. Raises ModelError for what cannot be read."""
        version = next((parent for parent in path.parents if _VERSION.fullmatch(parent.name)), None)
        root = path.parent if version is None else version.parent
        try:
            found = [path] if version is None else list(_files_below(root, version.name))
            files = tuple(self._describe(root, file) for file in sorted(found))
        except OSError as error:
            raise ModelError(f"{error.filename or path}: cannot read the model: {error.strerror}") from None
        if len(files) > MAX_FILES:
            raise ModelError(f"{root}: {len(files)} files; a model that is sent to nodes has {MAX_FILES} at most")
        return ModelFolder(root, path.relative_to(root).as_posix(), files, digest_of(files))

    def read_listed(self, root: Path, wanted: Sequence[ModelFile]) -> bytes | None:
        """Return the digest of those files of a folder that a list names; None where one is missing."""
        try:
            return digest_of([self._describe(root, root / inner_path(file.path)) for file in wanted])
        except OSError:
            return None

    def _describe(self, root: Path, file: Path) -> ModelFile:
        with file.open("rb") as opened:
            about = os.fstat(opened.fileno())
            stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
            known = self._digests.get(file)
            if known is None or known[0] != stamp:
                known = self._digests[file] = stamp, hashlib.file_digest(opened, "sha256").digest()
        return ModelFile(file.relative_to(root).as_posix(), about.st_size, known[1])


def _files_below(root: Path, version: str) -> Iterator[Path]:
    """Yield the files of a model's folder but for those of other versions. What a link leads out of it is left out."""
    inside = root.resolve()
    for folder, names, files in os.walk(root, followlinks=True):
        here = Path(folder)
        if here == root:
            names[:] = [name for name in names if name == version or not _VERSION.fullmatch(name)]
        names[:] = [name for name in names if (here / name).resolve().is_relative_to(inside)]
        if len(here.relative_to(root).parts) >= MAX_DEPTH:
            names.clear()
        for name in files:
            if (here / name).resolve().is_relative_to(inside):
                yield here / name


def inner_path(path: str) -> Path:
    """Return a path that leads into a folder, and nowhere else. Raises NodeError."""
    inner = PurePosixPath(path)
    odd = not path or len(path) > MAX_PATH or "\0" in path or "\\" in path or inner.is_absolute()
    if odd or ".." in inner.parts or str(inner) != path or len(inner.parts) > MAX_DEPTH + 1:
        raise NodeError(f"{path[:MAX_PATH]!r} is not a path of a file within a model's folder")
    return Path(inner)
