"""Many models with tight targets on one H100, whose batches take about as long on a small share as on a large one."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from cotenant.backends.green import legal_shares
from cotenant.config import read_profiles_file
from cotenant.core.model import Kind, Model
from cotenant.planners import Problem, elastic, elastic_plus, geometry
from cotenant.planners.check import check
from cotenant.planners.explain import explain
from cotenant.planners.forecast import forecast
from cotenant.planners.geometry import small_fleet
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.problem import Objective
from cotenant.planners.scale_search import search_scale, serves_all
from cotenant.planning import plan as plan_problem
from cotenant.zoo import GPULET, TORCH

DATA = Path(__file__).parents[3] / "data" / "gpu" / "h100-80gb-hbm3"
H100 = Kind(name="h100-80gb-hbm3", count=1, cuts=legal_shares((8,) * 15 + (12,)), memory=85_520_809_984)


def nine(objective: Objective = "rate", rate: float = 1.0, slo: float = 1.0) -> Problem:
    """The models of the gpulet paper at so many times its targets, on one H100."""
    profiles = read_profiles_file(DATA / "profiles-green.csv")
    return Problem(
        models=tuple(Model(name=name, slo=TORCH[name].slo * slo) for name in GPULET),
        rates=dict.fromkeys(GPULET, rate),
        profiles={key: profile for key, profile in profiles.items() if key[0] in GPULET},
        fleet=(H100,),
        objective=objective,
        time_limit=0.5,
        arrivals="even",
        bounded=False,
    )


def largest_of_whole_models(problem: Problem) -> float:
    """Return the largest multiple with each model on one partition, over all sets of models on all shares.

    A set that no share serves is in no larger set that one does.
    """
    catalog = PlanningContext(problem).catalog
    models = range(len(catalog.names))
    best: dict[tuple[int, frozenset[int]], float] = {}
    for s, _ in enumerate(catalog.slots):
        for size in models:
            for chosen in combinations(models, size + 1):
                members = frozenset(chosen)
                if size and any((s, members - {i}) not in best for i in chosen):
                    continue
                mode = catalog.proportional_mode(s, chosen, [1.0] * len(chosen), (1,) * len(chosen))
                if mode is not None:
                    best[s, members] = min(mode.rates)
    shares = [slot.share for slot in catalog.slots]
    reached = {(0, frozenset[int]()): float("inf")}
    largest = 0.0
    while reached:
        more: dict[tuple[int, frozenset[int]], float] = {}
        for (used, served), multiple in reached.items():
            first = min(set(models) - served)
            for (s, members), own in best.items():
                if first in members and not members & served and used + shares[s] <= 1000:
                    both, value = (used + shares[s], served | members), min(multiple, own)
                    if len(both[1]) == len(models):
                        largest = max(largest, value)
                    elif value > more.get(both, largest):
                        more[both] = value
        reached = more
    return largest


def without(model: str, problem: Problem) -> Problem:
    return msgspec.structs.replace(problem, rates={name: rate for name, rate in problem.rates.items() if name != model})


@pytest.mark.parametrize("problem", [nine(), without("bert", nine(slo=0.7))], ids=["nine", "eight"])
def test_largest_multiple_is_at_least_that_of_all_sets_of_whole_models_and_of_the_papers_planners(
    problem: Problem,
) -> None:
    plan = geometry.plan(problem)
    assert check(plan, problem) == []
    assert not plan.unserved
    assert plan.scale >= largest_of_whole_models(problem) * 0.998
    for planner in (elastic.plan, elastic_plus.plan):
        empty = msgspec.structs.replace(plan, devices=(), scale=0.0)
        assert plan.scale >= search_scale(planner, problem, serves_all, above=empty, below=1000.0).scale


def test_ruin_and_recreate_alone_comes_near_that_of_all_sets_of_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = nine()
    six = ("lenet", "googlenet", "resnet50", "ssd_mobilenet", "vgg16", "mnasnet")
    problem = msgspec.structs.replace(problem, rates=dict.fromkeys(six, 1.0))
    monkeypatch.setattr(small_fleet, "MAX_MODELS", 0)
    assert geometry.plan(problem).scale >= largest_of_whole_models(problem) * 0.95


def test_rates_near_the_largest_are_all_served() -> None:
    problem = nine("devices", 190.0)
    plan = geometry.plan(problem)
    assert check(plan, problem) == []
    assert not plan.unserved


def test_models_that_only_all_together_cannot_be_served_leave_the_others_their_largest_multiple() -> None:
    """At 0.8 of the targets no round has room for densenet161 as well: the others are served without it."""
    problem = nine(slo=0.8)
    plan = plan_problem(problem, "geometry", clock=None)
    assert check(plan, problem) == []
    assert (plan.scale, plan.unserved) == (0.0, {"densenet161": 1.0})
    assert geometry.plan(without("densenet161", problem)).scale > 1
    attained = {name: model.attainment for name, model in forecast(plan, problem).models.items()}
    assert attained == pytest.approx({name: float(name != "densenet161") for name in attained}, abs=1e-3)
    (named,) = explain(plan, problem).unserved
    assert (named.model, named.cause) == ("densenet161", "capacity")


def test_of_models_that_only_together_cannot_be_served_the_one_of_higher_priority_is() -> None:
    problem = nine(slo=0.8)
    first = tuple(
        msgspec.structs.replace(model, priority=1 if model.name == "densenet161" else 2) for model in problem.models
    )
    problem = msgspec.structs.replace(problem, models=first)
    plan = plan_problem(problem, "geometry", clock=None)
    assert check(plan, problem) == []
    assert plan.rate("densenet161") == pytest.approx(1.0)
    assert "densenet161" not in plan.unserved
    assert plan.scale == 0
