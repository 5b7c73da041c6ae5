"""Tell how far profiling is. Nothing else is imported with it: every command shows progress."""

from __future__ import annotations

import time
from collections.abc import Callable


class ProfilingPace:
    """Say how far profiling is, and how long the rest takes at the pace so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: float | None = None

    def __call__(self, model: str, done: int, total: int, number: int, count: int) -> str:
        """Return the progress in words; arguments are those of `Progress`."""
        now = self._clock()
        self._begun = now if self._begun is None else self._begun
        text = f"profiling {model}, model {number} of {count}"
        part = (number - 1 + done / total) / count
        seconds = now - self._begun
        return text if not part or not seconds else f"{text}, about {seconds / part * (1 - part):.0f} s left"
