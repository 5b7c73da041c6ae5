"""Real workers and real models, but few points."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import uvloop

from cotenant.backends.cpu import Cpu
from cotenant.core.profile import Profile
from cotenant.core.tensor import Tensor
from cotenant.errors import ModelError
from cotenant.profiling.grid import Grid, profile
from cotenant.worker.wire import WorkerModel
from tests.cli.program import alive, workers_of
from tests.worker import graphs

GRID = Grid(shares=(1000, 500), batches=(1, 4), seconds=0.02)


def measure(
    model: WorkerModel, sample: Callable[[int], tuple[Tensor, ...]], grid: Grid = GRID
) -> tuple[Profile, list[int]]:
    progress: list[int] = []
    main = profile(Cpu(), model, sample, kind="cpu", grid=grid, measured=progress.append)
    try:
        return uvloop.run(asyncio.wait_for(main, 30)), progress
    finally:
        assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]


def floats(rows: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (rows, 16), bytes(64 * rows)),)


def index(value: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: (Tensor("x", "INT64", (rows, 1), np.full((rows, 1), value, np.int64).tobytes()),)


def test_every_point_of_the_grid_is_measured(tmp_path: Path) -> None:
    found, progress = measure(graphs.identity(tmp_path / "model.onnx"), floats)
    assert (found.model, found.kind) == ("identity", "cpu")
    assert {(point.share, point.batch) for point in found.points} == {(1000, 1), (1000, 4), (500, 1), (500, 4)}
    assert sum(progress) == GRID.points
    for point in found.points:
        assert 0 < point.latency < 1
        assert point.memory > 1 << 20
        assert set(point.features) == {"cv_pct", "p10_ms", "p90_ms", "p99_ms", "cpu_ms", "start_s"}
        p10, p90, p99 = (point.features[f"p{percent}_ms"] for percent in (10, 90, 99))
        assert p10 <= point.latency * 1e3 * 1.001
        assert point.latency * 1e3 * 0.999 <= p90 <= p99
        assert 0.01 < point.features["start_s"] < 30


def test_batches_end_where_the_model_does(tmp_path: Path) -> None:
    found, progress = measure(graphs.identity(tmp_path / "model.onnx", max_batch=2), floats)
    assert {(point.share, point.batch) for point in found.points} == {(1000, 1), (500, 1)}
    assert sum(progress) == GRID.points


def test_what_no_plan_could_use_is_not_measured(tmp_path: Path) -> None:
    """Nothing runs in a microsecond: one point is measured, and shows that the others would take longer."""
    hasty = Grid(shares=(1000, 500), batches=(1, 4), seconds=0.02, longest=1e-6)
    found, progress = measure(graphs.identity(tmp_path / "model.onnx"), floats, hasty)
    assert [(point.share, point.batch) for point in found.points] == [(1000, 1)]
    assert sum(progress) == hasty.points


def test_a_model_that_fails_on_its_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model 'lookup' cannot be measured: .*indices element out of data bounds"):
        measure(graphs.lookup(tmp_path / "model.onnx"), index(9))


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    model = graphs.identity(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(
        ModelError, match=r"model 'identity' cannot be measured: the worker of profile/1000 did not start"
    ):
        measure(model, floats)
