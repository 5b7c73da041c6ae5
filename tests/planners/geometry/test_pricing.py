"""Compare the pricing bound and its modes with brute force over all batches."""

from __future__ import annotations

import math
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.model import Kind, Model
from cotenant.planners import Problem
from cotenant.planners.geometry import pricing
from cotenant.planners.geometry.budget import COUNTED, WorkBudget
from cotenant.planners.geometry.modes import Mode, ModeCatalog, partition_sizes
from cotenant.planners.geometry.pricing import DualPrices, SlotPricer, StepValue
from tests.planners.geometry.test_modes import feasible_modes, make_catalog, random_problem
from tests.planners.problems import linear

EVERY = [chosen for size in (1, 2, 3) for chosen in combinations(range(3), size)]


def random_prices(seed: int) -> DualPrices:
    rng = np.random.default_rng(seed)
    steps = [StepValue(int(rng.integers(3)), float(rng.uniform(0.5, 5)), float(rng.uniform(0, 1))) for _ in range(3)]
    return DualPrices(rng.uniform(20, 400, 3), rng.uniform(0, 2, 3), steps)


def price_modes(
    catalog: ModeCatalog, s: int, prices: DualPrices, threshold: float, budget: WorkBudget | None = None
) -> tuple[float, list[tuple[float, Mode]]]:
    return SlotPricer(catalog, s, prices.demand).price(prices, threshold, budget)


def value(prices: DualPrices, mode: Mode) -> float:
    total = 0.0
    for i, rate in zip(mode.models, mode.rates, strict=True):
        fraction = min(rate / prices.demand[i], 1.0)
        steps = [step for step in prices.steps if step.model == i]
        total += prices.full[i] * fraction + sum(step.value * math.ceil(step.multiplier * fraction) for step in steps)
    return total


@given(seed=st.integers(0, 1000), threshold=st.sampled_from((0.0, 0.3, 0.9, 0.999)))
@settings(deadline=None, max_examples=10)
def test_price_modes_of_any_prices_returns_tight_bound_and_best_modes(seed: int, threshold: float) -> None:
    problem, prices = random_problem(seed), random_prices(seed)
    catalog = make_catalog(problem)
    for s, slot in enumerate(catalog.slots):
        feasible = [mode for models in EVERY for mode in feasible_modes(problem, slot, models)]
        best = max((value(prices, mode) for mode in feasible), default=0.0)
        bound, priced = price_modes(catalog, s, prices, threshold * best)
        # Tight: states that only enter the bound exist beyond the beam width.
        assert bound == pytest.approx(max(best, threshold * best))
        if threshold < 1 and best > 0:
            assert max(each for each, _ in priced) == pytest.approx(best)
        real = {(mode.models, mode.batches, mode.procs): mode.rates for mode in feasible}
        for each, mode in priced:
            assert mode.rates == pytest.approx(real[mode.models, mode.batches, mode.procs])
            assert each == pytest.approx(value(prices, mode))
            assert each > threshold * best


