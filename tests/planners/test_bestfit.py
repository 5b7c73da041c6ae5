from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.bestfit import plan
from cotenant.planners.check import check
from tests.planners.problems import ProportionalInterference, linear, profile

CUTS = (200, 400, 500, 600, 800, 1000)


def problem(rates: dict[str, float], **kind: object) -> Problem:
    """Models that take 8 ms a request on a whole device, batch 1: they carry 25 requests/s on each 20 % of it."""
    return Problem(
        models=tuple(Model(name=name, slo=0.1) for name in rates),
        rates=rates,
        fleet=(msgspec.structs.replace(Kind(name="k", cuts=CUTS, count=4), **kind),),
        profiles={(name, "k"): profile(name, "k", {(cut, 1): 0.008 * 1000 / cut for cut in CUTS}) for name in rates},
    )


def cuts(plan: Plan) -> list[list[tuple[int, str]]]:
    return [
        [(cut.share, placement.model) for cut in device.partitions for placement in cut.placements]
        for device in plan.devices
    ]


def test_bestfit_of_each_model_uses_smallest_sufficient_share() -> None:
    """gpulet paper, section 2.3."""
    assert cuts(plan(problem({"a": 20.0, "b": 30.0, "c": 51.0}))) == [[(500, "c"), (400, "b")], [(200, "a")]]


def test_bestfit_of_several_devices_takes_tightest_fit() -> None:
    """Figure 3 (b): 20 % fits beside 80 % and beside 60 %; it goes beside 80 %."""
    made = plan(problem({"a": 100.0, "b": 75.0, "c": 25.0}))
    assert cuts(made) == [[(800, "a"), (200, "c")], [(600, "b")]]


def test_bestfit_places_one_model_on_each_partition() -> None:
    made = plan(problem(dict.fromkeys("abcdef", 1.0)))
    assert cuts(made) == [[(200, name) for name in "abcde"], [(200, "f")]]


def test_bestfit_of_rate_beyond_largest_share_uses_several_partitions() -> None:
    made = plan(problem({"a": 310.0}))
    assert cuts(made) == [[(1000, "a")], [(1000, "a")], [(500, "a")]]
    assert made.rate("a") == pytest.approx(310.0)


def test_bestfit_with_too_few_devices_leaves_rate_unserved() -> None:
    made = plan(problem({"a": 310.0, "b": 20.0}, count=2))
    assert made.unserved == {"a": pytest.approx(60.0), "b": 20.0}


def test_bestfit_with_max_partitions_respects_it() -> None:
    assert [len(device) for device in cuts(plan(problem(dict.fromkeys("abc", 20.0), max_partitions=2)))] == [2, 1]


def test_bestfit_under_interference_uses_larger_shares() -> None:
    apart = problem({"a": 20.0, "b": 24.0})
    assert cuts(plan(apart)) == [[(200, "a"), (200, "b")]]
    crowded = msgspec.structs.replace(apart, interference=ProportionalInterference(0.5))
    assert cuts(plan(crowded)) == [[(200, "a"), (400, "b")]]
    assert check(plan(crowded), crowded) == []


def test_bestfit_of_two_kinds_fills_the_cheaper_first() -> None:
    dear, cheap = (Kind(name=name, cuts=(1000,), price=price) for name, price in (("dear", 3.0), ("cheap", 1.0)))
    both = Problem(
        models=(Model(name="a", slo=1.0), Model(name="b", slo=0.05)),
        rates={"a": 5.0, "b": 5.0},
        fleet=(dear, msgspec.structs.replace(cheap, count=None)),
        profiles={
            (model, kind): linear(model, kind, work, 0.0)
            for model in "ab"
            for kind, work in (("dear", 0.02), ("cheap", 0.1))
        },
    )
    made = plan(both)
    assert [device.kind for device in made.devices] == ["cheap", "dear"]
    assert made.unserved == {}
