from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.errors import ConfigError
from cotenant.planners.capacity import max_throughput_batch
from cotenant.planning.study_problems import LOAD, study_problem, study_problem_names
from tests.experiments.data import needs_data

SYNTHETIC = [name for name in study_problem_names() if name.startswith("synthetic/")]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_problem_is_the_same_for_one_seed_and_differs_between_seeds(name: str) -> None:
    one, same, other = (study_problem(name, seed) for seed in (1, 1, 2))
    assert one.rates == same.rates != other.rates
    assert [model.slo for model in one.models] == [model.slo for model in other.models]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_rates_add_up_to_the_load_of_four_devices(name: str) -> None:
    problem = study_problem(name, 3)
    kind = problem.fleet[0].name
    parts = [
        problem.rates[model.name] / max_throughput_batch(problem.profiles[model.name, kind].curve(1000), model.slo)[1]
        for model in problem.models
    ]
    assert sum(parts) == pytest.approx(LOAD)


def test_settings_differ_in_targets_objective_and_fleet() -> None:
    steady, tight, rate, mixed = (
        study_problem(f"synthetic/{each}", 0) for each in ("steady", "tight", "rate", "mixed")
    )
    assert [model.slo for model in tight.models] == pytest.approx([model.slo / 2 for model in steady.models], rel=0.01)
    assert (steady.objective, rate.objective) == ("devices", "rate")
    assert (steady.fleet[0].count, rate.fleet[0].count) == (None, 2)
    assert all(kind.price for kind in mixed.fleet)
    assert all((model.name, kind.name) in mixed.profiles for model in mixed.models for kind in mixed.fleet)


def test_unknown_problem_lists_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no problem 'v100'; available: v100/steady, v100/tight, "):
        study_problem("v100", 0)


def test_problem_without_its_data_says_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; it is of measurements that others have published"):
        study_problem("has-gpu/steady", 0, tmp_path)


@needs_data
@pytest.mark.parametrize("name", [name for name in study_problem_names() if name not in SYNTHETIC])
def test_problem_of_published_measurements_is_of_their_models(name: str) -> None:
    problem, (source, _, _) = study_problem(name, 0), name.partition("/")
    assert len(problem.models) == {"v100": 4, "has-gpu": 4, "a100": 10, "mig": 10, "v100+a100": 6}[source]
    assert all(rate > 0 for rate in problem.rates.values())
    assert problem.interference.interferes == (source in ("v100", "a100"))