@pytest.mark.parametrize("far", [pricing.FAR, math.inf], ids=["best first", "all at once"])
def test_price_modes_beyond_beam_width_returns_valid_bound(far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one state a level, chosen by coarse bounds, the best mode is mostly missed."""
    monkeypatch.setattr(pricing, "FAR", far)
    monkeypatch.setattr(pricing, "CELLS", 4)
    for name in ("MAX_BEAM_WIDTH", "MIN_BEAM_WIDTH", "FIRST_BEAM_WIDTH"):
        monkeypatch.setattr(pricing, name, 1)
    for seed in range(10):
        problem, prices = random_problem(seed), random_prices(seed)
        catalog = make_catalog(problem)
        for s, slot in enumerate(catalog.slots):
            feasible = [mode for models in EVERY for mode in feasible_modes(problem, slot, models)]
            best = max((value(prices, mode) for mode in feasible), default=0.0)
            assert price_modes(catalog, s, prices, 0.0)[0] >= best * (1 - 1e-9)


def test_price_modes_with_little_time_returns_valid_bound_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten models with batches to 48, all modes wanted: far more states than a few milliseconds allow."""
    monkeypatch.setattr(pricing, "FAR", math.inf)
    names, cuts = [f"m{n}" for n in range(10)], (1000,)
    profiles = {
        (name, "k"): linear(name, "k", 0.001 * (n + 1), 0.0007 * (n + 1), cuts=cuts, batches=(1, 48))
        for n, name in enumerate(names)
    }
    problem = Problem(
        models=tuple(Model(name=name, slo=0.5) for name in names),
        rates=dict.fromkeys(names, 1.0),
        fleet=(Kind(name="k", cuts=cuts),),
        profiles=profiles,
        time_limit=0.02 / COUNTED,
    )
    catalog = ModeCatalog(problem, names, partition_sizes(problem), np.ones((1, 10)))
    rng = np.random.default_rng(1)
    prices = DualPrices(rng.uniform(40, 400, 10), rng.uniform(0.5, 1.5, 10), ())
    ample, little = WorkBudget(msgspec.structs.replace(problem, time_limit=100.0)), WorkBudget(problem)
    tight, modes = price_modes(catalog, 0, prices, 0.0, ample)
    loose, _ = price_modes(catalog, 0, prices, 0.0, little)
    best = max(value for value, _ in modes)
    assert best <= tight <= loose
    # Many models share its round: their latencies, rounded to cells, must not add up to more than they are.
    assert price_modes(catalog, 0, prices, best * (1 - 1e-6))[0] == pytest.approx(best, rel=1e-9)
    assert little.used < 2 * 0.02 < 0.75 * ample.used


def test_price_modes_with_tight_memory_bounds_but_omits_oversized_modes() -> None:
    tight, free = random_problem(3, memory=2 << 20), random_problem(3)
    prices = random_prices(3)
    for s in range(3):
        bound, priced = price_modes(make_catalog(tight), s, prices, 0.0)
        assert all(mode.memory <= 2 << 20 for _, mode in priced)
        assert bound <= price_modes(make_catalog(free), s, prices, 0.0)[0]


def test_price_modes_near_latency_target_counts_largest_feasible_batch() -> None:
    """Intervals of round lengths must not hide the rate of the one batch that just fits."""
    for largest in range(80, 110):
        took = 0.3 + 0.003 * largest
        models = (Model(name="a", slo=2 * took * (1 + 1e-6)),)
        profiles = {("a", "k"): linear("a", "k", 0.3, 0.003, cuts=(1000,), batches=(1, 128))}
        problem = Problem(models=models, rates={"a": 1.0}, fleet=(Kind(name="k", cuts=(1000,)),), profiles=profiles)
        prices = DualPrices(np.array([largest / took]), np.array([1.0]))
        assert price_modes(make_catalog(problem), 0, prices, 0.0)[0] == pytest.approx(1.0, abs=1e-9)


def test_price_modes_at_exact_target_ignores_summation_order() -> None:
    took = {"a": 0.001, "b": 0.008, "c": 0.002}
    assert sum(took.values()) + 0.008 > 0.019 >= sum(sorted(took.values())) + 0.008
    models = tuple(Model(name=name, slo=0.019) for name in took)
    profiles = {(name, "k"): linear(name, "k", 0.0, took[name], cuts=(1000,), batches=(1,)) for name in took}
    fleet = (Kind(name="k", cuts=(1000,)),)
    problem = Problem(models=models, rates=dict.fromkeys(took, 1.0), fleet=fleet, profiles=profiles)
    prices = DualPrices(np.ones(3), np.ones(3))
    assert price_modes(make_catalog(problem), 0, prices, 0.0)[0] == pytest.approx(3.0)


@given(seed=st.integers(0, 1000), threshold=st.sampled_from((0.0, 0.9, 0.999)))
@settings(deadline=None, max_examples=15)
def test_price_modes_with_more_batches_than_are_listed_bounds_those_left_out(seed: int, threshold: float) -> None:
    rng = np.random.default_rng(seed)
    names, largest = ("a", "b"), int(rng.integers(150, 300))
    fixed, each = 10 ** rng.uniform(-3, -1, 2), 10 ** rng.uniform(-5, -3, 2)
    took = [fixed[i] + each[i] * np.arange(1, largest + 1) for i in range(2)]
    slos = [float(took[i][-1] * rng.uniform(1.5, 4)) for i in range(2)]
    profiles = {
        (name, "k"): linear(name, "k", fixed[i], each[i], cuts=(1000,), batches=(1, largest))
        for i, name in enumerate(names)
    }
    problem = Problem(
        models=tuple(Model(name=name, slo=slo, max_batch=largest) for name, slo in zip(names, slos, strict=True)),
        rates=dict.fromkeys(names, 1.0),
        fleet=(Kind(name="k", cuts=(1000,)),),
        profiles=profiles,
    )
    catalog = make_catalog(problem)
    assert (catalog.options.rows_below > catalog.options.rows).any()
    steps = [StepValue(int(rng.integers(2)), float(rng.uniform(0.5, 5)), float(rng.uniform(0, 1))) for _ in range(2)]
    prices = DualPrices(rng.uniform(0.2, 2, 2) * largest / took[0][-1], rng.uniform(0, 2, 2), steps)
    best = 0.0
    for chosen in ((0,), (1,), (0, 1)):
        lengths = np.add.outer(took[0], took[1]) if len(chosen) == 2 else took[chosen[0]]
        served, feasible = np.zeros(lengths.shape), np.ones(lengths.shape, dtype=bool)
        for i in chosen:
            shape = [-1 if i == j else 1 for j in chosen]
            rates = np.arange(1, largest + 1).reshape(shape) / lengths
            served += prices.value(i, np.minimum(rates / prices.demand[i], 1.0))
            feasible &= lengths + took[i].reshape(shape) <= slos[i]
        best = max(best, float(np.where(feasible, served, 0.0).max()))
    assert price_modes(catalog, 0, prices, threshold * best)[0] >= best * (1 - 1e-9)
