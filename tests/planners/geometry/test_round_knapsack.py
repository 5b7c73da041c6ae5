"""Check which rounds are filled, and the memory of modes; test_annealing.py compares their value with the best."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.pricing import DualPrices
from cotenant.planners.geometry.round_knapsack import ROUND_LENGTHS, RoundKnapsack
from tests.planners.geometry.test_round_filling import catalog, on_instances


def test_rounds_of_each_call_have_lengths_between_those_of_the_calls_before() -> None:
    knapsack = RoundKnapsack(catalog([0.03, 0.1]), [0, 1])
    calls = [knapsack._rounds(np.array([0, 1])) for _ in range(4)]
    for slots, lengths in calls:
        assert slots.tolist() == [0] * ROUND_LENGTHS + [1] * ROUND_LENGTHS
        assert (np.diff(lengths.reshape(2, -1)) > 0).all()
    ratio = calls[0][1][1] / calls[0][1][0]
    lengths = np.sort(np.concatenate([own[ROUND_LENGTHS:] for _, own in calls]))
    assert all(longer > shorter * ratio**0.1 for shorter, longer in pairwise(lengths.tolist()))


def test_modes_keep_within_the_memory_of_a_mig_instance() -> None:
    """Every model is worth as much as any other, and time is left for all of them."""
    context = PlanningContext(on_instances(12))
    knapsack = RoundKnapsack(context.catalog, context.usable_slots)
    prices = DualPrices(context.rates, np.ones(12), [])
    modes = knapsack.valuable_modes(prices, np.zeros(len(context.slots)), context.budget)
    assert modes
    for mode in modes:
        assert mode.memory <= context.slots[mode.slot].memory
