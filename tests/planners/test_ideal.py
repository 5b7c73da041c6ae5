from __future__ import annotations

from itertools import combinations_with_replacement, product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cotenant.core.mig import instance_shares as instances
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem, elastic_plus
from cotenant.planners.capacity import RoundShare, smallest_batches
from cotenant.planners.check import check
from cotenant.planners.ideal import feasible, plan, second_model_rate
from tests.planners.problems import MIB, ProportionalInterference, linear, profile
from tests.planners.test_capacity import works

CUTS = (200, 400, 500, 600, 800, 1000)


def shares(plan: Plan) -> list[list[int]]:
    return [sorted(cut.share for cut in device.partitions) for device in plan.devices]


def small(seed: int) -> Problem:
    """Two or three models, batches to 3, two devices that are cut 4:6, 5:5 or not at all."""
    rng = np.random.default_rng(seed)
    names = "abc"[: rng.integers(2, 4)]
    bend = rng.random()
    latency = {
        name: {
            (cut, batch): (0.004 + fixed + work * batch) * (bend + (1 - bend) * 1000 / cut)
            for cut in (400, 500, 600, 1000)
            for batch in (1, 2, 3)
        }
        for name, fixed, work in zip(names, rng.random(3) * 0.01, rng.random(3) * 0.004, strict=False)
    }
    slos = {name: float(latency[name][400, 1] * (2 + 3 * rng.random())) for name in names}
    whole = sum(2 * 3 / latency[name][1000, 3] for name in names) / len(names)
    return Problem(
        models=tuple(Model(name=name, slo=slos[name]) for name in names),
        rates={name: float(whole * (0.1 + rng.random()) * 1.3 / len(names)) for name in names},
        fleet=(Kind(name="k", count=2, cuts=(400, 500, 600, 1000), max_partitions=2),),
        profiles={(name, "k"): profile(name, "k", latency[name]) for name in names},
    )


def brute(problem: Problem) -> int | None:
    """Return the fewest devices that serve every model, over all cuts and batches."""
    names = list(problem.rates)
    asked = np.array([problem.rates[name] for name in names])
    slos = [problem.model(name).slo for name in names]

    def modes(share: int) -> NDArray[np.float64]:
        """Return requests/s by model, for every choice of batches (0: absent) that meets the targets."""
        curves = [(0.0, *problem.profiles[name, "k"].curve(share)) for name in names]
        found = []
        for batches in product(*(range(len(curve)) for curve in curves)):
            lengths = [curve[batch] for curve, batch in zip(curves, batches, strict=True)]
            round_ = sum(lengths)
            if all(batch == 0 or round_ + own <= slo for batch, own, slo in zip(batches, lengths, slos, strict=True)):
                found.append([batch / round_ if batch else 0.0 for batch in batches])
        return np.array(found)

    known = {share: modes(share) for share in problem.fleet[0].cuts}
    layouts = ((400, 600), (500, 500), (1000,))
    for devices in range(1, (problem.fleet[0].count or 0) + 1):
        for cut in combinations_with_replacement(layouts, devices):
            reached = np.zeros((1, len(names)))
            for share in sorted(share for layout in cut for share in layout):
                reached = np.minimum(reached[:, None] + known[share][None], asked).reshape(-1, len(names))
                reached = np.unique(reached, axis=0)
            if (reached >= asked * (1 - 1e-9)).all(axis=1).any():
                return devices
    return None


@pytest.mark.parametrize("seed", range(40))
def test_ideal_on_tiny_problems_equals_brute_force(seed: int) -> None:
    problem = small(seed)
    made = plan(problem)
    assert check(made, problem) == []
    assert (None if made.unserved else made.devices_used) == brute(problem)


@given(works=st.lists(works, max_size=2), another=works)
def test_second_model_rate_equals_brute_force(works: list[RoundShare], another: RoundShare) -> None:
    """Compare with a search over rates with the planners' common arithmetic."""
    most = second_model_rate(works, another) if smallest_batches(works) is not None else 0.0
    for part, held in ((1 - 1e-6, most > 0), (1 + 1e-6, False)):
        mine = msgspec.structs.replace(another, rate=most * part)
        assert most == 0 or (smallest_batches([*works, mine]) is not None) == held


