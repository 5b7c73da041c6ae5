"""File descriptors that are kept for workers, so that one can be started again where callers have taken all others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NEEDED = 16  # descriptors to start a worker process and connect to it, most of them for a moment only


class DescriptorReserve:
    """Hold descriptors open for nothing, and let go of them while a worker is started."""

    def __init__(self, size: int = NEEDED) -> None:
        self._size = size
        self._held: list[int] = []
        self._lent = 0
        self._fill()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within, the descriptors are free for whoever opens one. Afterwards as many are held again as there are."""
        self._lent += 1
        self._free()
        try:
            yield
        finally:
            self._lent -= 1
            self._fill()

    def close(self) -> None:
        """Let go of all descriptors for good."""
        self._size = 0
        self._free()

    def _free(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # there are no more: the next worker may still find one
            while not self._lent and len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
