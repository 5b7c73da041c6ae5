"""What the forecast says of lending, against the simulator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cotenant.config import read_problem
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.errors import ConfigError
from cotenant.planners import Problem
from cotenant.planners.forecast import forecast
from cotenant.planning import plan as plan_problem
from cotenant.sim.run import simulate

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "problem.toml"


@pytest.fixture(scope="module")
def planned() -> tuple[Problem, Plan]:
    problem = read_problem(EXAMPLE)
    return problem, plan_problem(problem, "bestfit", portfolio=False)  # many lanes on few cores


@pytest.mark.parametrize("load", [0.2, 1.0])
def test_medians_with_lending_are_those_of_the_simulator_on_average(planned: tuple[Problem, Plan], load: float) -> None:
    """Within a quarter on average, of models whose median on shares alone is forecast within a third: that of tiny ones
    beside slow ones is not."""
    problem, plan = planned
    problem = msgspec.structs.replace(problem, rates={name: rate * load for name, rate in problem.rates.items()})
    floor, predicted = forecast(plan, problem).models, forecast(plan, problem, lend=True).models
    held = {row.model: row.p50 for row in simulate(plan, problem, seconds=20).models}
    lent = {row.model: row.p50 for row in simulate(plan, problem, seconds=20, lend=True).models}
    judged = [name for name in floor if abs(floor[name].p50 / (held[name] or 0.0) - 1) < 0.33]
    assert len(judged) >= 5
    apart = [abs(predicted[name].p50 / (lent[name] or 0.0) - 1) for name in judged]
    assert sum(apart) / len(apart) < 0.25


def test_lending_never_makes_a_forecast_worse(planned: tuple[Problem, Plan]) -> None:
    """But by the requests that a model's lanes then take from each other."""
    problem, plan = planned
    floor, lent = forecast(plan, problem).models, forecast(plan, problem, lend=True).models
    assert all(lent[name].p50 <= floor[name].p50 * 1.02 for name in floor)
    assert sum(lent[name].p50 < 0.9 * floor[name].p50 for name in floor) >= 3
    assert all(lent[name].attainment >= floor[name].attainment - 1e-3 for name in floor)


def test_forecast_with_lending_needs_processors(planned: tuple[Problem, Plan]) -> None:
    problem, plan = planned
    (kind,) = problem.fleet
    gpu = msgspec.structs.replace(problem, fleet=(Kind(name=kind.name, cuts=kind.cuts),))
    with pytest.raises(ConfigError, match=r"^only shares of processors are lent, and no device has any; "):
        forecast(plan, gpu, lend=True)
