"""Processes that are started ahead: who takes them, and what becomes of those that nobody takes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.backends.fake import Fake
from cotenant.core.identity import LaneId
from cotenant.live import control_driver
from tests.cli.program import alive, workers_of
from tests.live.workers import PATIENCE, floats, pool_of, sleeper, spare, warm_workers
from tests.worker import graphs

LANE = LaneId.parse("cpu-0/0")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_driver, "TICK", 0.05)


class Together(Fake):
    """One process serves all lanes of a device."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return Launch(fake=True, process=str(lane.device))


def test_warm_pool_starting_lane_takes_the_worker_and_another_is_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu(), warm_workers=1) as (pool, told, _):
            model = graphs.identity(tmp_path / "m.onnx", 2)
            await pool.start(LANE, share=500, models=[model])
            first = await spare(pool)
            assert [status.lane for status in pool.status()] == [LANE]
            await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[model])
            assert pool.status()[1].pid == first and await spare(pool) != first
            assert os.getpriority(os.PRIO_PROCESS, first) == os.getpriority(os.PRIO_PROCESS, os.getpid())
            for lane in (LANE, "cpu-0/1"):
                assert await told.next() == ("ready", lane)
            pool.run(LaneId.parse("cpu-0/1"), 1, "identity", [floats(1, 2)])
            assert (await told.next())[3][0][0].array().tolist() == [[1, 2]]
            assert len(workers_of(os.getpid())) == 3
        assert workers_of(os.getpid()) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("backend", [Fake(), Together()], ids=["apart", "together"])
def test_warm_pool_restarting_lanes_take_the_worker(backend: Fake) -> None:
    async def scenario() -> None:
        async with pool_of(backend, warm_workers=1) as (pool, told, _):
            lanes = (LaneId.parse("gpu-0/0"), LaneId.parse("gpu-0/1"))
            for lane in lanes:
                await pool.start(lane, share=500, models=[sleeper(0.0)])
                assert await told.next() == ("ready", lane)
            waiting, dead = await spare(pool), pool.status()[0].pid
            assert dead is not None
            os.kill(dead, signal.SIGKILL)
            back = [status.lane for status in pool.status() if status.pid == dead]
            assert {await told.next() for _ in back} == {("died", lane, "it was killed by SIGKILL") for lane in back}
            assert {await told.next() for _ in back} == {("ready", lane) for lane in back}
            assert {status.pid for status in pool.status() if status.lane in back} == {waiting}
            pool.run(lanes[0], 1, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", lanes[0], 1)

    asyncio.run(scenario())


def test_warm_pool_worker_with_other_requirements_is_not_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pool_of(Cpu(), warm_workers=1) as (pool, _, _):
            await pool.start(LANE, share=500, models=[graphs.identity(tmp_path / "m.onnx", 2)])
            onnx = await spare(pool)
            pool._driver.pool._partitions.backend = Fake()
            await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[sleeper(0.0)])
            assert pool.status()[1].pid != onnx
            assert onnx in [process.pid for process in warm_workers(pool)]
            await pool.stop(LANE, grace=5.0)  # then nobody is left who could take it
            async with asyncio.timeout(PATIENCE):
                while alive(onnx):
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_warm_pool_worker_that_dies_is_not_replaced_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pool_of(Fake(), warm_workers=1) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            await told.next()
            os.kill(await spare(pool), signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                while warm_workers(pool):
                    await asyncio.sleep(0.01)
            pool._driver._tick()
            assert not warm_workers(pool) and pool.status()[0].restarts == 0
            await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[sleeper(0.0)])
            await spare(pool)

    asyncio.run(scenario())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].endswith("the next lane starts without one: it was killed by SIGKILL")


def test_warm_pool_worker_that_died_unnoticed_is_not_taken() -> None:
    async def scenario() -> None:
        async with pool_of(Fake(), warm_workers=1) as (pool, _, _):
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            os.kill(waiting := await spare(pool), signal.SIGKILL)
            while alive(waiting):
                time.sleep(0.001)  # the event loop is not to see it
            await pool.start(LaneId.parse("cpu-0/1"), share=300, models=[sleeper(0.0)])
            assert pool.status()[1].pid != waiting

    asyncio.run(scenario())


def test_warm_pool_without_room_lanes_start_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pool_of(Fake(), warm_workers=1) as (pool, told, _):
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            await told.next()
            await spare(pool)
            for process in warm_workers(pool):
                await process.stop("for this test")
            pool._driver.pool.processes._warm._failed.clear()
            with monkeypatch.context() as patched:
                patched.setattr(sys, "executable", "/nowhere/python")
                pool._driver._tick()
            assert warm_workers(pool) == []
            pool.run(LANE, 1, "sleeper", [floats(1, 2)])
            assert (await told.next())[:3] == ("finished", LANE, 1)

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said[-1].startswith("no process for a pre-started worker: No such file or directory")


def test_warm_pool_close_while_a_worker_starts_leaves_none() -> None:
    async def scenario() -> None:
        async with pool_of(Fake(), warm_workers=2) as (pool, _, _):
            await pool.start(LANE, share=500, models=[sleeper(0.0)])
            async with asyncio.timeout(PATIENCE):
                while len(warm_workers(pool)) < 2:
                    await asyncio.sleep(0.01)
        assert workers_of(os.getpid()) == []

    asyncio.run(scenario())


PARENT = """
import asyncio
from cotenant.backends.fake import Fake
from cotenant.core.identity import LaneId
from cotenant.live import control_driver
from tests.live.test_warm_pool import spare
from tests.live.workers import pool_of, sleeper

control_driver.TICK = 0.05

async def main():
    async with pool_of(Fake(), warm_workers=1) as (pool, told, _):
        await pool.start(LaneId.parse("fake-0/0"), share=500, models=[sleeper(100.0)])
        print(await spare(pool), flush=True)
        pool._driver.pool.processes._warm._count = 2
        await asyncio.sleep(100.0)

asyncio.run(main())
"""


def test_warm_pool_workers_of_a_killed_server_end() -> None:
    """One that waits, and one that starts."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    ) as parent:
        assert parent.stdout is not None
        waiting = int(parent.stdout.readline())
        deadline = time.monotonic() + PATIENCE
        while len(children := workers_of(parent.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(children) == 3 and waiting in children
        parent.kill()
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in children if alive(pid)] == []
