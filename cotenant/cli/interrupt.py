"""Handle Ctrl-C; in its own file because every command needs it and few can afford to import a server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Interrupted(Exception):  # noqa: N818
    """Report that a signal asked the program to end. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@asynccontextmanager
async def interruptible() -> AsyncIterator[asyncio.Event]:
    """Set the event and cancel the block on the first SIGINT or SIGTERM; the next one ends the process at once."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    first = 0
    task = asyncio.current_task()

    def on_signal(number: int) -> None:
        nonlocal first
        if asked.is_set():
            os._exit(128 + number)  # workers exit when their parent does
        asked.set()
        first = number
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield asked
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
        raise Interrupted(first) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
