"""Measure whether CPU shares are enforced, and the resulting latency; print one line for each lane.

`python -m benchmarks.shares [throttle|quota]`: isolated lanes at 20 to 100 % with batches of 1, 8 and 32; then with a
co-located lane that is always busy on the rest of the device, and, to tell shares from cores, of the same core.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from benchmarks import onnx_models
from cotenant.backends.cpu import Cpu
from cotenant.config import read_settings
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.tensor import Tensor
from cotenant.errors import RequestError
from cotenant.live.batch_listener import Payload
from cotenant.live.process import cpu_time
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing

Enforcement = Literal["throttle", "quota"]


class Measured(msgspec.Struct, frozen=True):
    """Hold the measurement of one lane.

    share, used_share, waited_share: percent of the device; p50, p99: batch latency in seconds. waited_share: upper
    bound of the time lost to other programs, as all threads of a batch wait for the slowest.
    """

    share: float
    batch: int
    used_share: float
    waited_share: float
    p50: float
    p99: float
    cores: tuple[int, ...]


class _Lane:
    """Hold a lane that always has a batch running.

    marks: at the end of each batch, the time, and the CPU time used and waited for until then.
    """

    def __init__(self, name: LaneId, share: int, batch: int) -> None:
        self.name = name
        self.share = share
        self.batch = batch
        self.pid = 0
        self.marks: list[tuple[float, float, float]] = []


class _Greedy:
    """Send a lane its next batch as soon as it has answered."""

    def __init__(self, lanes: Sequence[_Lane], shape: tuple[int, ...]) -> None:
        self.pool: SupervisedPool | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lanes = {lane.name: lane for lane in lanes}
        rng = np.random.default_rng(0)
        self._inputs: dict[LaneId, list[Payload]] = {}
        for lane in lanes:
            picture = rng.random((1, *shape), np.float32)
            self._inputs[lane.name] = [(Tensor("x", "FP32", picture.shape, picture.tobytes()),)] * lane.batch

    def go(self, name: LaneId) -> None:
        if self.pool is not None and not self.failure.done():
            self.pool.run(name, 0, "convolutions", self._inputs[name])

    def ready(self, lane: LaneId) -> None:
        pass

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        measured = self._lanes[lane]
        measured.marks.append((time.monotonic(), cpu_time(measured.pid) or 0.0, run_delay(measured.pid)))
        self.go(lane)

    def failed(self, lane: LaneId, batch: int, reason: str) -> None:
        self.died(lane, reason)

    def died(self, lane: LaneId, reason: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(RuntimeError(f"{lane}: {reason}"))


def run_delay(pid: int) -> float:
    """Return how long the thread of a process that waited longest was runnable without a processor, in seconds.

    0 if the system does not report it.
    """
    try:
        return max(int(path.read_text().split()[1]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    except (OSError, ValueError):
        return 0.0


async def measure(
    shares: Sequence[tuple[int, int]],
    seconds: float,
    *,
    enforcement: Enforcement = "throttle",
    share_a_core: bool = False,
) -> list[Measured]:
    """Lanes of these shares (‰) and batches, all busy at once for that long. Each is warmed up for a few batches."""
    lanes = [_Lane(LaneId(DeviceId("cpu"), slot), share, batch) for slot, (share, batch) in enumerate(shares)]
    backend = Cpu(enforcement=enforcement, reserve=read_settings().reserve)
    if share_a_core:
        backend.cores = backend.cores[:1]
    with tempfile.TemporaryDirectory() as folder:
        model = onnx_models.convolutions(Path(folder) / "m.onnx")
        arena = Arena(1 << 28)
        greedy = _Greedy(lanes, model.inputs[0].shape[1:])
        pool = greedy.pool = SupervisedPool(backend, arena, greedy)
        try:
            for lane in sorted(lanes, key=lambda lane: -lane.share):
                await pool.start(lane.name, share=lane.share, models=[model])
            pids = {status.lane: status.pid for status in pool.status()}
            for lane in lanes:
                lane.pid = pids[lane.name] or 0
                greedy.go(lane.name)
            await asyncio.wait([greedy.failure], timeout=seconds)
            if greedy.failure.done():
                greedy.failure.result()
        finally:
            greedy.pool = None
            cores = {name: pinned[0] for name, pinned in backend._pins.lanes.items()}
            await pool.close(grace=5.0)
    return [_summary(lane, backend, cores.get(lane.name, ())) for lane in lanes]


def _summary(lane: _Lane, backend: Cpu, cores: tuple[int, ...]) -> Measured:
    marks = lane.marks[min(3, len(lane.marks) // 3) :]  # warm-up of caches and clocks
    times = [time for time, _, _ in marks]
    latencies = sorted(after - before for before, after in itertools.pairwise(times))
    possible = (times[-1] - times[0]) * backend.capacity
    waited = (marks[-1][2] - marks[0][2]) * len(cores or backend.cores)
    return Measured(
        share=lane.share / 10,
        batch=lane.batch,
        used_share=100 * (marks[-1][1] - marks[0][1]) / possible,
        waited_share=100 * waited / possible,
        p50=statistics.median(latencies),
        p99=latencies[int(0.99 * (len(latencies) - 1))],
        cores=cores,
    )


def _line(label: str, lane: Measured) -> str:
    where = f"core {','.join(map(str, lane.cores))}" if lane.cores else "all cores"
    return (
        f"{label:<22} share {lane.share:5.1f} %  used {lane.used_share:5.1f} %  "
        f"waited at most {lane.waited_share:5.1f} %  batch {lane.batch:2}  "
        f"p50 {lane.p50 * 1e3:7.1f} ms  p99 {lane.p99 * 1e3:7.1f} ms  {where}"
    )


async def _main(enforcement: Enforcement) -> None:
    for batch in (1, 8, 32):
        for share in (200, 400, 600, 800, 1000):
            for lane in await measure([(share, batch)], 3.0, enforcement=enforcement):
                print(_line(f"{enforcement}, isolated", lane), flush=True)
    for share in (200, 400, 600, 800):
        for lane in await measure([(share, 8), (1000 - share, 32)], 5.0, enforcement=enforcement):
            print(_line(f"{enforcement}, co-located", lane), flush=True)
    for lane in await measure([(400, 8), (600, 32)], 5.0, enforcement=enforcement, share_a_core=True):
        print(_line(f"{enforcement}, on one core", lane), flush=True)


if __name__ == "__main__":
    asyncio.run(_main("quota" if "quota" in sys.argv[1:] else "throttle"))
