"""Ranked configurations: each serves what the forecast says, and no more."""

from __future__ import annotations

import math

import msgspec
import pytest

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.planners.configurations import Configuration, rank_configurations
from cotenant.planners.forecast import forecast
from tests.planners.problems import embedded

PROBLEM = embedded()


def attainment(problem: Problem, one: Configuration, rate: float) -> float:
    """Of a plan with this configuration alone on a device."""
    latency = problem.profiles[one.model, one.kind].latency(one.batch, one.share, one.procs)
    placement = Placement(model=one.model, batch=one.batch, rate=rate, duty=latency, latency=latency, procs=one.procs)
    device = Device(id=DeviceId(one.kind, 0), partitions=(Partition(share=one.share, placements=(placement,)),))
    asked = msgspec.structs.replace(problem, models=(problem.model(one.model),), rates={one.model: rate})
    return forecast(Plan(planner="hand", devices=(device,)), asked).models[one.model].attainment


@pytest.mark.parametrize("name", [model.name for model in PROBLEM.models])
def test_configuration_serves_its_rate_within_the_slo_and_no_more(name: str) -> None:
    model = PROBLEM.model(name)
    ranked = rank_configurations(model, PROBLEM.profiles[name, PROBLEM.fleet[0].name])
    assert [one.rate for one in ranked] == sorted((one.rate for one in ranked), reverse=True)
    for one in [one for one in ranked if one.rate > 0][:6]:
        assert attainment(PROBLEM, one, one.rate) >= model.attainment
        assert attainment(PROBLEM, one, one.rate * 1.01) < model.attainment or one.rate * 1.01 >= one.batch / (
            PROBLEM.profiles[name, one.kind].latency(one.batch, one.share)
        )
        assert one.p50 <= one.p99 <= model.slo
        assert one.rate_of_whole == pytest.approx(one.rate * 1000 / one.share)


def test_configuration_that_is_too_slow_serves_nothing() -> None:
    model = msgspec.structs.replace(PROBLEM.model("digits"), slo=0.05)
    points = [Point(share=share, batch=1, latency=10.0 / share, memory=0) for share in (100, 1000)]
    fast, slow = rank_configurations(model, Profile("digits", "cpu", points))
    assert (fast.share, slow.share) == (1000, 100)
    assert fast.rate > 0 and (slow.rate, slow.p99) == (0.0, math.inf)


def test_largest_batch_of_a_model_bounds_its_configurations_and_others_may_be_asked_for() -> None:
    profile = PROBLEM.profiles["digits", PROBLEM.fleet[0].name]
    model = msgspec.structs.replace(PROBLEM.model("digits"), max_batch=3)
    assert max(one.batch for one in rank_configurations(model, profile)) == 3
    more = rank_configurations(PROBLEM.model("digits"), profile, [(330, 5, 1)])
    assert (330, 5, 1) in [(one.share, one.batch, one.procs) for one in more]
