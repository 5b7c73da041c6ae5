"""An event loop in virtual time: sockets and pipes are real, and where nothing is to be read its clock goes on to the
next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

CALL = 0.0031  # seconds that a call in an executor takes


class _Selector(selectors.DefaultSelector):
    """Waits for nobody: it lets the clock go on instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen any more")
        if not ready and timeout is not None and timeout > 0:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0. Calls in executors are made in the loop's thread, one after the other, each a little later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.problems: list[str] = []  # exceptions that nobody caught
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9
        self._turn = 0.0
        self.set_exception_handler(self._uncaught)

    def time(self) -> float:
        return self.now

    def jump(self, seconds: float) -> None:
        """The machine or the process slept: all timers of that time are due at once."""
        self.now += seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Args], _Result], *args: *_Args
    ) -> asyncio.Future[_Result]:
        future: asyncio.Future[_Result] = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001  # the caller's
                future.set_exception(error)

        self._turn = max(self._turn, self.now) + CALL
        self.call_at(self._turn, call)
        return future

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"nobody caught {context.get('exception')!r}: {context['message']}")


class Clock:
    """Stands for the module `time` where that is read directly."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time
