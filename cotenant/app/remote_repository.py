"""Mirror a model repository of an object store, or of whatever else fsspec reads, into a local folder.

Models are loaded from files; so the store is copied, and only what has changed is copied again.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from cotenant.errors import ConfigError

logger = logging.getLogger(__name__)

STATE = ".cotenant-mirror.json"  # in the mirror: what was copied, by path
MAX_FILES = 100_000
# What tells one content from another, in the order of preference: stores have some of these.
_TAGS = ("ETag", "etag", "md5", "content_md5", "generation", "LastModified", "last_modified", "mtime", "created")


class RemoteRepository:
    """Copy a store to a folder. url: such as ``s3://bucket/models``. options: fsspec's, such as an endpoint."""

    def __init__(self, url: str, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self._url = url
        self._options = dict(options or {})

    def synchronise(self, *, first: bool = False) -> None:
        """Make the folder what the store is now. Files are replaced as a whole; others than those copied are let be.

        first: a store that cannot be read costs a warning, where an earlier run has copied it. Raises ConfigError.
        """
        try:
            copied = self._synchronise()
        except ConfigError as error:
            if not first or not (self.folder / STATE).exists():
                raise
            logger.warning("%s; serving what was copied before, from %s", error, self.folder)
        else:
            if copied:
                logger.info("copied %d files of %s", copied, self._url)

    def _synchronise(self) -> int:
        try:
            import fsspec
        except ModuleNotFoundError:
            raise ConfigError(f"{self._url}: fsspec is not installed; run `pip install 'cotenant[remote]'`") from None
        try:
            files, root = fsspec.core.url_to_fs(self._url, **self._options)
            files.invalidate_cache()
            found = {self._relative(path, root): (path, info) for path, info in files.find(root, detail=True).items()}
            if not found and not files.exists(root):
                raise ConfigError(f"{self._url}: there is nothing; name a folder of <model>/<version>/model.onnx")
            return self._copy(files, found)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # each store raises its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self._url}: cannot be read: {reason[:300]}") from None

    def _relative(self, path: str, root: str) -> str:
        """Return a file's path below the root. Raises ConfigError for one that would lead out of the mirror."""
        relative = path.removeprefix(root.rstrip("/")).lstrip("/")
        parts = PurePosixPath(relative).parts
        if not parts or "\\" in relative or "\0" in relative or any(part in ("..", ".", STATE) for part in parts):
            raise ConfigError(f"{self._url}: {relative[:100]!r} is no path of a file in a repository; remove it")
        return str(PurePosixPath(relative))

    def _copy(self, files: Any, found: Mapping[str, tuple[str, Mapping[str, Any]]]) -> int:
        if len(found) > MAX_FILES:
            raise ConfigError(f"{self._url}: more than {MAX_FILES} files; name the folder of the models alone")
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._read_state()
        copied = 0
        for relative, (path, info) in found.items():
            target, tag = self.folder / relative, _tag(info)
            if known.get(relative) == tag and target.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as partial:
                pass
            try:
                files.get_file(path, partial.name)
                Path(partial.name).replace(target)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise
            known[relative] = tag
            copied += 1
            self._write_state(known)
        for relative in sorted(known.keys() - found.keys()):
            (self.folder / relative).unlink(missing_ok=True)
            del known[relative]
            for parent in _parents(relative):
                folder = self.folder / parent
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        self._write_state(known)
        return copied

    def _read_state(self) -> dict[str, str]:
        try:
            state: dict[str, str] = json.loads((self.folder / STATE).read_text())
        except (OSError, ValueError):
            return {}
        return state

    def _write_state(self, known: Mapping[str, str]) -> None:
        partial = self.folder / f"{STATE}.new"
        partial.write_text(json.dumps(known))
        partial.replace(self.folder / STATE)


def _tag(info: Mapping[str, Any]) -> str:
    """Return what changes with a file's content."""
    return f"{info.get('size')} {next((str(info[name]) for name in _TAGS if info.get(name)), '')}"


def _parents(relative: str) -> Iterator[str]:
    """Yield the folders of a path, the innermost first."""
    for parent in PurePosixPath(relative).parents:
        if parent.parts:
            yield str(parent)
