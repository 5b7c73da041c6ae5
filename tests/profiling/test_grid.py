"""Real workers and real models, but few points."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from cotenant.backends import Launch
from cotenant.backends.cpu import Cpu
from cotenant.control.supervisor_options import SupervisorOptions
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.errors import DeviceError, ModelError
from cotenant.live.confinement import Confinement
from cotenant.live.supervised_pool import SupervisedPool
from cotenant.profiling.grid import (
    CPU_PAUSE,
    FIRST_SLOT,
    MIN_BATCHES,
    SHARES,
    Candidate,
    Grid,
    Listener,
    _copied,
    _Reserved,
    grid_of,
    profile_model,
    run_batch,
)
from cotenant.profiling.grid import measure_profiles as measure_set
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel
from tests.backends.test_mig import on_processor
from tests.cli.program import alive, workers_of
from tests.worker import graphs

GRID = Grid(shares=(1000, 500), batches=(1, 4), seconds=0.02)


def measure(
    model: WorkerModel, sample: Callable[[int], tuple[Tensor, ...]], grid: Grid = GRID
) -> tuple[Profile, list[int]]:
    progress: list[int] = []
    main = profile_model(Cpu(), model, sample, kind="cpu", grid=grid, measured=progress.append)
    try:
        return uvloop.run(asyncio.wait_for(main, 30)), progress
    finally:
        assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]


def floats(rows: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (rows, 16), bytes(64 * rows)),)


def index(value: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: (Tensor("x", "INT64", (rows, 1), np.full((rows, 1), value, np.int64).tobytes()),)


def test_measure_profiles_measures_every_point_of_the_grid(tmp_path: Path) -> None:
    found, progress = measure(graphs.identity(tmp_path / "model.onnx"), floats)
    assert (found.model, found.kind) == ("identity", "cpu")
    assert {(point.share, point.batch) for point in found.points} == {(1000, 1), (1000, 4), (500, 1), (500, 4)}
    assert sum(progress) == GRID.points
    for point in found.points:
        assert 0 < point.latency < 1
        assert point.memory > 1 << 20
        assert set(point.features) == {"cv_pct", "p10_ms", "p90_ms", "p99_ms", "cpu_ms", "foreign_pct", "start_s"}
        p10, p90, p99 = (point.features[f"p{percent}_ms"] for percent in (10, 90, 99))
        assert p10 <= point.latency * 1e3 * 1.001
        assert point.latency * 1e3 * 0.999 <= p90 <= p99
        assert 0.01 < point.features["start_s"] < 30


def test_measure_profiles_batches_end_at_the_largest_of_the_model(tmp_path: Path) -> None:
    found, progress = measure(graphs.identity(tmp_path / "model.onnx", max_batch=2), floats)
    assert {(point.share, point.batch) for point in found.points} == {(1000, 1), (500, 1)}
    assert sum(progress) == GRID.points


def test_measure_profiles_points_of_no_use_to_plans_are_skipped(tmp_path: Path) -> None:
    """Nothing runs in a microsecond: one point is measured, and shows that the others would take longer."""
    hasty = Grid(shares=(1000, 500), batches=(1, 4), seconds=0.02, longest=1e-6)
    found, progress = measure(graphs.identity(tmp_path / "model.onnx"), floats, hasty)
    assert [(point.share, point.batch) for point in found.points] == [(1000, 1)]
    assert sum(progress) == hasty.points


def test_measure_profiles_first_batch_of_a_size_on_a_gpu_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: PyTorch's libraries choose kernels then."""
    sizes = set()

    async def timed(*args: Any) -> tuple[float, Timing]:
        *_, requests = args
        size = requests[0][0].shape[0]
        first = (args[2], size) not in sizes
        sizes.add((args[2], size))
        _, timing = await run_batch(*args)
        return 0.14 if first else 0.005, msgspec.structs.replace(timing, device=0.004)

    monkeypatch.setattr("cotenant.profiling.grid.run_batch", timed)
    found, _ = measure(graphs.identity(tmp_path / "model.onnx"), floats)
    assert {point.latency for point in found.points} == {0.005}
    assert {point.features["p99_ms"] for point in found.points} == {5.0}


