"""Keep what a job prints in a file of bounded size."""

from __future__ import annotations

import os
from pathlib import Path

LIMIT = 1 << 20  # bytes of one attempt; what it prints beyond is dropped
KEPT = 8 << 20  # bytes of earlier attempts from which on the file begins anew
_LAST = 4096  # bytes of which the last line is read


class OutputFile:
    """Append to a file up to `limit` bytes, and drop the rest with a note. A disk that is full drops it as well.

    header: a line before all that the job prints; empty for none.
    """

    def __init__(self, path: Path, *, header: str = "", limit: int = LIMIT) -> None:
        fresh = os.O_TRUNC if path.exists() and path.stat().st_size > KEPT else 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | fresh, 0o600)
        self._left = limit
        self._limit = limit
        self._last = b""
        if header:
            self.write(f"{header}\n".encode())
            self._last = b""  # a job that is silent has no last line

    def write(self, data: bytes) -> None:
        self._last = (self._last + data)[-_LAST:]
        if self._left <= 0:
            return
        kept = data[: self._left]
        self._left -= len(data)
        if self._left <= 0:
            kept += f"\n[more than {self._limit} bytes were printed: the rest is dropped]\n".encode()
        try:
            os.write(self._file, kept)
        except OSError:
            self._left = 0

    @property
    def last_line(self) -> str:
        """Return the last line that was printed and is not blank, dropped ones included."""
        lines = self._last.decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        os.close(self._file)
