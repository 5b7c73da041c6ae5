"""Mirror a model repository of an object store, or of whatever else fsspec reads, into a local folder.

Models are loaded from files; so the store is copied, and only what has changed is copied again.
"""

from __future__ import annotations

import filecmp
import json
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping
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
                raise ConfigError(f"{self._url}: nothing found; name a folder of <model>/<version>/model.onnx")
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
            raise ConfigError(f"{self._url}: {relative[:100]!r} is not a path of a file in a repository; remove it")
        return str(PurePosixPath(relative))

    def _copy(self, files: Any, found: Mapping[str, tuple[str, Mapping[str, Any]]]) -> int:
        if len(found) > MAX_FILES:
            raise ConfigError(f"{self._url}: more than {MAX_FILES} files; name the folder of the models alone")
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._read_state()
        gone = known.keys() - found.keys()
        # A folder cannot take the place of a file that is still there, nor the reverse.
        above = {parent for relative in found for parent in _parents(relative)}
        in_the_way = {each for each in gone if each in above or not found.keys().isdisjoint(_parents(each))}
        copied = 0
        try:
            self._remove(in_the_way, known)
            for relative, (path, info) in found.items():
                copied += self._copy_file(files, path, relative, _tag(info) or _tag(files.info(path)), known)
            self._remove(gone - in_the_way, known)
        finally:
            self._write_state(known)
        return copied

    def _copy_file(self, files: Any, path: str, relative: str, tag: str, known: dict[str, str]) -> bool:
        """Copy a file unless its tag is known already; return whether it has changed. Without a tag it is compared."""
        target = self.folder / relative
        if tag and known.get(relative) == tag and target.is_file():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as made:
            partial = Path(made.name)
        try:
            files.get_file(path, str(partial))
            changed = not (target.is_file() and filecmp.cmp(partial, target, shallow=False))
            if changed:
                partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        known[relative] = tag
        return changed

    def _remove(self, gone: Collection[str], known: dict[str, str]) -> None:
        """Remove files, and the folders that they leave empty."""
        for relative in sorted(gone):
            (self.folder / relative).unlink(missing_ok=True)
            del known[relative]
            for parent in _parents(relative):
                folder = self.folder / parent
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()

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
    """Return what changes with a file's content; "" where a store does not tell."""
    found = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    return f"{info.get('size')} {found}" if found else ""


def _parents(relative: str) -> Iterator[str]:
    """Yield the folders of a path, the innermost first."""
    for parent in PurePosixPath(relative).parents:
        if parent.parts:
            yield str(parent)