def test_measure_profiles_model_that_fails_on_its_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model 'lookup' cannot be measured: .*indices element out of data bounds"):
        measure(graphs.lookup(tmp_path / "model.onnx"), index(9))


def test_measure_profiles_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    model = graphs.identity(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(
        ModelError, match=f"'identity' cannot be measured: the worker of cpu-0/{FIRST_SLOT} did not start"
    ):
        measure(model, floats)


def test_grid_shares_are_legal_cuts() -> None:
    """A green context has whole groups of multiprocessors."""
    green = Kind(name="h200", cuts=(*(1000 * 8 * groups // 132 for groups in range(1, 17)), 1000))
    shares = grid_of(green).shares
    assert set(shares) <= set(green.cuts) and shares[0] == 1000 and shares[-1] == 60
    assert len(shares) == len(SHARES) and list(shares) == sorted(shares, reverse=True)
    assert len(grid_of(green, range(100, 1001, 100)).shares) == 10
    assert grid_of(Kind(name="a30-mig", cuts=(250, 500, 1000))).shares == (1000, 500, 250)
    assert grid_of(Kind(name="cpu")) == Grid(pause=CPU_PAUSE)


def test_measure_profiles_pauses_before_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", slept)
    measure(
        graphs.identity(tmp_path / "model.onnx"), floats, Grid(shares=(1000,), batches=(1,), seconds=0.0, pause=7.0)
    )
    assert (
        len([seconds for seconds in pauses if 6.9 < seconds <= 7.0]) == MIN_BATCHES + 1
    )  # the first batch is not counted


def collect(
    candidates: dict[str, Candidate], grid: Grid, known: dict[str, list[Point]] | None = None
) -> tuple[list[tuple[str, int, int]], dict[str, str]]:
    """Which points were measured, and what could not be."""
    points: list[tuple[str, int, int]] = []
    broken: dict[str, str] = {}

    async def main() -> None:
        async for name, point in measure_set(
            Cpu(), candidates, device=DeviceId.parse("cpu-0"), grid=grid, known=known or {}
        ):
            if isinstance(point, str):
                broken[name] = point
            else:
                assert point.latency > 0
                points.append((name, point.share, point.batch))

    uvloop.run(asyncio.wait_for(main(), 30))
    assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]
    return points, broken


def test_measure_profiles_batch_that_would_take_too_long_on_a_small_share_is_skipped(tmp_path: Path) -> None:
    """Four rows took 0.9 s on the whole device, 1.8 s on half of it; from one row's 0.2 s there, 1.6 s on a quarter."""
    seconds = {(1000, 1): 0.1, (1000, 4): 0.9, (500, 1): 0.2, (250, 1): 0.4}
    known = [Point(share=share, batch=batch, latency=taken, memory=1) for (share, batch), taken in seconds.items()]
    grid = msgspec.structs.replace(GRID, shares=(1000, 500, 250), longest=1.0)
    candidates = {"identity": Candidate(graphs.identity(tmp_path / "model.onnx"), floats)}
    assert collect(candidates, grid, {"identity": known}) == ([], {})


def test_measure_profiles_models_share_workers_and_survive_failures_of_others(tmp_path: Path) -> None:
    grid = Grid(shares=(1000, 500), batches=(1, 4), seconds=0.02, inputs=2, separate_rows=True)
    candidates = {
        "lookup": Candidate(graphs.lookup(tmp_path / "lookup.onnx"), index(9)),
        "identity": Candidate(graphs.identity(tmp_path / "identity.onnx"), floats),
    }
    points, broken = collect(candidates, grid)
    assert points == [("identity", share, batch) for share in grid.shares for batch in grid.batches]
    assert "out of data bounds" in broken["lookup"]


def test_measure_profiles_model_that_cannot_be_loaded_costs_no_other(tmp_path: Path) -> None:
    nothing = graphs.identity(tmp_path / "nothing.onnx", name="nothing")
    (tmp_path / "nothing.onnx").write_bytes(b"no model")
    candidates = {
        "nothing": Candidate(nothing, floats),
        "identity": Candidate(graphs.identity(tmp_path / "identity.onnx"), floats),
    }
    points, broken = collect(candidates, Grid(shares=(1000,), batches=(1,), seconds=0.02))
    assert points == [("identity", 1000, 1)]
    assert "the worker of cpu-0/1000001 " in broken["nothing"]


def test_measure_profiles_known_points_are_not_measured_again(tmp_path: Path) -> None:
    known = [Point(share=1000, batch=1, latency=0.01, memory=1), Point(share=500, batch=1, latency=2.0, memory=1)]
    candidates = {"identity": Candidate(graphs.identity(tmp_path / "identity.onnx"), floats)}
    grid = Grid(shares=(1000, 500), batches=(1, 4), seconds=0.02)
    points, _ = collect(candidates, grid, {"identity": known})
    assert points == [("identity", 1000, 4)]  # and none at half a device, where one row takes too long already


class OneProcess(Cpu):
    """Its lanes share a process. What it is told is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        self.told.append(f"open {lane}")
        return msgspec.structs.replace(super().open(lane, share, leaving), process="one")

    def close(self, lane: LaneId) -> None:
        self.told.append(f"close {lane}")
        super().close(lane)


class Cut(Cpu):
    """Half of it has too little memory for any model."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        if share < 1000:
            raise DeviceError("it does not fit")
        return super().open(lane, share, leaving)


def test_measure_profiles_share_too_small_for_a_model_is_omitted(tmp_path: Path) -> None:
    model = graphs.identity(tmp_path / "model.onnx")

    def measured(memory: int) -> Profile:
        grid = msgspec.structs.replace(GRID, memory=memory)
        return uvloop.run(asyncio.wait_for(profile_model(Cut(), model, floats, kind="cpu", grid=grid), 30))

    assert {(point.share, point.batch) for point in measured(2 << 20).points} == {(1000, 1), (1000, 4)}
    with pytest.raises(ModelError, match=r"cannot be measured: .*: it does not fit"):
        measured(1 << 40)


def test_batches_that_fail_in_the_memory_of_a_worker_are_no_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with the same limit could not run them either."""
    # Half a gigabyte is written: on a busy machine that may take longer than any batch that is of use.
    patient = partial(SupervisedPool, options=SupervisorOptions(hang_timeout=60.0))
    monkeypatch.setattr("cotenant.profiling.grid.SupervisedPool", patient)
    model = graphs.repeat(tmp_path / "model.onnx", 64 << 20)
    grid = Grid(shares=(1000,), batches=(1, 8), seconds=0.02, longest=60.0)

    def batches(confinement: Confinement | None) -> list[int]:
        main = profile_model(Cpu(), model, floats, kind="cpu", grid=grid, confinement=confinement)
        return [point.batch for point in uvloop.run(asyncio.wait_for(main, 60)).points]

    assert batches(None) == [1, 8]
    assert batches(Confinement(memory=512 << 20)) == [1]


def test_measure_profiles_in_a_shared_process_opens_the_next_lane_first(tmp_path: Path) -> None:
    backend, model = OneProcess(), graphs.identity(tmp_path / "model.onnx")
    uvloop.run(asyncio.wait_for(profile_model(backend, model, floats, kind="cpu", grid=GRID), 30))
    lanes = [f"cpu-0/{FIRST_SLOT}", f"cpu-0/{FIRST_SLOT + 1}"]
    assert backend.told == [f"open {lanes[0]}", f"open {lanes[1]}", f"close {lanes[0]}", f"close {lanes[1]}"]


def test_lanes_that_serve_on_the_same_device_stay_as_they_are(tmp_path: Path) -> None:
    """A server measures a model that it loads where it serves the others; backends know partitions by name."""
    backend, model = Cpu(), graphs.identity(tmp_path / "model.onnx")
    serving = {lane: backend.open(lane, 100) for lane in (LaneId(DeviceId("cpu"), 0), LaneId(DeviceId("cpu"), 1))}
    pinned = dict(backend._pins.lanes)
    uvloop.run(asyncio.wait_for(profile_model(backend, model, floats, kind="cpu", grid=GRID), 30))
    assert backend._pins.lanes == pinned and pinned.keys() == serving.keys()


def test_grid_of_a_gpu_uses_its_clock_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = Listener.finished

    def from_a_gpu(self: Listener, lane: LaneId, batch: int, answers: Sequence[Any], timing: Timing) -> None:
        finished(self, lane, batch, answers, msgspec.structs.replace(timing, device=0.002, memory=7 << 20))

    monkeypatch.setattr(Listener, "finished", from_a_gpu)
    found, _ = measure(
        graphs.identity(tmp_path / "model.onnx"), floats, Grid(shares=(1000,), batches=(1,), seconds=0.02)
    )
    (point,) = found.points
    assert point.memory == 7 << 20
    assert point.features["cuda_ms"] == pytest.approx(2) and point.latency < 2


def test_rows_of_samples_are_separate_and_inputs_alternate(tmp_path: Path) -> None:
    """In memory that workers share, where they are large."""
    counts: list[int] = []

    def sample(rows: int) -> tuple[Tensor, ...]:
        counts.append(rows)
        return (Tensor("x", "FP32", (rows, 8192), bytes([len(counts)]) * (32768 * rows)),)

    candidate = Candidate(graphs.identity(tmp_path / "model.onnx", 8192), sample)
    arena = Arena(1 << 20)
    batches = candidate.requests(3, Grid(inputs=2, separate_rows=True), arena)
    assert [len(batch) for batch in batches] == [3, 3] and counts == [1] * 6
    tensors = [request[0] for batch in batches for request in batch]
    assert [bytes(tensor.data[:1])[0] for tensor in tensors] == [1, 2, 3, 4, 5, 6]
    assert all(tensor.block is not None for tensor in tensors)
    ((whole,),) = candidate.requests(3, Grid(), arena)
    assert whole[0].shape == (3, 8192)
    arena.close()


def test_inputs_are_made_and_copied_away_from_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may serve meanwhile."""
    threads: list[int] = []

    def copied(batches: list[_Reserved]) -> list[list[tuple[Tensor, ...]]]:
        threads.append(threading.get_ident())
        return _copied(batches)

    def sample(rows: int) -> tuple[Tensor, ...]:
        threads.append(threading.get_ident())
        return (Tensor("x", "FP32", (rows, 8192), bytes(32768 * rows)),)

    monkeypatch.setattr("cotenant.profiling.grid._copied", copied)
    grid = Grid(shares=(1000,), batches=(1,), seconds=0.02)
    model = graphs.identity(tmp_path / "model.onnx", 8192)
    uvloop.run(profile_model(Cpu(), model, sample, kind="cpu", grid=grid))
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_measure_profiles_mig_instance_replaces_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that one partition has whole has no room for the next, not even to ask what it would be."""
    with ExitStack() as held:
        backend = on_processor(monkeypatch, held)
        (kind,) = backend.fleet()
        shares = (1000, kind.cuts[0])
        grid = Grid(shares=shares, batches=(1,), seconds=0.02)
        model = graphs.identity(tmp_path / "model.onnx")
        found = uvloop.run(asyncio.wait_for(profile_model(backend, model, floats, kind=kind.name, grid=grid), 30))
    assert {point.share for point in found.points} == set(shares)
