"""Which pairs are run, in what order; and real workers side by side, with few of them."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop

from cotenant.backends.cpu import Cpu
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.errors import ModelError
from cotenant.predictors.ours import telling
from cotenant.predictors.samples import Sample
from cotenant.profiling.grid import Candidate, Grid
from cotenant.profiling.pairs import LONGEST, MOST, measure, pairs, splits
from cotenant.worker.wire import WorkerModel
from tests.cli.program import alive, workers_of
from tests.worker import graphs

CPU = Kind(name="cpu", cuts=tuple(range(50, 1001, 50)))


def profile(model: str, seconds: float, batches: tuple[int, ...] = (1, 2, 4, 8)) -> Profile:
    points = [
        Point(share=share, batch=batch, latency=seconds * batch * 1000 / share, memory=1)
        for share in (250, 500, 1000)
        for batch in batches
    ]
    return Profile(model, "cpu", points)


def test_pairs_fill_the_device_and_take_no_longer_than_is_worth_it() -> None:
    profiles = {(name, "cpu"): profile(name, seconds) for name, seconds in (("a", 0.001), ("b", 0.02), ("c", 1.0))}
    found = pairs(profiles, CPU)
    assert len(set(found)) == len(found)
    for one, other in found:
        assert one.share + other.share == 1000 and one.share <= 500
        assert max(profiles[it.model, "cpu"].latency(it.batch, it.share) for it in (one, other)) <= LONGEST
    assert {it.model for run in found for it in run} == {"a", "b"}
    halves = [run for run in found if run[0].share == 500]
    assert not [run for run in halves if run[0] != run[1] and run[::-1] in halves]
    assert not pairs(profiles, Kind(name="gpu", cuts=CPU.cuts))


def test_a_device_is_cut_where_it_can_be() -> None:
    """A green context has whole groups of multiprocessors; of 132 there are 16 of eight, and the whole device."""
    green = (*(1000 * 8 * groups // 132 for groups in range(1, 17)), 1000)
    for small, large in splits(green):
        assert {small, large} <= set(green) and small <= large and 900 < small + large <= 1000
    assert splits(CPU.cuts) == [(250, 750), (500, 500)]
    assert splits((500, 1000)) == [(500, 500)]
    assert splits((1000,)) == []


def test_very_many_pairs_are_thinned() -> None:
    profiles = {(f"m{i}", "cpu"): profile(f"m{i}", 0.001) for i in range(12)}
    found = pairs(profiles, CPU)
    assert len(found) == MOST == len(set(found))
    assert found == pairs(profiles, CPU)


def test_every_run_comes_once_and_none_that_was_done() -> None:
    runs = pairs({(name, "cpu"): profile(name, 0.001) for name in "abc"}, CPU)
    profiles = {(name, "cpu"): profile(name, 0.001) for name in "abc"}
    order = list(telling(runs, profiles, [3, 5]))
    assert sorted([*order, 3, 5]) == list(range(len(runs)))
    first = [runs[place] for place in itertools.islice(telling(runs, profiles), 6)]
    assert {load.model for run in first for load in run} == set("abc")


def floats(rows: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (rows, 16), bytes(64 * rows)),)


def index(rows: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "INT64", (rows, 1), np.full((rows, 1), 99, np.int64).tobytes()),)


def run_all(candidates: dict[str, Candidate], count: int) -> list[tuple[Sample, Sample]]:
    profiles = {(name, "cpu"): profile(name, 0.001, (1, 4)) for name in candidates}
    runs = pairs(profiles, CPU)

    async def main() -> list[tuple[Sample, Sample]]:
        return [
            both async for both in measure(Cpu(), candidates, runs, profiles, count=count, grid=Grid(), seconds=0.02)
        ]

    try:
        return uvloop.run(asyncio.wait_for(main(), 60))
    finally:
        assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]


def test_two_models_side_by_side(tmp_path: Path) -> None:
    first = graphs.identity(tmp_path / "model.onnx")
    second = msgspec.structs.replace(first, name="second")
    found = run_all({"identity": Candidate(first, floats), "second": Candidate(second, floats)}, 5)
    assert len(found) == 5
    for one, other in found:
        assert (one.victim, one.neighbours) == (other.neighbours[0], (other.victim,))
        assert one.victim.share + other.victim.share == 1000
        for sample in (one, other):
            assert 0 < sample.alone < 5 and 0 < sample.together < 5


def test_a_model_that_fails_is_named(tmp_path: Path) -> None:
    broken: WorkerModel = graphs.lookup(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=f"'{broken.name}' beside '{broken.name}' cannot be measured: "):
        run_all({broken.name: Candidate(broken, index)}, 1)


def test_a_machine_that_has_other_things_to_do_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.profiling.pairs.FASTEST", 1e9)
    with pytest.raises(
        ModelError, match=r"'identity' beside 'identity' seems faster than alone, .*try when it is quiet"
    ):
        run_all({"identity": Candidate(graphs.identity(tmp_path / "model.onnx"), floats)}, 1)
