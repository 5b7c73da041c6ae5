"""Keep ONNX models as ONNX Runtime has optimised them, so that a start takes little from the workers that serve.

Loading ResNet-18 from its own file takes 0.24 s of processor time, 52,000 page faults and 165 MiB, which slow the
batches of others; optimised, and mapped from a file in ONNX Runtime's own format, 0.02 s, 1,000 faults and 25 MiB, and
workers share the weights (`docs/benchmarks.md`). Such a file holds for the version of ONNX Runtime and the processor
that it was made for, so both are part of its name, as is what tells whether the model's file has changed. Any may be
missing, broken or not to be written: then the model is loaded from its own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

MIN_SIZE = 1 << 20  # bytes of a model's file, below which optimising takes no time to speak of
MAX_TOTAL = 4 << 30  # bytes that are kept; beyond that, what was used longest ago goes


def folder() -> Path:
    """Return ``$XDG_CACHE_HOME/cotenant/optimised``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cotenant" / "optimised"


def kept_path(model: Path, runtime: str) -> Path | None:
    """Return where a model is kept, optimised by a version of ONNX Runtime for this machine's processor; None for one
    that is not worth it. Another file, or one that was written to, has another inode or other times."""
    try:
        known = model.stat()
    except OSError:
        return None
    if known.st_size < MIN_SIZE:
        return None
    stamp = (known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns)
    words = "\0".join((str(model.resolve()), *map(str, stamp), runtime, _processor()))
    return folder() / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.ort"


def mark_used(kept: Path) -> None:
    """Note that a file is used now. Raises OSError where there is none, or none that this user has written."""
    found = kept.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise FileNotFoundError(kept)
    os.utime(kept)


def keep(kept: Path, write: Callable[[str], None]) -> None:
    """Have a model written to a file that takes this place once it is complete. write: to a path. Raises OSError, and
    what `write` does."""
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=kept.parent, prefix=".", suffix=".ort")
    os.close(handle)
    try:
        write(temporary)
        with Path(temporary).open("rb") as written:
            os.fsync(written.fileno())  # else a machine that loses power may leave it with holes, which nobody notices
        Path(temporary).replace(kept)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    _make_room(kept)


def _make_room(fresh: Path) -> None:
    """Remove what was used longest ago while more is kept than `MAX_TOTAL`."""
    with contextlib.suppress(OSError):  # another worker does the same
        files = sorted((file.stat().st_mtime, file.stat().st_size, file) for file in fresh.parent.glob("*.ort"))
        total = sum(size for _, size, _ in files)
        for _, size, file in files:
            if total <= MAX_TOTAL or file == fresh:
                break
            file.unlink(missing_ok=True)
            total -= size


def _processor() -> str:
    """Describe the processor, in words that change with its instructions: some layouts of weights depend on them."""
    words = [os.uname().machine]
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:  # of the first processor
            if not line.strip():
                break
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                words.append(line.strip())
    return " ".join(words)
