from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem, igniter
from cotenant.planners.check import check
from cotenant.planners.igniter import plan
from cotenant.predictors import Load
from experiments.data import igniter as published
from tests.experiments.data import needs_data
from tests.planners.problems import ProportionalInterference, linear, placements_by_device, profile

UNITS = tuple(range(25, 1001, 25))  # iGniter's unit is 2.5 %


def problem(rates: dict[str, float], slo: float = 0.1, **kind: object) -> Problem:
    """Models that take 20 ms + 1 ms a row on a tenth of a device, in proportion less on more."""
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in rates),
        rates=rates,
        fleet=(msgspec.structs.replace(Kind(name="k", cuts=UNITS, count=None), **kind),),
        profiles={(name, "k"): linear(name, "k", 0.002, 0.0001, UNITS, range(1, 33)) for name in rates},
    )


@needs_data
def test_igniter_on_its_published_example_makes_the_published_plan() -> None:
    """README of icloud-ecnu/igniter: what its program prints for targets of 15, 40 and 60 ms."""
    coefficients = published.coefficients()
    asked = {"alexnet": (15, 500), "resnet50": (40, 400), "vgg19": (60, 200)}

    def profile(name: str) -> Profile:
        points = [
            Point(
                share=share, batch=batch, latency=coefficients.latency(Load(name, "v100", batch, share), ()), memory=0
            )
            for share in UNITS
            for batch in range(1, 33)
        ]
        return Profile(name, "v100", points)

    example = Problem(
        models=tuple(Model(name=name, slo=ms / 1e3) for name, (ms, _) in asked.items()),
        rates={name: float(rate) for name, (_, rate) in asked.items()},
        fleet=(Kind(name="v100", cuts=UNITS, count=None),),
        profiles={(name, "v100"): profile(name) for name in asked},
        interference=coefficients,
    )
    made = plan(example)
    assert [sorted(gpu) for gpu in placements_by_device(made)] == [
        [("alexnet", 4, 100), ("resnet50", 8, 300), ("vgg19", 6, 375)]
    ]
    assert check(made, example) == []


def test_igniter_batch_is_what_gathers_in_half_of_the_target() -> None:
    """⌈200/s · 50 ms⌉ = 10 rows take 50 ms on (2 + 10 · 0.1) ms / 50 ms = 6 % of a device."""
    assert placements_by_device(plan(problem({"a": 200.0}))) == [[("a", 10, 75)]]
    assert placements_by_device(plan(problem({"a": 0.5}))) == [[("a", 1, 50)]]


def test_igniter_under_interference_grows_every_model_of_the_device_that_is_late() -> None:
    asked = problem({"a": 200.0, "b": 180.0})
    assert placements_by_device(plan(asked)) == [[("a", 10, 75), ("b", 9, 75)]]
    slowed = msgspec.structs.replace(asked, interference=ProportionalInterference(3.0))
    assert placements_by_device(plan(slowed)) == [[("a", 10, 100), ("b", 9, 100)]]
    assert check(plan(slowed), slowed) == []


class Crowd:
    """`crowd` doubles the latency of what is beside it."""

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return 2.0 if any(load.model == "crowd" for load in colocated) else 1.0


def test_igniter_places_on_the_device_where_arrival_takes_least() -> None:
    """`c` takes 20 % of a device, and 40 % beside `crowd`, which has the first device."""
    asked = problem({"crowd": 2500.0, "big": 2500.0, "c": 200.0}, slo=0.024, cuts=(200, 400, 600))
    assert placements_by_device(plan(asked)) == [[("crowd", 30, 600), ("c", 3, 200)], [("big", 30, 600)]]
    slowed = msgspec.structs.replace(asked, interference=Crowd())
    assert placements_by_device(plan(slowed)) == [[("crowd", 30, 600)], [("big", 30, 600), ("c", 3, 200)]]
    alone = msgspec.structs.replace(slowed, rates={"crowd": 2500.0, "c": 200.0})
    assert placements_by_device(plan(alone)) == [[("crowd", 30, 600), ("c", 3, 400)]]


def test_igniter_splits_a_rate_beyond_a_device_into_equal_parts() -> None:
    made = plan(problem({"a": 20_000.0}))
    assert made.unserved == {}
    (rate,) = {placement.rate for device in made.devices for cut in device.partitions for placement in cut.placements}
    assert made.rate("a") == pytest.approx(20_000.0)
    assert rate < 20_000.0
    short = plan(problem({"a": 20_000.0}, count=1))
    assert 0 < short.unserved["a"] < 20_000.0


def test_igniter_leaves_a_target_that_no_share_meets_unserved() -> None:
    assert plan(problem({"a": 10.0}, slo=0.001)).unserved == {"a": 10.0}


def test_igniter_places_what_has_the_largest_lower_bound_first() -> None:
    """Shares of 30 % and 70 % of a device, the small ones first in the problem."""
    made = plan(problem({"s": 100.0, "t": 100.0, "big": 2500.0, "huge": 2500.0}, slo=0.016, cuts=(300, 700)))
    assert [[model for model, _, _ in gpu] for gpu in placements_by_device(made)] == [["big", "s"], ["huge", "t"]]


def test_igniter_splits_a_rate_into_the_fewest_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a batch of 1 takes half of the target, and 95,000 parts of the rate gather one row in that time."""
    asked = problem({"a": 1e5}, slo=1.9, cuts=(500, 1000), count=2)
    slow = profile("a", "k", {(share, batch): (0.001, 1.0)[batch - 1] for share in (500, 1000) for batch in (1, 2)})
    calls = Mock(side_effect=igniter._keeps)
    monkeypatch.setattr(igniter, "_keeps", calls)
    made = plan(msgspec.structs.replace(asked, profiles={("a", "k"): slow}))
    assert placements_by_device(made) == [[("a", 1, 500)] * 2] * 2
    assert made.rate("a") == pytest.approx(4 * 1e5 / 95_000)
    assert calls.call_count < 50


@given(
    rate=st.floats(0.1, 3000.0),
    slo=st.floats(0.005, 0.5),
    fixed=st.floats(1e-4, 0.01),
    work=st.floats(1e-5, 0.01),
    most=st.integers(1, 12),
)
def test_igniter_parts_are_the_fewest_that_have_a_lower_bound(
    rate: float, slo: float, fixed: float, work: float, most: int
) -> None:
    asked = problem({"a": rate}, slo=slo, cuts=(500, 1000))
    known = linear("a", "k", fixed, work, (500, 1000), range(1, most + 1))
    asked = msgspec.structs.replace(asked, profiles={("a", "k"): known})
    (kind,) = asked.fleet

    def bounded(count: int) -> bool:
        part = rate / count
        batch = min(most, math.ceil(part * slo / 2 * (1 - 1e-9)))
        return any(igniter._keeps(asked, kind, igniter.Workload("a", part, batch, share), ()) for share in kind.cuts)

    parts = igniter._workloads(asked, kind, "a", rate)
    if not parts:
        assert 2 * (fixed + work) > slo
    else:
        assert bounded(len(parts)) and (len(parts) == 1 or not bounded(len(parts) - 1))
