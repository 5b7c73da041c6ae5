"""On the card, by the path that serves: shares, changes of them, what goes wrong. A backend at a time."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop

from benchmarks import share_change
from cotenant.backends import Backend, nvidia
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.profile import Point
from cotenant.core.tensor import Tensor, TensorSpec
from cotenant.core.units import WHOLE
from cotenant.errors import RequestError
from cotenant.live.batch_listener import Payload
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.profiling.grid import Candidate, Grid, grid_of, measure_profiles, nearest_share
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel
from tests.live.workers import Recorder, pool_of

pytestmark = pytest.mark.gpu

Figure = Callable[..., None]

NEAR = 0.1  # of the curve that multiprocessors predict
QUICK = {"green": 0.05, "mps": 5.0}  # seconds that a change of share may take until another lane is ready
GROWN = 64 << 20  # bytes on the device that a change of share under green contexts may add: room for another stream
QUIET = 1.0  # seconds in which a neighbour is looked at
BACK = 60.0  # seconds in which a killed worker is there again

# A polynomial by its recurrence: all that counts is how many multiprocessors there are. Libraries of matrix products
# choose other kernels where they see fewer of them, as under MPS: see the figures of `Burn`.
COMPUTE = """
import torch


class Compute(torch.nn.Module):
    def __init__(self):
        super().__init__()
        size, self.degree = (1 << 24, 500) if torch.cuda.is_available() else (1 << 16, 100)
        torch.manual_seed(0)
        self.values = torch.nn.Parameter(torch.rand(size), requires_grad=False)

    def forward(self, x):
        return x * torch.special.legendre_polynomial_p(self.values, self.degree)[:1]
"""

# A product of matrices that has tiles for every multiprocessor many times over: all that counts is how many there
# are. A processor gets fewer.
BURN = """
import torch


class Burn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        size = 8192 if torch.cuda.is_available() else 512
        self.weight = torch.nn.Parameter(torch.randn(size, size) / size**0.5, requires_grad=False)

    def forward(self, x):
        return x * (self.weight @ self.weight)[:1, :2]
"""

# Wants as many GiB as its input says, for a moment.
GREEDY = """
import torch


class Greedy(torch.nn.Module):
    def forward(self, x):
        wanted = torch.empty(int(x[0, 0].item()) << 30, dtype=torch.uint8, device=x.device)
        return x + wanted[:1].numel() * 0
