"""Scenarios over shares: on fake workers, and what becomes of the results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cotenant.backends.fake import Fake
from cotenant.core.model import Kind
from cotenant.errors import ConfigError
from cotenant.predictors import Load, svd
from cotenant.predictors.samples import Sample
from cotenant.profiling.characterisation import (
    COLUMNS,
    Run,
    RunKey,
    colocated_pairs,
    configurations,
    default_shares,
    interference,
    profiles_of,
    read_runs,
    run_scenarios,
    write_runs,
)
from cotenant.profiling.grid import Candidate, Grid, Tensors, run_batch
from cotenant.profiling.scenarios import MULTI_STREAM, OFFLINE, SCENARIOS, SERVER, SINGLE_STREAM, ScenarioResult
from cotenant.worker.arena import Arena
from cotenant.worker.wire import Timing, WorkerModel
from tests.live.workers import floats, sleeper

KIND = Kind(name="fake", cuts=(250, 500, 1000))
SLEEPS = 0.002  # seconds


def inputs_of(rows: int) -> Tensors:
    return floats(*range(2 * rows))


def run(model: str, share: int = 1000, scenario: str = OFFLINE, batch: int = 8, batch_ms: float = 4.0) -> Run:
    result = ScenarioResult(
        scenario=scenario,
        queries=10,
        samples=10 * batch,
        seconds=10 * batch_ms / 1e3,
        latencies=(0.004, 0.005, 0.006, 0.007),
        batch=batch,
        batch_seconds=batch_ms / 1e3,
        rate=17.5 if scenario == SERVER else None,
    )
    return Run(model=model, kind="fake", share=share, result=result, memory=1 << 20)


def sample(victim: str, other: str, alone: float, together: float) -> Sample:
    return Sample(Load(victim, "fake", 8, 500), (Load(other, "fake", 8, 500),), alone, together)


def characterised(
    models: Sequence[WorkerModel],
    done: Sequence[RunKey] = (),
    scenarios: Sequence[str] = (SINGLE_STREAM, OFFLINE),
    inputs: Callable[[int], Tensors] = inputs_of,
) -> list[Run | tuple[str, int, str]]:
    async def scene() -> list[Run | tuple[str, int, str]]:
        found = run_scenarios(
            Fake((KIND,)),
            {model.name: Candidate(model, inputs) for model in models},
            KIND,
            shares=(500, 1000),
            scenarios=scenarios,
            batch=4,
            seconds=0.01,
            targets=dict.fromkeys((model.name for model in models), 1.0),
            done=done,
        )
        return [each async for each in found]

    return asyncio.run(scene())


def test_models_run_every_scenario_on_every_share_largest_share_first() -> None:
    found = characterised([sleeper(SLEEPS, max_batch=8, name="a"), sleeper(SLEEPS, max_batch=2, name="b")])
    runs = [each for each in found if isinstance(each, Run)]
    assert found == runs
    assert [each.key for each in runs] == [
        (name, "fake", share, scenario)
        for share in (1000, 500)
        for name in "ab"
        for scenario in (OFFLINE, SINGLE_STREAM)
    ]
    assert {each.model: each.result.batch for each in runs if each.result.scenario == OFFLINE} == {"a": 4, "b": 2}
    assert all(each.result.batch_seconds >= SLEEPS for each in runs)
    assert all(each.result.samples_per_s <= 4 / SLEEPS for each in runs)


@pytest.mark.parametrize("separate", [False, True])
def test_inputs_are_made_once_for_the_largest_batch_and_freed_with_their_model(
    monkeypatch: pytest.MonkeyPatch, separate: bool
) -> None:
    """Of batches of every size, those of one model of images filled the memory of a machine."""
    arenas: list[Arena] = []
    made: list[int] = []  # rows
    taken: list[int] = []  # bytes of the arena before each
    sizes: set[int] = set()  # rows of the batches that ran

    def arena(size: int) -> Arena:
        arenas.append(Arena(size))
        return arenas[-1]

    def inputs(rows: int) -> Tensors:
        taken.append(arenas[0].size - arenas[0].free)
        made.append(rows)
        return inputs_of(rows)

    async def seen(*args: Any) -> tuple[float, Timing]:
        rows = [len(tensor.array()) for (tensor,) in args[-1]]
        assert rows == ([1] * len(rows) if separate else [sum(rows)])
        sizes.add(sum(rows))
        return await run_batch(*args)

    grid = Grid(inputs=2, separate_rows=separate)
    monkeypatch.setattr("cotenant.profiling.characterisation.grid_of", lambda kind: grid)
    monkeypatch.setattr("cotenant.profiling.characterisation.Arena", arena)
    monkeypatch.setattr("cotenant.profiling.characterisation.run_batch", seen)
    monkeypatch.setattr("cotenant.profiling.grid.LARGE", 1)
    models = [sleeper(SLEEPS, max_batch=8, name=name) for name in "ab"]
    assert all(isinstance(each, Run) for each in characterised(models, inputs=inputs))
    openings = 4  # of two models on two shares
    assert made == ([1] * 8 if separate else [4] * 2) * openings
    assert taken[:: len(made) // openings] == [0] * openings
    assert sizes == {1, 4}
    assert arenas[0].free == arenas[0].size


def test_runs_that_are_done_are_left_out() -> None:
    models = [sleeper(SLEEPS, name="a")]
    done = [("a", "fake", 1000, SINGLE_STREAM), ("a", "fake", 1000, OFFLINE), ("a", "fake", 500, OFFLINE)]
    (only,) = characterised(models, done)
    assert isinstance(only, Run) and only.key == ("a", "fake", 500, SINGLE_STREAM)


def test_model_that_cannot_run_is_told_with_its_reason_and_the_others_go_on() -> None:
    found = characterised([WorkerModel(name="broken", inputs=(), outputs=()), sleeper(SLEEPS, name="a")])
    failed = [each for each in found if isinstance(each, tuple)]
    assert [(name, share) for name, share, _ in failed] == [("broken", 1000), ("broken", 500)]
    assert all("broken" in reason or "start" in reason for _, _, reason in failed)
    assert sum(isinstance(each, Run) for each in found) == 4


def test_configurations_are_a_matrix_of_models_by_shares_and_scenarios_with_gaps() -> None:
    runs = [run("a", 1000), run("a", 500, batch_ms=8.0), run("b", 1000, SERVER), run("b", 1000, SINGLE_STREAM, 1)]
    found = configurations(runs)
    assert found.rows == ("a", "b")
    assert found.columns == (
        "fake 100% single-stream",
        "fake 100% server",
        "fake 100% offline",
        "fake 50% offline",
    )
    assert found.values == pytest.approx(
        np.array([[math.nan, math.nan, 2000, 1000], [250, 17.5, math.nan, math.nan]]), nan_ok=True
    )
    assert found.to_csv("model").splitlines()[1:] == ["a,,,2000,1000", "b,250,17.5,,"]


def test_interference_is_the_throughput_lost_and_the_filter_fills_its_gaps() -> None:
    samples = [sample("a", "a", 0.008, 0.016), sample("a", "b", 0.008, 0.010), sample("b", "a", 0.004, 0.004)]
    found = interference(samples, "fake")
    assert (found.rows, found.columns) == (("a", "b"), ("a", "b"))
    assert found.values == pytest.approx(np.array([[500, 200], [0, math.nan]]), nan_ok=True)
    assert not np.isnan(svd.complete(found.values)).any()
    assert interference(samples, "other").rows == ()


def test_profiles_have_the_batches_that_ran_but_for_those_of_the_server_scenario() -> None:
    runs = [
        run("a", 1000, SINGLE_STREAM, 1, 2.0),
        run("a", 1000, MULTI_STREAM, 8, 9.0),
        run("a", 1000, OFFLINE, 8, 7.0),
        run("a", 1000, SERVER, 3, 5.0),
        run("a", 500, OFFLINE, 8, 14.0),
    ]
    (profile,) = profiles_of(runs)
    points = {(point.share, point.batch): point.latency for point in profile.points}
    assert points == {(1000, 1): 0.002, (1000, 8): 0.007, (500, 8): 0.014}


def test_all_pairs_are_colocated_on_equal_parts_with_the_offline_batch() -> None:
    runs = [run("b", batch=4), run("a"), run("c", scenario=SINGLE_STREAM)]
    found = colocated_pairs(runs, KIND)
    assert found == [
        (Load("a", "fake", 8, 500), Load("a", "fake", 8, 500)),
        (Load("a", "fake", 8, 500), Load("b", "fake", 4, 500)),
        (Load("b", "fake", 4, 500), Load("b", "fake", 4, 500)),
    ]
    assert colocated_pairs(runs, Kind(name="fake")) == []
    assert [load.share for load in colocated_pairs(runs, Kind(name="fake", cuts=(200, 800, 1000)))[0]] == [200, 800]


def test_default_shares_are_legal_ones_near_whole_half_and_quarter() -> None:
    assert default_shares(KIND) == (1000, 500, 250)
    assert default_shares(Kind(name="mig", cuts=(142, 285, 428, 1000))) == (1000, 428, 285)


def test_runs_are_read_back_as_they_were_written() -> None:
    nothing = ScenarioResult(
        scenario=SERVER, queries=0, samples=0, seconds=2.0, latencies=(math.inf,) * 4, batch=1, batch_seconds=0, rate=0
    )
    runs = [run("a", 285, scenario) for scenario in SCENARIOS]
    runs.append(Run(model="b,c", kind="fake", share=1000, result=nothing, memory=0))
    assert read_runs(write_runs(runs).splitlines(), "runs.csv") == runs


def with_cell(column: str, cell: str, scenario: str = OFFLINE) -> str:
    """Return the text of one run, with one cell replaced."""
    header, line, *_ = write_runs([run("a", scenario=scenario)]).splitlines()
    cells = line.split(",")
    cells[COLUMNS.index(column)] = cell
    return f"{header}\n{','.join(cells)}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model,kind\n",
            "runs.csv:1: these are no runs of `cotenant characterise`; its columns are model,kind,share_pct",
        ),
        (",".join(COLUMNS) + "\na,b\n", r"runs.csv:2: 2 cells where the header names 15"),
        (write_runs([run("a")]).replace("offline", "online"), "runs.csv:2: scenario 'online' is unknown; available:"),
        (write_runs([run("a")]).replace(",100,", ",0,", 1), "runs.csv:2: share_pct"),
        (with_cell("model", ""), "runs.csv:2: model is empty"),
        (with_cell("kind", " "), "runs.csv:2: kind is empty"),
        (with_cell("seconds", "0"), "runs.csv:2: seconds: 0 must be above 0"),
        (with_cell("seconds", "-1"), "runs.csv:2: seconds: -1 is negative"),
        (with_cell("seconds", "nan"), "runs.csv:2: seconds: 'nan' is not a finite number"),
        (with_cell("queries", "1.5"), r"runs.csv:2: queries: 1.5 is not a whole number of at least 1"),
        (with_cell("samples", "0"), "runs.csv:2: samples: 0 is not a whole number of at least 1"),
        (with_cell("batch", "0"), "runs.csv:2: batch: 0 is not a whole number of at least 1"),
        (with_cell("batch_ms", "0"), "runs.csv:2: batch_ms: 0 must be above 0"),
        (with_cell("p99_ms", "-4"), "runs.csv:2: p99_ms: -4 is negative"),
        (with_cell("memory_mib", "-1"), "runs.csv:2: memory_mib: -1 is negative"),
        (with_cell("rate", "3"), "runs.csv:2: rate '3': only the scenario server has one"),
        (with_cell("rate", "", SERVER), "runs.csv:2: rate: '' is not a number"),
        (with_cell("batch", "0", SERVER), "runs.csv:2: batch: 0 is not a whole number of at least 1"),
    ],
)
def test_files_that_are_no_runs_are_refused_with_their_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_runs(text.splitlines(), "runs.csv")