def identical(rates: dict[str, float], slo: float = 0.1, count: int | None = 4, **kind: object) -> Problem:
    """Models that take 8 ms a request on a whole device, batch 1: alone they carry 25 requests/s on each 20 % of it."""
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in rates),
        rates=rates,
        fleet=(msgspec.structs.replace(Kind(name="k", cuts=CUTS, count=count), **kind),),
        profiles={(name, "k"): profile(name, "k", {(cut, 1): 0.008 * 1000 / cut for cut in CUTS}) for name in rates},
    )


def test_ideal_without_limit_uses_at_most_two_partitions() -> None:
    """gpulet paper, section 5.2: 2:8, 4:6, 5:5 or 10:0. A batch takes 20 ms on any share; two make a round too long."""
    problem = identical(dict.fromkeys("abc", 25.0), slo=0.05)
    profiles = {(name, "k"): profile(name, "k", {(cut, 1): 0.020 for cut in CUTS}) for name in "abc"}
    problem = msgspec.structs.replace(problem, profiles=profiles)
    assert [len(device) for device in shares(plan(problem))] == [2, 1]
    free = Kind(name="k", cuts=CUTS, max_partitions=5)
    assert [len(device) for device in shares(plan(msgspec.structs.replace(problem, fleet=(free,))))] == [3]


def test_ideal_of_large_rate_splits_it_over_shared_partitions() -> None:
    """Three models of two thirds of a device each, on two devices: one of them must be on both."""
    problem = identical(dict.fromkeys("abc", 80.0), count=2)
    made = plan(problem)
    assert check(made, problem) == []
    assert made.unserved == {}
    assert elastic_plus.plan(problem).devices_used == 2


def test_ideal_under_interference_plans_with_slowdowns() -> None:
    apart = identical({"a": 45.0, "b": 45.0}, slo=0.05)
    assert len(plan(apart).devices) == 1
    crowded = msgspec.structs.replace(apart, interference=ProportionalInterference(2.0))
    assert check(plan(crowded), crowded) == []
    assert plan(crowded).unserved == {}


def test_ideal_of_two_kinds_returns_cheapest_fleet() -> None:
    """One expensive device would suffice; two cheap ones cost less."""
    problem = identical({"a": 100.0, "b": 100.0})
    dear, cheap = (Kind(name=name, cuts=CUTS, count=2, price=price) for name, price in (("dear", 3.0), ("cheap", 1.0)))
    profiles = {
        (name, kind): linear(name, kind, 0.0, work, cuts=CUTS, batches=(1, 2))
        for name in "ab"
        for kind, work in (("dear", 0.004), ("cheap", 0.008))
    }
    made = plan(msgspec.structs.replace(problem, fleet=(dear, cheap), profiles=profiles))
    assert ([device.kind for device in made.devices], made.cost_per_hour) == (["cheap", "cheap"], 2.0)


def test_ideal_on_mig_returns_legal_placements() -> None:
    """Two instances of 3/7 leave a seventh unusable, since they occupy all memory slices."""
    sizes = instances("mig-a100-40gb")
    kind = Kind(name="k", cuts=sizes, count=1, geometry="mig-a100-40gb", max_partitions=3, memory=40 << 30)
    problem = Problem(
        models=tuple(Model(name=name, slo=1.0) for name in "abc"),
        rates=dict.fromkeys("abc", 1.0),
        fleet=(kind,),
        profiles={(name, "k"): linear(name, "k", 0.02, 0.0, cuts=sizes, batches=(1,), memory=MIB) for name in "abc"},
    )
    made = plan(problem)
    assert check(made, problem) == []
    assert made.unserved == {}


def test_ideal_of_infeasible_rates_returns_plan_of_elastic_plus() -> None:
    problem = identical({"a": 100.0, "b": 100.0}, count=1, max_partitions=2)
    assert plan(problem) == msgspec.structs.replace(elastic_plus.plan(problem), planner="ideal")
    assert plan(problem).unserved != {}


def test_ideal_feasible_uses_all_devices() -> None:
    problem = Problem(
        models=(Model(name="a", slo=0.1),),
        rates={"a": 300.0},
        fleet=(Kind(name="k", count=2, cuts=(500, 1000)),),
        profiles={("a", "k"): linear("a", "k", 0.01, 0.002, cuts=(500, 1000))},
    )
    found = feasible(problem)
    assert found is not None and not found.unserved and not check(found, problem)
    assert feasible(msgspec.structs.replace(problem, rates={"a": 3000.0})) is None
    # More devices than are searched.
    endless = (msgspec.structs.replace(problem.fleet[0], count=None),)
    assert feasible(msgspec.structs.replace(problem, fleet=endless)) is None
