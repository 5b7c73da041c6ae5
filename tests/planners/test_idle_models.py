"""Models that nobody asks for now: placed where there is room, and where that costs the others nothing."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.idle_models import with_idle_models
from cotenant.planners.local_search import attainment_shortfall
from tests.planners.problems import linear

CUTS = (200, 400, 600, 800, 1000)
MODELS = {"a": (0.004, 0.001), "b": (0.010, 0.008), "c": (0.002, 0.001), "d": (0.080, 0.100)}


def problem(**rates: float) -> Problem:
    return Problem(
        models=tuple(Model(name=name, slo=0.1) for name in MODELS),
        rates=dict.fromkeys(MODELS, 0.0) | rates,
        fleet=(Kind(name="k", count=1, cuts=CUTS),),
        profiles={
            (name, "k"): linear(name, "k", *work, cuts=CUTS, batches=(1, 4, 16)) for name, work in MODELS.items()
        },
    )


def plan(share: int, rate: float) -> Plan:
    """Model a alone."""
    held = Placement(model="a", batch=4, rate=rate, duty=0.02, latency=0.01)
    return Plan(
        planner="hand",
        objective="devices",
        devices=(Device(id=DeviceId("k"), partitions=(Partition(share=share, placements=(held,)),)),),
    )


def test_free_share_is_taken_first_and_the_lightest_model_comes_first() -> None:
    asked = problem(a=50.0, b=1.0, c=1.0)
    made = with_idle_models(plan(600, 50.0), asked)
    (device,) = made.devices
    assert [(part.share, [placed.model for placed in part.placements]) for part in device.partitions] == [
        (600, ["a", "b"]),
        (200, ["c"]),
    ]
    assert {name: made.rate(name) for name in "abc"} == {"a": 50.0, "b": 1.0, "c": 1.0}
    assert check(made, asked) == []
    assert attainment_shortfall(made, asked) == {}


def test_partition_is_shared_where_no_share_is_free() -> None:
    asked = problem(a=50.0, c=1.0)
    made = with_idle_models(plan(1000, 50.0), asked)
    assert [len(part.placements) for part in made.devices[0].partitions] == [2]
    assert made.unserved == {}


def test_share_is_taken_where_it_is_all_that_is_free() -> None:
    asked = problem(a=50.0, c=1.0)
    made = with_idle_models(plan(800, 50.0), asked)
    assert [part.share for part in made.devices[0].partitions] == [800, 200]
    assert made.unserved == {}


def test_device_gets_no_more_partitions_than_it_may_have() -> None:
    asked = problem(a=50.0, c=1.0)
    one = msgspec.structs.replace(asked, fleet=(Kind(name="k", count=1, cuts=CUTS, max_partitions=1),))
    made = with_idle_models(plan(600, 50.0), one)
    assert [len(part.placements) for part in made.devices[0].partitions] == [2]
    assert check(made, one) == []


def test_model_that_fits_nowhere_stays_unserved_and_the_others_as_they_were() -> None:
    asked = problem(a=50.0, d=1.0)
    before = plan(1000, 50.0)
    made = with_idle_models(before, asked)
    assert made.devices == before.devices
    assert made.unserved == {"d": 1.0}


def test_model_that_fits_nowhere_takes_nothing_from_what_idle_models_with_more_work_are_asked_for() -> None:
    asked = problem(a=50.0, b=5.0, d=0.01)
    made = with_idle_models(plan(600, 50.0), asked)
    assert made.rate("b") == 5.0
    assert made.unserved == {"d": 0.01}


def test_nobody_misses_a_target_more_often_for_a_model_that_is_idle() -> None:
    """Model a is short already, and any other in its device's only shares would make it fall further short."""

    def asked(**rates: float) -> Problem:
        given = problem(**rates)
        models = tuple(Model(name=model.name, slo=0.03 if model.name == "a" else 0.5) for model in given.models)
        return msgspec.structs.replace(given, models=models)

    before = plan(400, 75.0)
    made = with_idle_models(before, asked(a=75.0, b=1.0))
    assert made.rate("a") == 75.0
    alone = attainment_shortfall(before, asked(a=75.0))
    assert attainment_shortfall(made, asked(a=75.0, b=made.rate("b")))["a"] <= alone["a"]


def test_plan_without_idle_models_is_left_as_it_is() -> None:
    before = plan(600, 50.0)
    assert with_idle_models(before, problem(a=50.0)).devices == before.devices


def test_idle_models_have_a_device_where_nobody_can_serve_what_is_asked_for() -> None:
    """Else a model that is too slow for a busy machine would take all others with it."""
    asked = problem(a=1.0, b=1.0)
    made = with_idle_models(Plan(planner="hand", objective="devices", devices=()), asked)
    assert [device.id for device in made.devices] == [DeviceId("k")]
    assert {name: made.rate(name) for name in "ab"} == {"a": 1.0, "b": 1.0}
    assert check(made, asked) == []


def test_idle_models_keep_as_much_of_their_rates_as_fits_on_the_device_that_they_have() -> None:
    """The light one all of it, those with more work than fits as much work each, and what cannot be served nothing."""
    asked = problem(a=2000.0, b=200.0, c=1.0, d=1.0)
    made = with_idle_models(Plan(planner="hand", objective="devices", devices=()), asked)
    assert made.devices_used == 1
    assert made.rate("c") == 1.0
    assert made.rate("d") == 0.0
    assert made.rate("a") * 0.005 == pytest.approx(made.rate("b") * 0.018)
    assert 0.2 < made.rate("a") * 0.005 < 1.0
    assert check(made, asked) == []
    served = msgspec.structs.replace(asked, rates=made.rates())
    assert attainment_shortfall(made, served) == {}
    assert set(made.unserved) == {"a", "b", "d"}
