"""Cuts on each model's demand: valid for whole numbers of partitions, and of use for parts of them."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner_problems import Recipe, problem
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import ColumnPool, CoverProgram, Fleet
from cotenant.planners.geometry.demand_cuts import MIN_VIOLATION, DemandCuts, violated_cuts
from cotenant.planners.geometry.modes import Mode


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.03, 1.0), st.floats(0.01, 5.0)),
        min_size=1,
        max_size=8,
    )
)
def test_cuts_hold_for_every_whole_cover_and_not_for_the_parts_that_they_cut_off(
    entries: list[tuple[int, float, float]],
) -> None:
    models, fractions, counts = (np.array(column) for column in zip(*entries, strict=True))
    for model, multiplier in violated_cuts(models, fractions, counts):
        own = models == model
        steps = np.ceil(multiplier * fractions[own])
        assert steps @ counts[own] < math.ceil(multiplier) * (1 - MIN_VIOLATION)
        for whole in itertools.product(range(4), repeat=min(int(own.sum()), 4)):
            used = np.array([*whole, *[0] * (int(own.sum()) - len(whole))])
            if fractions[own] @ used >= 1 - 1e-9:
                assert steps @ used >= math.ceil(multiplier)


def test_partitions_that_serve_less_than_half_are_three() -> None:
    ((model, multiplier),) = violated_cuts(np.array([7]), np.array([0.4]), np.array([2.5]))
    assert model == 7 and multiplier == pytest.approx(2.5, rel=1e-6)
    assert violated_cuts(np.array([7]), np.array([0.4]), np.array([3.0])) == []
    # Two models: each has its own cut, and what serves one is no part of the other's.
    cuts = violated_cuts(np.array([1, 0, 1]), np.array([0.9, 0.6, 0.9]), np.array([0.6, 1.7, 0.5]))
    assert [model for model, _ in cuts] == [0, 1]
    assert violated_cuts(np.array([], dtype=int), np.array([]), np.array([])) == []


def test_entries_are_those_of_each_serving_and_cut_of_its_model() -> None:
    cuts = DemandCuts()
    assert cuts.extend([(2, 2.5), (0, 1.2)]).tolist() == [0, 1]
    assert cuts.extend([(2, 5.0)]).tolist() == [2]
    serving, cut, steps = cuts.entries(np.array([0, 1, 2]), np.array([0.5, 0.5, 0.5]))
    assert sorted(zip(serving.tolist(), cut.tolist(), steps.tolist(), strict=True)) == [(0, 1, 1), (2, 0, 2), (2, 2, 3)]
    serving, cut, _ = cuts.entries(np.array([2, 2]), np.array([0.1, 0.9]), np.array([2]))
    assert serving.tolist() == [0, 1] and cut.tolist() == [2, 2]


def _program(every: int = 1, *, integer: bool = False) -> tuple[CoverProgram, PlanningContext]:
    asked = msgspec.structs.replace(problem(Recipe(seed=21, models=4, devices=30, kinds=2, load=0.2)), bounded=False)
    context = PlanningContext(asked)
    fleet = Fleet(
        context.slots, context.patterns, context.counts, context.prices, context.memory_limits, 1e4 / context.rates
    )
    pool = ColumnPool(context.slots, context.memory_limits, context.singles)
    columns = np.arange(0, len(pool.modes), every)
    return CoverProgram(fleet, pool, columns, context.rates, integer=integer), context


def test_cuts_raise_the_relaxation_up_to_the_cost_of_whole_modes_at_most() -> None:
    program, _ = _program()
    solution = program.solve()
    whole = _program(integer=True)[0].solve(gap=1e-6, nodes=100_000)
    assert solution is not None and whole is not None
    values = [solution.value]
    while program.add_cuts(solution):
        solution = program.solve()
        assert solution is not None
        values.append(solution.value)
    assert len(values) > 2 and values == sorted(values)
    assert values[0] * 1.005 < values[-1] <= whole.value * (1 + 1e-6)


def test_columns_in_use_are_worth_their_price_with_cuts_whenever_they_were_added() -> None:
    program, context = _program(2)
    solution = program.solve()
    assert solution is not None and program.add_cuts(solution)
    program.add(np.arange(1, len(program.pool.modes), 2))
    pair = Mode(program.pool.modes[0].slot, (0, 1), (context.rates[0] * 0.6, context.rates[1] * 0.3), (1, 1), (1, 1), 0)
    program.pool.extend([pair])
    program.add(np.array([len(program.pool.modes) - 1]))
    solution = program.solve()
    assert solution is not None
    while program.add_cuts(solution):
        solution = program.solve()
        assert solution is not None
    assert solution.cut_duals.any()
    value, price = program.values_of(solution), program.prices_of(solution)
    used = program.columns[solution.modes > 1e-6]
    assert value[used] == pytest.approx(price[used], rel=1e-6)
    assert (value <= price * (1 + 1e-6) + 1e-9).all()
    prices = program.demand_prices(solution)
    assert [prices.worth(mode) for mode in program.pool.modes] == pytest.approx(value.tolist(), rel=1e-6, abs=1e-9)
    # The whole demand is worth what serving it costs.
    assert prices.average() @ context.rates == pytest.approx(prices.total())
    assert prices.total() - solution.device_duals @ context.counts == pytest.approx(solution.value)
