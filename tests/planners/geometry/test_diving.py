"""Dives: what they cover, and what cuts are for."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from benchmarks.planner_problems import Recipe, problem
from cotenant.planners.geometry import covering
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import CoverProgram, Fleet
from cotenant.planners.geometry.diving import Dive, Diver

MIXED = Recipe(seed=32, models=24, devices=40, kinds=2, load=0.5)


def dived(recipe: Recipe, rounded_up: float = 0.3) -> tuple[Dive, PlanningContext]:
    """Return a dive with 5 s of work."""
    asked = msgspec.structs.replace(problem(recipe), bounded=False, arrivals="even", time_limit=10.0)
    context = PlanningContext(asked)
    penalties = 1e3 * max(context.prices) / context.rates
    fleet = Fleet(context.slots, context.patterns, context.counts, context.prices, context.memory_limits, penalties)
    diver = Diver(fleet, context.catalog, context.singles, context.usable_slots, WorkBudget(asked))
    return diver.cover(context.rates, rounded_up=rounded_up), context


def cost_of(dive: Dive, context: PlanningContext) -> float:
    return sum(context.prices[pattern.kind] * many for pattern, many in dive.cover.patterns)


def test_cover_serves_the_demand_on_the_pieces_of_its_patterns() -> None:
    dive, context = dived(MIXED)
    served, used, cut = np.zeros(len(context.rates)), Counter[int](), Counter[int]()
    for mode, many in dive.cover.modes:
        served[list(mode.models)] += many * np.array(mode.rates)
        used[mode.slot] += many
    for pattern, many in dive.cover.patterns:
        cut.update({s: many * pieces for s, pieces in pattern.pieces})
    assert (served >= context.rates * (1 - 1e-6)).all()
    assert used <= cut
    assert dive.relaxed is not None and dive.relaxed.solution.value <= cost_of(dive, context)
    assert cost_of(dive, context) <= 1.06 * dive.relaxed.solution.value


def test_cuts_make_dives_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [MIXED, msgspec.structs.replace(MIXED, seed=33, models=20, devices=20)]
    with_cuts = sum(cost_of(*dived(recipe)) for recipe in recipes)
    monkeypatch.setattr(covering, "violated_cuts", lambda *_: [])
    assert with_cuts < 0.97 * sum(cost_of(*dived(recipe)) for recipe in recipes)


def test_prices_of_the_relaxation_are_what_the_demand_costs() -> None:
    dive, context = dived(MIXED)
    assert dive.relaxed is not None
    solution = dive.relaxed.solution
    value = dive.relaxed.prices() @ context.rates - solution.device_duals @ context.counts
    assert value == pytest.approx(solution.value)
    excess = dive.relaxed.excess()
    assert excess[dive.relaxed.program.columns[: len(solution.modes)][solution.modes > 1e-6]] == pytest.approx(
        0, abs=1e-6
    )


def test_parts_are_rounded_up_for_what_whole_ones_leave_alone() -> None:
    context = PlanningContext(msgspec.structs.replace(problem(MIXED), bounded=False))
    fleet = Fleet(
        context.slots, context.patterns, context.counts, context.prices, context.memory_limits, 1 / context.rates
    )
    diver = Diver(fleet, context.catalog, context.singles, context.usable_slots, context.budget)
    demand = 0.01 * context.rates
    serves = [[n for n, mode in enumerate(diver.singles) if mode.models == (i,)] for i in range(2)]
    whole, part, *_ = (n for n in serves[0] if diver.singles[n].rates[0] >= demand[0])
    other = next(n for n in serves[1] if diver.singles[n].rates[0] >= demand[1])
    program = CoverProgram(fleet, diver.pool, np.arange(len(diver.singles)), demand)
    solution = program.solve()
    assert solution is not None
    modes = np.zeros(len(diver.singles))
    modes[[whole, part, other]] = 1.0, 0.6, 0.4
    solution = msgspec.structs.replace(solution, modes=modes)
    assert diver._rounded(program, solution, demand, 1.0) == {whole: 1, other: 1}
    assert diver._rounded(program, solution, demand, 0.1) == {whole: 1}
