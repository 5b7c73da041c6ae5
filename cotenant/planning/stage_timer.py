"""Measure the processing time of the stages of planning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StageTimer:
    """Measure the time of each stage; a nested stage's time counts for the nested stage alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: in seconds."""
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._running: list[str] = []
        self._since = clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._count()
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function with each of its calls measured as that stage."""

        def call(*args: P.args, **options: P.kwargs) -> T:
            with self.stage(name):
                return function(*args, **options)

        return call

    def rounded(self) -> dict[str, float]:
        """Return the seconds of each stage, to a microsecond."""
        return {stage: round(seconds, 6) for stage, seconds in self.seconds.items()}

    def _count(self) -> None:
        now = self._clock()
        if self._running:
            stage = self._running[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now
