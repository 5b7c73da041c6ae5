"""A pool with real worker processes, and a listener that tests can ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.backends import Backend
from cotenant.core.identity import LaneId
from cotenant.core.tensor import Tensor, TensorSpec
from cotenant.errors import RequestError
from cotenant.live.batch_listener import Payload
from cotenant.live.process import WorkerProcess
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel

PATIENCE = 60.0  # seconds until a test that waits for something fails


class Recorder:
    """Keeps what the pool says, as tuples that begin with the name of the call."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def ready(self, lane: LaneId) -> None:
        self.told.put_nowait(("ready", lane))

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        self.told.put_nowait(("finished", lane, batch, answers, timing))

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        self.told.put_nowait(("failed", lane, batch, reason))

    def died(self, lane: LaneId, reason: str) -> None:
        self.told.put_nowait(("died", lane, reason))

    async def next(self) -> tuple[Any, ...]:
        return await asyncio.wait_for(self.told.get(), PATIENCE)


@asynccontextmanager
async def pool_of(
    backend: Backend, *, size: int = 1 << 24, **options: Any
) -> AsyncIterator[tuple[SupervisedPool, Recorder, Arena]]:
    """Closes the pool, and checks that neither a process nor a byte of the arena is left."""
    recorder, arena = Recorder(), Arena(size)
    pool = SupervisedPool(backend, arena, recorder, **options)
    try:
        yield pool, recorder, arena
        pids = [status.pid for status in pool.status() if status.pid]
    finally:
        await pool.close(grace=5.0)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    while not recorder.told.empty():
        recorder.told.get_nowait()
    assert arena.free == arena.size
    arena.close()


def warm_workers(pool: SupervisedPool) -> list[WorkerProcess]:
    return [process for kept in pool._driver.pool.processes._warm._kept.values() for process in kept]


async def spare(pool: SupervisedPool) -> int:
    """The number of the only one, as soon as it is ready. It gives way to all else that runs here meanwhile."""
    async with asyncio.timeout(3 * PATIENCE):
        while not pool.warm_workers:
            await asyncio.sleep(0.01)
    (found,) = warm_workers(pool)
    return found.pid


def sleeper(seconds: float, *, max_batch: int = 1, name: str = "sleeper") -> WorkerModel:
    """A fake model that repeats its input, two floats a row."""
    return WorkerModel(
        name=name,
        max_batch=max_batch,
        inputs=(TensorSpec("x", "FP32", (-1, 2)),),
        outputs=(TensorSpec("y", "FP32", (-1, 2)),),
        latencies=(seconds,) * max_batch,
    )


def floats(*values: float, width: int = 2) -> Payload:
    """Rows of floats as the tensor `x`."""
    array = np.array(values, np.float32).reshape(-1, width)
    return (Tensor("x", "FP32", array.shape, array.tobytes()),)
