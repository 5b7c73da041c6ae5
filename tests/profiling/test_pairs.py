"""What is run side by side, in what order; and real workers, with few of them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop

from cotenant.backends.cpu import Cpu
from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.core.profile import Point, Profile
from cotenant.core.tensor import Tensor
from cotenant.predictors.gaussian_process import select_experiments
from cotenant.predictors.samples import Sample
from cotenant.profiling.grid import Candidate, Grid
from cotenant.profiling.pairs import (
    MAX_LATENCY,
    MAX_PAIRS,
    RUNS_PER_TURN,
    SETS_PER_CUT,
    candidate_pairs,
    enough_samples,
    measure_pairs,
    measured_pairs,
    pair_shares,
)
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


def test_candidate_pairs_fill_the_device_within_the_latency_limit() -> None:
    profiles = {(name, "cpu"): profile(name, seconds) for name, seconds in (("a", 0.001), ("b", 0.02), ("c", 1.0))}
    found = candidate_pairs(profiles, CPU)
    assert len(set(found)) == len(found)
    for run in found:
        assert sum(it.share for it in run) == 1000
        assert max(profiles[it.model, "cpu"].latency(it.batch, it.share) for it in run) <= MAX_LATENCY
    assert {it.model for run in found for it in run} == {"a", "b"}
    halves = [run for run in found if [it.share for it in run] == [500, 500]]
    assert not [run for run in halves if run[0] != run[1] and run[::-1] in halves]
    assert not candidate_pairs(profiles, Kind(name="gpu", cuts=CPU.cuts))


def test_candidate_pairs_are_mostly_pairs_and_some_larger_sets() -> None:
    profiles = {(name, "cpu"): profile(name, 0.001) for name in "ab"}
    runs = candidate_pairs(profiles, CPU)
    sizes = Counter(map(len, runs))
    assert set(sizes) == set(RUNS_PER_TURN) and sizes[3] <= SETS_PER_CUT and sizes[4] <= SETS_PER_CUT
    assert enough_samples(runs) == round(0.2 * sizes[2] * 8 / 6)
    first = [len(runs[place]) for place in itertools.islice(select_experiments(runs, profiles, RUNS_PER_TURN), 16)]
    assert Counter(first) == {size: 2 * turns for size, turns in RUNS_PER_TURN.items()}
    assert enough_samples([run for run in runs if len(run) == 2]) == round(0.2 * sizes[2])


def test_candidate_pairs_beyond_memory_are_omitted() -> None:
    profiles = {("a", "cpu"): profile("a", 0.001)}
    assert {len(run) for run in candidate_pairs(profiles, Kind(name="cpu", cuts=CPU.cuts, memory=3))} == {2, 3}
    assert not candidate_pairs(profiles, Kind(name="cpu", cuts=CPU.cuts, memory=1))


def test_pair_shares_are_legal_cuts() -> None:
    """A green context has whole groups of multiprocessors; of 132 there are 16 of eight, and the whole device."""
    green = (*(1000 * 8 * groups // 132 for groups in range(1, 17)), 1000)
    for cut in pair_shares(Kind(name="h200", cuts=green)):
        assert set(cut) <= set(green) and sorted(cut) == list(cut) and 900 < sum(cut) <= 1000
    assert pair_shares(CPU) == [(250, 750), (500, 500), (250, 250, 500), (250, 250, 250, 250)]
    assert pair_shares(Kind(name="half", cuts=(500, 1000))) == [(500, 500)]
    assert pair_shares(Kind(name="whole")) == []


def test_pair_shares_on_mig_are_legal_placements() -> None:
    """2g, 2g, 2g and 1g have room on an A100; on an A30 a half and two quarters have."""
    a100, a30 = (
        Kind(name=name, cuts=mig.instance_shares(name), geometry=name) for name in ("mig-a100-40gb", "mig-a30-24gb")
    )
    assert pair_shares(a100) == [(285, 571), (428, 571), (285, 285, 428), (142, 285, 285, 285)]
    assert pair_shares(a30) == [(250, 500), (500, 500), (250, 250, 500), (250, 250, 250, 250)]


def test_candidate_pairs_of_many_models_are_limited() -> None:
    profiles = {(f"m{i}", "cpu"): profile(f"m{i}", 0.001) for i in range(12)}
    found = candidate_pairs(profiles, CPU)
    assert sum(len(run) == 2 for run in found) == MAX_PAIRS
    assert len(found) == len(set(found)) <= MAX_PAIRS + 2 * SETS_PER_CUT
    assert found == candidate_pairs(profiles, CPU)


def test_select_experiments_yields_every_unmeasured_run_once() -> None:
    profiles = {(name, "cpu"): profile(name, 0.001) for name in "abc"}
    runs = candidate_pairs(profiles, CPU)
    order = list(select_experiments(runs, profiles, RUNS_PER_TURN, [3, 5]))
    assert sorted([*order, 3, 5]) == list(range(len(runs)))
    first = [runs[place] for place in itertools.islice(select_experiments(runs, profiles, RUNS_PER_TURN), 6)]
    assert {load.model for run in first for load in run} == set("abc")


def test_measured_pairs_need_a_sample_of_every_victim() -> None:
    runs = candidate_pairs({(name, "cpu"): profile(name, 0.001) for name in "ab"}, CPU)
    three = next(place for place, run in enumerate(runs) if len(set(run)) == 3)
    a, b, c = runs[three]
    samples = [Sample(a, (b, c), 1, 1), Sample(b, (a, c), 1, 1)]
    assert measured_pairs(runs, samples) == []
    assert measured_pairs(runs, [*samples, Sample(c, (a, b), 1, 1)]) == [three]


def floats(rows: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (rows, 16), bytes(64 * rows)),)


def index(rows: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "INT64", (rows, 1), np.full((rows, 1), 99, np.int64).tobytes()),)


@pytest.fixture(autouse=True)
def busy_machine_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept whatever these runs measure: on a loaded machine isolated runs may take longer than co-located ones."""
    monkeypatch.setattr("cotenant.profiling.pairs.MIN_TIME_RATIO", 0.0)


