"""An event loop in virtual time, for tests without sockets and processes of their own."""

from __future__ import annotations

import asyncio

import looptime


def virtual_loop() -> asyncio.AbstractEventLoop:
    """Return a loop that starts at 0 and goes on to the next timer as soon as nothing else is to be done.

    asyncio asks for that only then, so the 42 empty turns that looptime makes first by default are of no use, and take
    most of the time.
    """
    return looptime.new_event_loop(start=0.0, resolution=1e-9, noop_cycles=0)
