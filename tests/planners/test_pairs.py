from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from unittest.mock import Mock

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.planners import Problem, load_planner, pairs
from cotenant.planners.capacity import batched_partitions
from cotenant.planners.check import check
from cotenant.predictors import Load

CUTS = (250, 500, 750, 1000)
# Model → memory in GiB, percent of multiprocessors and of memory bandwidth in use.
USED = {"target": (4, 50, 50), "light": (1, 20, 90), "busy": (3, 90, 40), "calm": (2, 60, 10)}


class Rude:
    """`busy` and `light` slow what is beside them; `calm` does not."""

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return max((1.3 if load.model == "busy" else 1.1 if load.model == "light" else 1.0) for load in colocated)


def problem(rates: dict[str, float], *, features: bool = True, **kind: object) -> Problem:
    """Models that serve 100 requests/s on a whole device, and in proportion less on less of it."""

    def measured(name: str) -> Profile:
        gib, sm, dram = USED[name]
        used = {"sm_util_pct": float(sm), "dram_util_pct": float(dram)} if features else {}
        return Profile(
            name,
            "gpu",
            [Point(share=cut, batch=1, latency=10 / cut, memory=gib << 30, features=used) for cut in CUTS],
        )

    return Problem(
        models=tuple(Model(name=name, slo=1.0) for name in rates),
        rates=rates,
        fleet=(msgspec.structs.replace(Kind(name="gpu", cuts=CUTS, count=None), **kind),),
        profiles={(name, "gpu"): measured(name) for name in rates},
        interference=Rude(),
    )


def placed(plan: Plan) -> list[list[str]]:
    return [[p.model for cut in device.partitions for p in cut.placements] for device in plan.devices]


RATES = {"target": 20.0, "light": 15.0, "busy": 15.0, "calm": 15.0}


@pytest.mark.parametrize(
    ("planner", "beside"),
    [("colocate", "calm"), ("colocate-memcap", "light"), ("colocate-sm", "busy"), ("colocate-mem", "calm")],
)
def test_each_policy_puts_its_choice_beside_the_first_that_waits(planner: str, beside: str) -> None:
    asked = problem(RATES)
    made = load_planner(planner)(asked)
    assert placed(made)[0] == ["target", beside]
    assert sorted(len(models) for models in placed(made)) == [2, 2]
    assert made.planner == planner
    assert check(made, asked) == []


def test_a_device_is_divided_so_that_both_serve_their_rates() -> None:
    """60 requests/s take three quarters, which leaves one."""
    made = pairs.plan(problem({"target": 60.0, "calm": 15.0}))
    assert [[cut.share for cut in device.partitions] for device in made.devices] == [[750, 250]]


def test_of_divisions_alike_in_throughput_the_one_that_leaves_least_idle_is_taken() -> None:
    made = pairs.plan(problem({"target": 20.0, "calm": 15.0}))
    assert [sum(cut.share for cut in device.partitions) for device in made.devices] == [1000]


def test_devices_with_many_legal_shares_are_divided_in_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each share of the target, of 4,950 divisions into whole percents."""
    tries = Mock(side_effect=batched_partitions)
    monkeypatch.setattr(pairs, "batched_partitions", tries)
    made = pairs.plan(problem({"target": 20.0, "calm": 15.0}, cuts=tuple(range(10, 1001, 10))))
    assert placed(made) == [["target", "calm"]]
    assert tries.call_count < 200


def test_who_finds_no_partner_is_alone() -> None:
    made = pairs.plan(problem({"target": 80.0, "calm": 80.0, "light": 10.0}))
    assert placed(made) == [["target"], ["calm"], ["light"]]
    assert placed(pairs.plan(problem(RATES, max_partitions=1))) == [[name] for name in RATES]


def test_pairs_with_too_few_devices_leave_those_that_still_wait_unserved() -> None:
    assert pairs.plan(problem(RATES, count=1)).unserved == {"light": 15.0, "busy": 15.0}


def test_a_rule_without_its_feature_says_which_column_it_needs() -> None:
    with pytest.raises(PlanError, match="the rule 'sm' needs the column 'sm_util_pct', which a profile of"):
        pairs.plan_by_sm(problem(RATES, features=False))
