from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from cotenant.core.model import Kind, Model
from cotenant.errors import PlanError
from cotenant.planners import load_planner
from tests.planners.problems import embedded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"models": (Model(name="a", slo=1.0),) * 2, "rates": {}},
            "two entries for the model 'a'; list each once",
        ),
        ({"fleet": (Kind(name="k"),) * 2}, "two entries for the kind of device 'k'; list each once"),
        ({"models": (Model(name="a", slo=0.0),), "rates": {}}, "model 'a': a target of 0 s must be above 0"),
        (
            {"models": (Model(name="a", slo=math.inf),), "rates": {}},
            "model 'a': a target of inf s must be above 0 and finite",
        ),
        (
            {"models": (Model(name="a", slo=math.nan),), "rates": {}},
            "model 'a': a target of nan s must be above 0 and finite",
        ),
        ({"models": (Model(name="a", slo=1, attainment=1.1),), "rates": {}}, "model 'a': attainment 1.1 must be"),
        ({"models": (Model(name="a", slo=1, max_batch=0),), "rates": {}}, "model 'a': a largest batch of 0 must be"),
        ({"rates": {"bert": -1.0}}, "model 'bert': a rate of -1 requests/s must be finite and at least 0"),
        ({"rates": {"bert": float("inf")}}, "model 'bert': a rate of inf requests/s must be finite"),
        ({"rates": {"z": 1.0}}, "unknown model 'z' in this problem; it has resnet50, "),
        ({"fleet": (Kind(name="k", count=-1),)}, "kind 'k': a count of -1 must be at least 0"),
        ({"fleet": (Kind(name="k", max_partitions=0),)}, "kind 'k': max_partitions 0 must be at least 1"),
        (
            {"fleet": (Kind(name="k", cuts=()),)},
            r"kind 'k': the cuts \(\) must ascend, from at least 1 to at most 1000",
        ),
        ({"fleet": (Kind(name="k", cuts=(500, 200)),)}, r"kind 'k': the cuts \(500, 200\) must ascend"),
        (
            {"fleet": (Kind(name="k", geometry="mig-a100"),)},
            "kind 'k': no MIG geometry 'mig-a100'; available: mig-a30-24gb, ",
        ),
        (
            {"fleet": (Kind(name="k", geometry="mig-a30-24gb", cuts=(250, 300)),)},
            r"kind 'k': the cuts \(250, 300\) are not all shares of MIG instances, \(250, 500, 1000\) ‰",
        ),
        ({"fleet": (Kind(name="k", cuts=(500, 1200)),)}, r"kind 'k': the cuts \(500, 1200\) must ascend"),
    ],
)
def test_problem_with_invalid_values_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match="^" + message):
        msgspec.structs.replace(embedded(), **change)


def test_load_planner_of_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(PlanError, match=r"^unknown planner 'best'; available: bestfit, colocate, "):
        load_planner("best")
