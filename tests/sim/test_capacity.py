import math

import msgspec
import pytest

from cotenant.sim.capacity import (
    Attainment,
    LoadLevel,
    SimulationTask,
    attainment_at,
    find_capacity,
    peak_rates,
    run_simulation,
)
from cotenant.workload import Workload
from cotenant.workload.sources import ClosedLoop, Curve, Gamma, MarkovModulated
from tests.sim.test_run import PLAN, PROBLEM


def made_up(breaks: float, half: float = 0.0) -> list[float]:
    """Multiples that are looked at where attainment falls from 100 % at 0 to 99 % at `breaks`; and what is found."""
    asked: list[float] = []

    def at(multiple: float) -> LoadLevel:
        asked.append(multiple)
        mean = 1 - 0.01 * multiple / breaks
        return LoadLevel(multiple=multiple, models={"a": Attainment(mean, half, 0.99), "b": Attainment(1.0, 0.0, 0.9)})

    found = find_capacity(at)
    assert len(asked) == len(set(asked)) == len(found.levels)
    assert [it.multiple for it in found.levels] == sorted(asked)
    assert found.limit == "a"
    return [found.low, found.multiple, found.high]


@pytest.mark.parametrize("breaks", [0.05, 0.7, 1.0, 1.2, 9.0])
def test_capacity_bisection_finds_the_load_that_violates_an_slo(breaks: float) -> None:
    low, multiple, high = made_up(breaks)
    assert multiple <= breaks * (1 + 1e-9) < multiple * 1.0101
    assert low == multiple == high


def test_capacity_uncertain_loads_form_the_interval() -> None:
    low, multiple, high = made_up(1.5, half=0.002)
    assert low <= 1.5 * 0.8 < low * 1.0101
    assert multiple <= 1.5 < multiple * 1.0101
    assert high <= 1.5 * 1.2 < high * 1.0101


def test_capacity_without_violation_is_infinite_and_without_success_zero() -> None:
    def always(mean: float) -> float:
        found = find_capacity(lambda multiple: LoadLevel(multiple=multiple, models={"a": Attainment(mean, 0.0, 0.99)}))
        assert found.low == found.multiple == found.high
        return found.multiple

    assert always(1.0) == math.inf
    assert always(0.5) == 0.0


def test_capacity_level_is_the_mean_over_seeds_with_a_t_interval() -> None:
    workload = Workload.poisson({"a": 40.0})
    looks = [SimulationTask(problem=PROBLEM, plan=PLAN, workload=workload, seconds=3, seed=seed) for seed in range(3)]
    reports = [run_simulation(look) for look in looks]
    parts = [1.0, 0.98, 0.96]
    changed = []
    for part, report in zip(parts, reports, strict=True):
        a, b = report.models
        a = msgspec.structs.replace(a, attainment=part, outcomes={"served": 100, "cancelled": 7})
        changed.append(msgspec.structs.replace(report, models=(a, b)))
    found = attainment_at(2.0, changed)
    assert list(found.models) == ["a"]  # nobody asked for b
    assert found.models["a"].mean == pytest.approx(0.98)
    assert found.models["a"].half == pytest.approx(4.303 * 0.02 / math.sqrt(3), rel=1e-3)
    assert not found.slos_met and not found.surely_violated
    assert attainment_at(1.0, changed[:1]).models["a"].half == 0.0


def test_peak_rates_are_the_highest_of_the_workload() -> None:
    workload = Workload(
        {
            "steady": Gamma(20.0, 2.0),
            "wave": Curve(((0.0, 10.0), (50.0, 90.0), (100.0, 10.0))),
            "bursts": MarkovModulated((1.0, 30.0), (10.0, 1.0)),
            "patient": ClosedLoop(3),
        }
    )
    assert peak_rates(workload, 200.0, 0) == {"steady": 20.0, "wave": 90.0, "bursts": 30.0}
    assert peak_rates(workload, 25.0, 0)["wave"] == pytest.approx(50.0)
    steps = Workload({"steps": Curve.steps([10.0, 900.0], 60.0)})
    assert peak_rates(steps, 60.0, 0)["steps"] == pytest.approx(10.0)  # the next step is not reached
    assert peak_rates(steps, 61.0, 0)["steps"] == 900.0
