"""Measure how long lanes take to start, with and without warm workers; print one line for each kind of model.

    python -m benchmarks.worker_starts [--lanes 1 4] [--times 5] [--platforms onnxruntime_onnx pytorch_libtorch …]

Lanes start concurrently next to a running one, on CPU shares; then one of them is killed and restarts. The models do
almost nothing, so the time is that of the start itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import onnx_models
from benchmarks.share_change import prepared
from cotenant.backends.cpu import Cpu
from cotenant.core.identity import DeviceId, LaneId
from cotenant.errors import RequestError
from cotenant.live.batch_listener import Payload
from cotenant.live.process import private_memory
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel

TIMEOUT = 60.0  # seconds
ONNX = "onnxruntime_onnx"
PLATFORMS = (ONNX, "pytorch_libtorch", "pytorch_export", "pytorch_module")


class _ReadyLanes:
    """Record lanes of a pool that become ready."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[LaneId] = asyncio.Queue()

    def ready(self, lane: LaneId) -> None:
        self._queue.put_nowait(lane)

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        pass

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        pass

    def died(self, lane: LaneId, reason: str) -> None:
        pass

    def forget(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    async def until(self, lane: LaneId) -> None:
        """Wait for that lane; discard others."""
        async with asyncio.timeout(TIMEOUT):
            while await self._queue.get() != lane:
                pass


class Started(msgspec.Struct, frozen=True):
    """Hold medians, in seconds.

    ready: until all lanes were ready; back: until a killed one was ready again, including its restart delay of 0.1 s;
    memory: private bytes of a warm worker.
    """

    ready: float
    back: float
    memory: int


async def measure(model: WorkerModel, lanes: int, warm_workers: int, times: int) -> Started:
    """Start lanes and kill one, several times."""
    device = DeviceId("cpu")
    lanes_ready, arena = _ReadyLanes(), Arena(1 << 24)
    pool = SupervisedPool(Cpu(), arena, lanes_ready, warm_workers=warm_workers)
    ready, back, memory = [], [], [0]
    try:
        await pool.start(LaneId(device, 0), 50, [model])
        for number in range(times):
            names = [LaneId(device, 1 + number * lanes + place) for place in range(lanes)]
            await prepared(pool, warm_workers)
            memory += [
                private_memory(process.pid)
                for kept in pool._driver.pool.processes._warm._kept.values()
                for process in kept
            ]
            begun = time.monotonic()
            await asyncio.gather(*(pool.start(name, 100, [model]) for name in names))
            ready.append(time.monotonic() - begun)
            await prepared(pool, warm_workers)
            lanes_ready.forget()
            begun = time.monotonic()
            os.kill(
                next(status.pid for status in pool.status() if status.lane == names[0] and status.pid), signal.SIGKILL
            )
            await lanes_ready.until(names[0])
            back.append(time.monotonic() - begun)
            await asyncio.gather(*(pool.stop(name, grace=1.0) for name in names))
    finally:
        await pool.close(grace=1.0)
        arena.close()
    return Started(statistics.median(ready), statistics.median(back), max(memory))


def _model(platform: str, folder: Path) -> WorkerModel:
    if platform == ONNX:
        return onnx_models.convolutions(folder / "m.onnx")
    from benchmarks import torch_models  # needs PyTorch

    return torch_models.double(folder, platform)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker_starts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=PLATFORMS)
    given = parser.parse_args()
    for platform in given.platforms:
        with tempfile.TemporaryDirectory() as folder:
            model = _model(platform, Path(folder))
            for lanes in given.lanes:
                for warm_workers in sorted({0, 1, lanes}):
                    started = asyncio.run(measure(model, lanes, warm_workers, given.times))
                    print(
                        f"{platform}, {lanes} lanes, {warm_workers} warm workers: ready after {started.ready:.3f}"
                        f" s, restarted after {started.back:.3f} s; a warm worker has {started.memory / 2**20:.0f} MiB;"
                        f" load average {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
