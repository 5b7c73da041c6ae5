"""Ctrl-C, in its own file because every command needs it and few can afford to import a server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Interrupted(Exception):  # noqa: N818
    """A signal asked the program to end."""


@asynccontextmanager
async def interruptible() -> AsyncIterator[asyncio.Event]:
    """Within, the first SIGINT or SIGTERM sets the event and cancels what runs; the next ends the process at once."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    task = asyncio.current_task()

    def on_signal() -> None:
        if asked.is_set():
            os._exit(130)  # workers follow: their parent is gone
        asked.set()
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield asked
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
        raise Interrupted from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
