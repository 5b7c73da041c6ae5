"""Wait for what other tasks and processes bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def eventually(holds: Callable[[], Any] | Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
    """Return what `holds` returns as soon as that is true. Raises AssertionError where it is not within `seconds`."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        value = holds()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < end, f"not within {seconds:g} s: {holds}"
        await asyncio.sleep(0.01)