"""


def model(folder: Path, name: str, source: str) -> WorkerModel:
    path = folder / name / "model.py"
    path.parent.mkdir()
    path.write_text(source)
    return WorkerModel(
        name=name,
        path=str(path),
        platform="pytorch_module",
        inputs=(TensorSpec("x", "FP32", (-1, 2)),),
        outputs=(TensorSpec("y", "FP32", (-1, 2)),),
    )


def pair(value: float) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (1, 2), np.array([[value, 1.0]], np.float32).tobytes()),)


def half(backend: Backend) -> int:
    """The largest legal share of which two fit."""
    return max(cut for cut in backend.fleet()[0].cuts if 2 * cut <= WHOLE)


def test_serving_share_is_enforced(backend: Backend, tmp_path: Path, figure: Figure) -> None:
    """Throughput of a kernel that computes, over that of the whole device: as many times as it has multiprocessors."""
    kind = backend.fleet()[0]
    shares = grid_of(kind, (1000, 750, 500, 250, 120)).shares
    grid = Grid(shares=shares, batches=(1,), seconds=0.5, longest=10.0)
    points: dict[str, dict[int, Point]] = {"compute": {}, "burn": {}}
    models = {"compute": model(tmp_path, "compute", COMPUTE), "burn": model(tmp_path, "burn", BURN)}

    async def measured() -> None:
        candidates = {name: Candidate(it, lambda rows: pair(1)) for name, it in models.items()}
        async for name, point in measure_profiles(backend, candidates, device=DeviceId(kind.name), grid=grid):
            assert isinstance(point, Point), point
            points[name][point.share] = point

    uvloop.run(measured())
    off = {}
    for name, found in points.items():
        seconds = {share: point.features.get("cuda_ms", point.latency * 1e3) / 1e3 for share, point in found.items()}
        off[name] = {share: round(seconds[WHOLE] * WHOLE / share / took - 1, 4) for share, took in seconds.items()}
        figure(backend=backend.name, model=name, seconds=seconds, off=off[name], memory=found[WHOLE].memory)
    assert sorted(off["compute"]) == sorted(shares)
    if backend.name != "cpu":
        assert max(map(abs, off["compute"].values())) < NEAR


def test_serving_share_change_loses_no_request(backend: Backend, tmp_path: Path, figure: Figure) -> None:
    small, large = grid_of(backend.fleet()[0], (250, 500)).shares[::-1] if backend.name != "cpu" else (250, 500)
    brief = model(tmp_path, "brief", BURN.replace("8192", "1024"))  # a new lane runs one batch before it is ready
    changes = uvloop.run(share_change.measure(backend, brief, [pair(1)], (small, large), times=6))
    for it in changes:
        figure(backend=backend.name, **msgspec.to_builtins(it))
    assert not any(it.lost for it in changes)
    if backend.name in QUICK:
        assert max(it.ready for it in changes) < QUICK[backend.name]
    assert backend.name != "green" or not any(it.restarted for it in changes)


class Busy(Recorder):
    """Keeps one lane busy, and notes when it answers; what other lanes do is told."""

    def __init__(self, backend: Backend, lane: LaneId) -> None:
        super().__init__()
        self.lane: LaneId | None = lane
        self.answers: list[float] = []
        self.pool = SupervisedPool(backend, Arena(1 << 24), self)

    def go(self) -> None:
        if self.lane is not None:
            self.pool.run(self.lane, 0, "brief", [pair(1)])

    def finished(self, lane: LaneId, batch: int, answers: Sequence[Payload | RequestError], timing: Timing) -> None:
        if lane != self.lane:
            super().finished(lane, batch, answers, timing)
            return
        self.answers.append(time.monotonic())
        self.go()

    async def longest(self, seconds: float) -> float:
        """In that time, without an answer."""
        known, begun = len(self.answers), time.monotonic()
        await asyncio.sleep(seconds)
        return max(b - a for a, b in itertools.pairwise([begun, *self.answers[known:], time.monotonic()]))


def test_serving_share_change_pauses_co_located_lanes_briefly(backend: Backend, tmp_path: Path, figure: Figure) -> None:
    """Memory that a lane gives back stops a GPU for a moment. Under green contexts nobody waits for longer than a
    change may take; of another backend the time is to be known."""
    if backend.name == "mig":
        pytest.skip("instances have nothing in common")
    kind = backend.fleet()[0]
    brief = model(tmp_path, "brief", BURN.replace("8192", "1024"))
    shares = [nearest_share(share, kind.cuts) for share in (250, 120)]

    async def scenario() -> tuple[float, list[float]]:
        device = DeviceId(kind.name)
        neighbour = LaneId(device, 10)
        busy = Busy(backend, neighbour)
        try:
            await busy.pool.start(neighbour, half(backend), [brief])
            await busy.pool.start(LaneId(device, 0), shares[0], [brief])
            busy.go()
            await busy.longest(QUIET)  # its clocks are up by then
            quiet, beside = await busy.longest(QUIET), []
            for number in range(1, 7):
                lane, before = LaneId(device, number), LaneId(device, number - 1)
                felt = asyncio.create_task(busy.longest(QUIET))
                await busy.pool.start(lane, shares[number % 2], [brief], leaving=[before])
                busy.pool.run(lane, number, "brief", [pair(1)])
                while (await busy.next())[0] != "finished":
                    pass
                await busy.pool.stop(before, grace=5.0)
                beside.append(await felt)
            return quiet, beside
        finally:
            busy.lane = None
            await busy.pool.close(grace=5.0)

    quiet, beside = asyncio.run(scenario())
    figure(backend=backend.name, longest_without_an_answer_s={"quiet": quiet, "beside changes": beside})
    assert backend.name != "green" or max(beside) < quiet + QUICK["green"]


def test_serving_share_change_adds_no_memory(backend: Backend, tmp_path: Path, figure: Figure) -> None:
    if backend.name != "green":
        pytest.skip("another backend's change of share is another process, with weights of its own")
    kind = backend.fleet()[0]
    device, share = DeviceId(kind.name), half(backend)
    uuid = nvidia.list_gpus()[0].uuid
    burn = model(tmp_path, "burn", BURN)

    async def scenario() -> list[int]:
        used = []
        async with pool_of(backend) as (pool, told, _):
            for number, cut in enumerate((share, WHOLE) * 4):
                lane = LaneId(device, number)
                await pool.start(lane, cut, [burn], leaving=[LaneId(device, number - 1)] if number else [])
                assert await told.next() == ("ready", lane)
                pool.run(lane, 1, "burn", [pair(1)])
                assert (await told.next())[0] == "finished"
                if number:
                    await pool.stop(LaneId(device, number - 1), grace=5.0)
                used.append(nvidia.gpu_reading(uuid).memory or 0)
        return used

    used = asyncio.run(scenario())
    figure(backend=backend.name, memory=used)
    # In the first round each stream that is new to PyTorch takes a workspace, which stays; and what a lane caches for
    # its next batch is there or not, so that maxima are compared.
    assert max(used[4:]) < max(used[2:4]) + GROWN


def test_serving_out_of_memory_fails_one_request(backend: Backend, tmp_path: Path) -> None:
    lane = LaneId(DeviceId(backend.fleet()[0].name), 0)

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            await pool.start(lane, half(backend), [model(tmp_path, "greedy", GREEDY)])
            assert await told.next() == ("ready", lane)
            pid = pool.status()[0].pid
            for number, gib in enumerate((0, 1 << 20, 1)):
                pool.run(lane, number, "greedy", [pair(gib)])
                what, *_, last = await told.next()
                assert what == ("failed" if gib > 1 else "finished"), last
            assert pool.status()[0].pid == pid

    asyncio.run(scenario())


def test_serving_killed_worker_restarts(backend: Backend, tmp_path: Path, figure: Figure) -> None:
    """Beside another lane: of the same process it goes with it, of another it goes on."""
    device = DeviceId(backend.fleet()[0].name)
    lanes = [LaneId(device, 0), LaneId(device, 1)]
    burn = model(tmp_path, "burn", BURN)

    async def scenario() -> None:
        async with pool_of(backend) as (pool, told, _):
            for lane in lanes:
                await pool.start(lane, half(backend), [burn])
                assert await told.next() == ("ready", lane)
            pids = [status.pid for status in pool.status()]
            together = pids[0] == pids[1]
            assert together == (backend.name == "green") and pids[0] is not None
            begun = time.monotonic()
            os.kill(pids[0], signal.SIGKILL)
            if not together:
                pool.run(lanes[1], 1, "burn", [pair(1)])
            expected = {("died", lane) for lane in lanes[: 1 + together]} | {
                ("ready", lane) for lane in lanes[: 1 + together]
            }
            expected |= set() if together else {("finished", lanes[1])}
            while expected:
                what, lane, *_ = await asyncio.wait_for(told.told.get(), BACK)
                expected.remove((what, lane))
            figure(backend=backend.name, back_s=time.monotonic() - begun)
            for lane in lanes:
                pool.run(lane, 2, "burn", [pair(1)])
                assert (await told.next())[0] == "finished"

    asyncio.run(scenario())
