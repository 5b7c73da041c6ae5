from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.whole_models import whole_model_modes
from tests.planners.problems import linear

CUTS = (200, 400, 500, 800, 1000)


def problem(costs: list[tuple[float, float, float]]) -> Problem:
    """Models by seconds of a batch, seconds of a row, and target, on one device."""
    names = "abcd"[: len(costs)]
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name, (_, _, slo) in zip(names, costs, strict=True)),
        rates=dict.fromkeys(names, 10.0),
        profiles={
            (name, "k"): linear(name, "k", fixed, work, cuts=CUTS, batches=(1, 8))
            for name, (fixed, work, _) in zip(names, costs, strict=True)
        },
        fleet=(Kind(name="k", count=1, cuts=CUTS),),
        objective="rate",
        arrivals="even",
        bounded=False,
    )


def modes_of(asked: Problem, limit: float) -> tuple[PlanningContext, list[Mode]]:
    context = PlanningContext(asked)
    return context, whole_model_modes(context.catalog, context.usable_slots, context.rates, limit, context.budget)


def largest_by_enumeration(context: PlanningContext) -> float:
    """Try all partitions on all models: each model on one of three, each of any size."""
    models, slots = range(len(context.names)), context.usable_slots
    known: dict[tuple[int, tuple[int, ...]], float] = {}
    largest = 0.0
    for chosen in product(range(3), repeat=len(context.names)):
        sets = [tuple(i for i in models if chosen[i] == n) for n in sorted(set(chosen))]
        for sizes in product(slots, repeat=len(sets)):
            if sum(context.slots[s].share for s in sizes) > 1000:
                continue
            for key in zip(sizes, sets, strict=True):
                if key not in known:
                    rates = [float(context.rates[i]) for i in key[1]]
                    mode = context.catalog.proportional_mode(*key, rates, (1,) * len(rates))
                    known[key] = 0.0 if mode is None else min(mode.rates) / 10
            largest = max(largest, min(known[key] for key in zip(sizes, sets, strict=True)))
    return largest


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.floats(0.001, 0.01), st.floats(0.0001, 0.002), st.floats(0.02, 0.2)), min_size=2, max_size=3)
)
def test_whole_model_modes_reach_the_largest_multiple_of_any_partition_of_the_models(
    costs: list[tuple[float, float, float]],
) -> None:
    context, modes = modes_of(problem(costs), 1000.0)
    reached = {i: rate / 10 for mode in modes for i, rate in zip(mode.models, mode.rates, strict=True)}
    largest = largest_by_enumeration(context)
    assert sum(context.slots[mode.slot].share for mode in modes) <= 1000
    assert len(reached) == (len(context.names) if largest else 0)
    assert min(reached.values(), default=0.0) == pytest.approx(largest, rel=5e-3)


def test_whole_model_modes_up_to_a_limit_that_is_served_use_the_least_share() -> None:
    context, modes = modes_of(problem([(0.002, 0.0005, 0.1)] * 3), 0.5)
    assert [(context.slots[mode.slot].share, mode.models) for mode in modes] == [(200, (0, 1, 2))]


def test_whole_model_modes_without_budget_or_where_some_model_fits_nowhere_are_none() -> None:
    context = PlanningContext(problem([(0.002, 0.0005, 0.1)] * 2))
    slots, rates, budget = context.usable_slots, np.array([10.0, 10.0]), context.budget
    assert whole_model_modes(context.catalog, slots, rates, 1e9, budget.part(0)) == []
    two = msgspec.structs.replace(context.problem, fleet=(Kind(name="k", count=1, cuts=(500,)),))
    tight = msgspec.structs.replace(two, models=tuple(Model(name=name, slo=0.011) for name in "ab"))
    assert len(modes_of(tight, 1000.0)[1]) == 2  # each on its own half, where both would be late on one
    assert modes_of(problem([(0.004, 0.0005, 0.01)] * 3), 1000.0)[1] == []
