"""Run what takes long in a thread, and go on in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_in_thread(
    then: Callable[[asyncio.Future[_T]], None],
    work: Callable[..., _T],
    *args: Any,
    executor: Executor | None = None,
) -> None:
    """Run work in a thread, and call `then` with its future, which is done, in the event loop.

    Nothing that the work raises outlives `then`. An error that is raised out of a future holds its traceback, that the
    frame in which it was raised, and that the future, which holds the error: a cycle, which would keep a request's
    body until the garbage collector finds it, and a server that is idle collects no garbage.
    """

    loop = asyncio.get_running_loop()

    def done(future: asyncio.Future[_T]) -> None:
        try:
            then(future)
        finally:
            if not future.cancelled() and (error := future.exception()) is not None:
                loop.call_soon(error.with_traceback, None)  # once the loop has logged what `then` raised

    loop.run_in_executor(executor, work, *args).add_done_callback(done)
