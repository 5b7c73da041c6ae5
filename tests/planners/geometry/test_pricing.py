"""What modes are worth at most, against every choice of batches there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem
from cotenant.planners.geometry import pricing
from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.pricing import DualPrices, StepValue, price_modes
from tests.planners.geometry.test_modes import catalog, made, runs
from tests.planners.problems import linear

EVERY = [chosen for size in (1, 2, 3) for chosen in combinations(range(3), size)]


def some_worth(seed: int) -> DualPrices:
    rng = np.random.default_rng(seed)
    steps = [StepValue(int(rng.integers(3)), float(rng.uniform(0.5, 5)), float(rng.uniform(0, 1))) for _ in range(3)]
    return DualPrices(rng.uniform(20, 400, 3), rng.uniform(0, 2, 3), steps)


def value(worth: DualPrices, mode: Mode) -> float:
    return sum(float(worth.value(i, np.array([rate]))[0]) for i, rate in zip(mode.models, mode.rates, strict=True))


@given(seed=st.integers(0, 1000), known=st.sampled_from((0.0, 0.3, 0.9)))
@settings(deadline=None, max_examples=10)
def test_no_mode_is_worth_more_and_those_worth_more_than_known_are_found(seed: int, known: float) -> None:
    problem, worth = made(seed), some_worth(seed)
    offered = catalog(problem)
    for s, slot in enumerate(offered.slots):
        able = [mode for models in EVERY for mode in runs(problem, slot, models)]
        best = max((value(worth, mode) for mode in able), default=0.0)
        bound, found = price_modes(offered, s, worth, known * best)
        # No more than the best mode: what was only bounded counts where there are too many.
        assert bound == pytest.approx(max(best, known * best))
        if known < 1 and best > 0:
            assert max(each for each, _ in found) == pytest.approx(best)
        real = {(mode.models, mode.batches, mode.procs): mode.rates for mode in able}
        for each, mode in found:
            assert mode.rates == pytest.approx(real[mode.models, mode.batches, mode.procs])
            assert each == pytest.approx(value(worth, mode))
            assert each > known * best


def test_the_bound_holds_where_there_are_too_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "BEAM_WIDTH", 5)
    for seed in range(10):
        problem, worth = made(seed), some_worth(seed)
        offered = catalog(problem)
        for s, slot in enumerate(offered.slots):
            able = [mode for models in EVERY for mode in runs(problem, slot, models)]
            best = max((value(worth, mode) for mode in able), default=0.0)
            assert price_modes(offered, s, worth, 0.0)[0] >= best * (1 - 1e-9)


def test_modes_that_do_not_fit_the_memory_count_but_are_not_offered() -> None:
    tight, free = made(3, memory=2 << 20), made(3)
    worth = some_worth(3)
    for s in range(3):
        bound, found = price_modes(catalog(tight), s, worth, 0.0)
        assert all(mode.memory <= 2 << 20 for _, mode in found)
        assert bound <= price_modes(catalog(free), s, worth, 0.0)[0]


def test_the_largest_batch_that_its_target_allows_counts_although_one_row_less_is_nearly_as_good() -> None:
    """In a tight round: intervals of rounds must not hide what only the batch that just fits carries."""
    for largest in range(80, 110):
        took = 0.3 + 0.003 * largest
        models = (Model(name="a", slo=2 * took * (1 + 1e-6)),)
        profiles = {("a", "k"): linear("a", "k", 0.3, 0.003, cuts=(1000,), batches=(1, 128))}
        problem = Problem(models=models, rates={"a": 1.0}, fleet=(Kind(name="k", cuts=(1000,)),), profiles=profiles)
        worth = DualPrices(np.array([largest / took]), np.array([1.0]))
        assert price_modes(catalog(problem), 0, worth, 0.0)[0] == pytest.approx(1.0, abs=1e-9)


def test_a_round_counts_in_whatever_order_its_batches_are_added_up() -> None:
    took = {"a": 0.001, "b": 0.008, "c": 0.002}
    assert sum(took.values()) + 0.008 > 0.019 >= sum(sorted(took.values())) + 0.008
    models = tuple(Model(name=name, slo=0.019) for name in took)
    profiles = {(name, "k"): linear(name, "k", 0.0, took[name], cuts=(1000,), batches=(1,)) for name in took}
    fleet = (Kind(name="k", cuts=(1000,)),)
    problem = Problem(models=models, rates=dict.fromkeys(took, 1.0), fleet=fleet, profiles=profiles)
    worth = DualPrices(np.ones(3), np.ones(3))
    assert price_modes(catalog(problem), 0, worth, 0.0)[0] == pytest.approx(3.0)