def run_all(candidates: dict[str, Candidate], count: int, pause: float = 0.0) -> list[list[Sample]]:
    found = found_by(candidates, count, pause)
    assert not [each for each in found if isinstance(each, str)]
    return [each for each in found if not isinstance(each, str)]


def found_by(candidates: dict[str, Candidate], count: int, pause: float = 0.0) -> list[list[Sample] | str]:
    profiles = {(name, "cpu"): profile(name, 0.001, (1, 4)) for name in candidates}
    runs = candidate_pairs(profiles, CPU)

    async def main() -> list[list[Sample] | str]:
        found = measure_pairs(Cpu(), candidates, runs, profiles, count=count, grid=Grid(pause=pause), seconds=0.02)
        return [samples async for samples in found]

    try:
        return uvloop.run(asyncio.wait_for(main(), 60))
    finally:
        assert not [pid for pid in workers_of(os.getpid()) if alive(pid)]


def test_measure_pairs_of_two_models_gives_a_sample_per_victim(tmp_path: Path) -> None:
    first = graphs.identity(tmp_path / "model.onnx")
    second = msgspec.structs.replace(first, name="second")
    found = run_all({"identity": Candidate(first, floats), "second": Candidate(second, floats)}, 8)
    assert Counter(map(len, found)) == {2: 6, 3: 1, 4: 1}
    for samples in found:
        run = [sample.victim for sample in samples]
        assert sum(load.share for load in run) == 1000
        for i, sample in enumerate(samples):
            assert sample.colocated == (*run[:i], *run[i + 1 :])
            assert sample.alone > 0 and sample.together > 0


def test_measure_pairs_pauses_as_profiles_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the smallest models would be several times as quick alone as their profiles say."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def seen(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("cotenant.profiling.pairs.asyncio.sleep", seen)
    run_all({"identity": Candidate(graphs.identity(tmp_path / "model.onnx"), floats)}, 1, pause=0.0123)
    assert slept.count(0.0123) >= 3  # of one alone, of the other, and of both


@pytest.mark.parametrize("starts", [True, False])
def test_pairs_that_fail_are_named_and_the_others_are_measured(tmp_path: Path, starts: bool) -> None:
    """Whether a model fails with each batch, or keeps the workers that it would share with others from starting."""
    for name in ("works", "fails"):
        (tmp_path / name).mkdir()
    works = graphs.identity(tmp_path / "works" / "model.onnx")
    fails = graphs.lookup(tmp_path / "fails" / "model.onnx")
    if not starts:
        fails = msgspec.structs.replace(fails, path=str(tmp_path / "absent.onnx"))
    found = found_by({works.name: Candidate(works, floats), fails.name: Candidate(fails, index)}, 6)
    failed = [each for each in found if isinstance(each, str)]
    measured = [each for each in found if not isinstance(each, str)]
    assert len(found) == 6
    assert failed and all(f"'{fails.name}'" in each and " cannot be measured: " in each for each in failed)
    assert all(" co-located with " in each for each in failed)
    assert measured and {sample.victim.model for samples in measured for sample in samples} == {works.name}


def test_measure_pairs_on_a_busy_machine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.profiling.pairs.MIN_TIME_RATIO", 1e9)
    (said,) = found_by({"identity": Candidate(graphs.identity(tmp_path / "model.onnx"), floats)}, 1)
    assert isinstance(said, str)
    assert said.startswith("'identity' co-located with 'identity' cannot be measured: ")
    assert "faster than alone 3 times" in said and "try again when it is quiet" in said
