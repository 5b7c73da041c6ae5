from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.mig import GIB, instances
from cotenant.core.model import Kind, Model
from cotenant.planners import Problem, geometry
from cotenant.planners.check import check
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.modes import ModeCatalog
from cotenant.planners.geometry.round_filling import RoundFiller
from tests.planners.problems import linear, profile


def catalog(slos: list[float]) -> ModeCatalog:
    """Models whose batches take 4 ms, and 1 ms more for each row, on a whole device or twice that on half of one."""
    names = [f"m{n}" for n in range(len(slos))]
    kind = Kind(name="k", count=1, cuts=(500, 1000))
    problem = Problem(
        models=tuple(Model(name=name, slo=slo) for name, slo in zip(names, slos, strict=True)),
        rates=dict.fromkeys(names, 1.0),
        fleet=(kind,),
        profiles={(name, "k"): linear(name, "k", 0.004, 0.001, cuts=kind.cuts, batches=(1, 4, 16)) for name in names},
    )
    return PlanningContext(problem).catalog


def test_fill_serves_all_models_that_fit_their_targets_at_once() -> None:
    """Five batches of one row take 25 ms: with its own batch each waits for 30 ms."""
    mode = RoundFiller(catalog([0.031] * 5)).fill(1, dict.fromkeys(range(5), 1.0), math.inf)
    assert mode is not None
    assert (mode.models, mode.batches) == ((0, 1, 2, 3, 4), (1, 1, 1, 1, 1))
    mode = RoundFiller(catalog([0.029] * 5)).fill(1, dict.fromkeys(range(5), 1.0), math.inf)
    assert mode is not None
    assert len(mode.models) == 4


def test_fill_begins_with_the_models_that_are_given_first() -> None:
    filler = RoundFiller(catalog([0.029] * 5))
    for first in ((4, 3, 2, 1), (0, 2, 3, 4)):
        mode = filler.fill(1, dict.fromkeys(range(5), 1.0), math.inf, first)
        assert mode is not None
        assert set(mode.models) == set(first)


def test_fill_adds_a_part_of_the_demand_of_a_model_that_is_given_first_only_where_told_to() -> None:
    """The first takes rounds of 20 ms at most: of the second's demand half fits beside it, and all does not."""
    filler, demand = RoundFiller(catalog([0.04, 0.04])), {0: 200.0, 1: 600.0}
    alone, beside = (filler.fill(1, demand, math.inf, (0, 1), in_part=in_part) for in_part in (False, True))
    assert alone is not None
    assert beside is not None
    assert (alone.models, beside.models) == ((0,), (0, 1))
    assert beside.rates[0] >= 200.0 * (1 - 1e-9)
    assert 600.0 / 8 <= beside.rates[1] < 600.0


def test_fill_of_what_nobody_needs_or_no_target_allows_is_none() -> None:
    assert RoundFiller(catalog([0.1])).fill(1, {}, math.inf) is None
    assert RoundFiller(catalog([0.1, 0.011])).fill(0, {1: 1.0}, math.inf) is None


def on_instances(many: int) -> Problem:
    """Models of 3 GiB on one A100 of 40 GB in MIG instances; a batch of one takes 10 ms on each of them."""
    names = [f"m{n}" for n in range(many)]
    geometry_name = "mig-a100-40gb"
    cuts = tuple(sorted({instance.share for instance in instances(geometry_name)}))
    return Problem(
        models=tuple(Model(name=name, slo=0.2) for name in names),
        rates=dict.fromkeys(names, 1.0),
        fleet=(Kind(name="k", geometry=geometry_name, cuts=cuts, count=1, memory=40 * GIB),),
        profiles={(name, "k"): profile(name, "k", {(s, 1): 0.010 for s in cuts}, 3 * GIB) for name in names},
        time_limit=0.5,
        arrivals="even",
    )


def test_fill_keeps_within_the_memory_of_a_mig_instance() -> None:
    """The device's memory does not limit it: each instance has its own."""
    known = PlanningContext(on_instances(12)).catalog
    filler = RoundFiller(known)
    for s, slot in enumerate(known.slots):
        mode = filler.fill(s, dict.fromkeys(range(12), 1.0), math.inf)
        assert mode is not None
        assert len(mode.models) == min(12, slot.memory // (3 * GIB))


def test_models_that_instances_have_no_memory_for_leave_the_others_served() -> None:
    problem = on_instances(14)
    plan = geometry.plan(problem)
    assert check(plan, problem) == []
    assert len(plan.unserved) <= 2


@given(
    slos=st.lists(st.floats(0.011, 0.2), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    memory=st.sampled_from((math.inf, 20 * 2**20)),
)
@settings(max_examples=40, deadline=None)
def test_fill_keeps_every_target_and_up_with_the_demand(slos: list[float], seed: int, memory: float) -> None:
    known = catalog(slos)
    demand = dict(enumerate(np.random.default_rng(seed).uniform(0.0, 300.0, len(slos)).tolist()))
    first, again = (RoundFiller(known).fill(1, demand, memory) for _ in range(2))
    assert first == again
    if first is None:
        return
    assert first.memory <= memory
    latency = [0.004 + 0.001 * batch for batch in first.batches]
    for i, rate, own in zip(first.models, first.rates, latency, strict=True):
        assert sum(latency) + own <= slos[i] * (1 + 1e-9)
        # Of the first model it may be less, where one partition does not carry all of it.
        assert rate >= demand[i] * (1 - 1e-6) / 8
