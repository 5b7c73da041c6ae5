from __future__ import annotations

from collections import Counter

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.check import check
from cotenant.planners.contract import EVERY_5
from cotenant.planners.one_worker_each import one_worker_each
from tests.planners.problems import embedded, linear


def shares(plan: Plan | None) -> dict[str, int]:
    assert plan is not None
    return {placement.model: partition.share for _, partition, placement in plan.placements()}


def two(slow: float, fast: float, slo: float = 10.0, *, count: int = 1, memory: int = 1 << 40) -> Problem:
    """Two models at one request a second, which take so many seconds a row on the whole device."""
    seconds = {"slow": slow, "fast": fast}
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in seconds),
        rates=dict.fromkeys(seconds, 1.0),
        fleet=(Kind(name="cpu", cuts=EVERY_5, count=count, memory=memory),),
        profiles={(name, "cpu"): linear(name, "cpu", 0.0, work) for name, work in seconds.items()},
    )


def test_one_worker_each_gives_every_model_one_partition_of_its_own() -> None:
    problem = embedded(scale=0.1)
    plan = one_worker_each(problem, "geometry")
    assert plan is not None and check(plan, problem) == []
    assert Counter(placement.model for _, _, placement in plan.placements()) == dict.fromkeys(problem.rates, 1)
    assert all(len(partition.placements) == 1 for _, partition, _ in plan.placements())
    assert plan.planner == "geometry"  # which plans for it from then on


def test_one_worker_each_divides_the_whole_device_by_work() -> None:
    assert shares(one_worker_each(two(0.08, 0.02), "geometry")) == {"slow": 800, "fast": 200}
    assert shares(one_worker_each(two(0.1, 1e-5), "geometry")) == {"slow": 950, "fast": 50}


def test_one_worker_each_keeps_targets_before_it_divides_by_work() -> None:
    """A batch and the wait for another take twice 0.2 s on a tenth of the device."""
    problem = two(0.4, 0.02)
    fast = msgspec.structs.replace(problem.models[1], slo=0.1)
    tight = msgspec.structs.replace(problem, models=(problem.models[0], fast))
    assert shares(one_worker_each(tight, "geometry")) == {"slow": 600, "fast": 400}


def test_one_worker_each_uses_every_device_that_there_is() -> None:
    plan = one_worker_each(two(0.08, 0.02, count=3), "geometry")
    assert shares(plan) == {"slow": WHOLE, "fast": WHOLE} and plan is not None and plan.devices_used == 2


def test_one_worker_each_leaves_out_models_that_nobody_asks_for() -> None:
    problem = msgspec.structs.replace(two(0.08, 0.02), rates={"slow": 1.0, "fast": 0.0})
    assert shares(one_worker_each(problem, "geometry")) == {"slow": WHOLE}


def test_one_worker_each_is_none_where_targets_do_not_leave_room() -> None:
    assert one_worker_each(two(0.1, 0.1, slo=0.3), "geometry") is None  # each needs two thirds of the device


def test_one_worker_each_is_none_for_a_model_without_a_profile() -> None:
    problem = two(0.08, 0.02)
    known = {key: profile for key, profile in problem.profiles.items() if key[0] == "fast"}
    assert one_worker_each(msgspec.structs.replace(problem, profiles=known), "geometry") is None


def test_one_worker_each_is_none_where_memory_does_not_suffice() -> None:
    assert one_worker_each(two(0.08, 0.02, memory=1 << 20), "geometry") is None
