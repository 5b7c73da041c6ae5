"""Work beside a block ends with it, and ends it where it fails."""

from __future__ import annotations

import asyncio

import pytest

from cotenant.errors import DeviceError
from cotenant.k8s.background import beside


async def fails() -> None:
    raise KeyError("metadata")


async def lasts() -> None:
    await asyncio.Event().wait()


def test_block_is_cancelled_by_work_that_fails_and_raises_its_error() -> None:
    async def run() -> None:
        async with asyncio.timeout(30), beside(lasts(), fails()):
            await asyncio.Event().wait()

    with pytest.raises(KeyError, match="metadata"):
        asyncio.run(run())


def test_block_that_fails_raises_its_own_error_and_cancels_the_work() -> None:
    ended: list[bool] = []

    async def work() -> None:
        try:
            await lasts()
        finally:
            ended.append(True)

    async def run() -> None:
        async with asyncio.timeout(30), beside(work()):
            await asyncio.sleep(0)
            raise DeviceError("129 devices")

    with pytest.raises(DeviceError, match="129 devices"):
        asyncio.run(run())
    assert ended == [True]


def test_block_may_end_before_its_work() -> None:
    async def run() -> str:
        async with asyncio.timeout(30), beside(lasts(), lasts()):
            return "done"

    assert asyncio.run(run()) == "done"
