"""Run scenarios against an API double."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cotenant.k8s.client import ApiClient
from tests.k8s.api_double import ApiDouble, api_double, client_of

Scenario = Callable[[ApiDouble, ApiClient], Coroutine[Any, Any, Any]]


def play(scenario: Scenario, seconds: float = 60.0) -> Any:
    """Run a scenario against an API double of its own, with a client of it, and return what it returns."""

    async def run() -> Any:
        async with asyncio.timeout(seconds), api_double() as api, client_of(api.url) as client:
            return await scenario(api, client)

    return asyncio.run(run())
