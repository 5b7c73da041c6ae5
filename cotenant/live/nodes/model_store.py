"""Keep the models that front ends send to a node, each under the hash of its files, within a bound."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from cotenant.core.units import show_memory
from cotenant.errors import ConfigError, NodeError
from cotenant.live.nodes.messages import ModelFile
from cotenant.live.nodes.model_files import MAX_FILES, FolderReader, digest_of, inner_path

logger = logging.getLogger(__name__)

PART = 1 << 20  # bytes that are sent at once


class ModelStore:
    """Find models, and take in those that are missing. Slow: not for an event loop.

    folder: of the cache. bound: bytes of all models in it. repository: of models, where the front end sees it, too;
    what has the same contents there is used from there.
    """

    def __init__(self, folder: Path, bound: int, repository: Path | None = None) -> None:
        self._folder = folder
        self._bound = bound
        self._repository = repository
        self._reader = FolderReader()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in folder.glob(".incoming-*"):
                shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot keep models: {error.strerror}; set node.cache to a folder") from None

    def find(self, digest: bytes, name: str, files: Sequence[ModelFile]) -> Path | None:
        """Return the folder that has these files; None where they have to be sent. Raises NodeError for a list that is
        none."""
        check_list(digest, files)
        if self._repository is not None:
            shared = self._repository / inner_path(name)
            if self._reader.read_listed(shared, files) == digest:
                return shared
        kept = self._folder / digest.hex()
        if not kept.is_dir():
            return None
        if self._reader.read_listed(kept, files) != digest:
            logger.warning("%s has changed; it is sent again", kept)
            shutil.rmtree(kept, ignore_errors=True)
            return None
        try:
            os.utime(kept)
        except OSError:  # another model has taken its room meanwhile
            return None
        return kept

    def receive(self, digest: bytes, files: Sequence[ModelFile], in_use: Collection[Path]) -> Incoming:
        """Make room for a model, and begin to take it in. in_use: folders that stay. Raises NodeError where there is no
        room."""
        size = sum(file.size for file in files)
        if size > self._bound:
            raise NodeError(
                f"the model has {show_memory(size)}, and this node keeps {show_memory(self._bound)} of models; raise "
                "node.cache_size, or give it the repository (node.model_repository)"
            )
        try:
            self._make_room(size, in_use)
            return Incoming(self._folder, digest, files)
        except OSError as error:
            raise NodeError(f"the node cannot keep the model: {error.strerror}") from None

    def _make_room(self, size: int, in_use: Collection[Path]) -> None:
        """Remove the models that were used longest ago. Those in use may exceed the bound: they run."""
        kept = [folder for folder in self._folder.iterdir() if not folder.name.startswith(".")]
        kept.sort(key=lambda folder: folder.stat().st_mtime)
        sizes = {folder: _size_of(folder) for folder in kept}
        total = sum(sizes.values())
        for folder in kept:
            if total + size <= self._bound:
                return
            if folder not in in_use:
                shutil.rmtree(folder)
                total -= sizes[folder]


class Incoming:
    """A model that is being received, part after part, file after file, in order."""

    def __init__(self, folder: Path, digest: bytes, files: Sequence[ModelFile]) -> None:
        self._place = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder))
        self._final = folder / digest.hex()
        self._files = files
        self._number = 0
        self._offset = 0
        self._hash = hashlib.sha256()

    def take(self, file: int, offset: int, data: memoryview | bytes) -> Path | None:
        """Write a part; return the model's folder after the last one. Raises NodeError for a part that is not the next,
        and for a file that is not what the list says."""
        if file != self._number or offset != self._offset or file >= len(self._files):
            raise NodeError(f"part {offset} of file {file} of a model was sent, not the next one")
        listed = self._files[file]
        if offset + len(data) > listed.size or (not data and listed.size):
            raise NodeError(f"{listed.path}: more, or less, was sent than its {listed.size} bytes")
        path = self._place / inner_path(listed.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as out:
                out.write(data)
        except OSError as error:
            raise NodeError(f"the node cannot keep the model: {error.strerror}") from None
        self._hash.update(data)
        self._offset += len(data)
        if self._offset < listed.size:
            return None
        if self._hash.digest() != listed.digest:
            raise NodeError(f"{listed.path}: what was sent is not what its hash says")
        self._number, self._offset, self._hash = file + 1, 0, hashlib.sha256()
        return self._finish() if self._number == len(self._files) else None

    def _finish(self) -> Path:
        with suppress(OSError):  # it is there already: another session has sent it
            self._place.replace(self._final)
        self.drop()
        return self._final

    def drop(self) -> None:
        """Forget what was received so far. Harmless once all of it was."""
        shutil.rmtree(self._place, ignore_errors=True)


def check_list(digest: bytes, files: Sequence[ModelFile]) -> None:
    """Raise NodeError unless a list of files is what its digest says, and names files within a folder, each once."""
    if not files or len(files) > MAX_FILES or digest_of(files) != digest:
        raise NodeError("the list of a model's files is not what its hash says")
    paths = [inner_path(file.path) for file in files]
    folders = {parent for path in paths for parent in path.parents}
    if len(set(paths)) < len(paths) or folders & set(paths) or any(file.size < 0 for file in files):
        raise NodeError("the list of a model's files names one twice, or a folder as a file")


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
