from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core import mig
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem
from cotenant.planners.geometry.modes import MIN_RATE_RATIO, Mode, ModeCatalog, PartitionSize, partition_sizes
from tests.planners.problems import MIB, linear

SHARES = (250, 500, 1000)


def random_problem(seed: int, memory: int = 1 << 40) -> Problem:
    """Three models on one kind, profiled with one and with two workers; larger batches take more memory."""
    rng = np.random.default_rng(seed)
    models, profiles = [], {}
    for name in "abc":
        fixed, work = 0.002 + 0.01 * rng.random(), 0.0005 + 0.003 * rng.random()
        points = [
            Point(share=s, batch=b, latency=(fixed + work * b) * 1000 / s * more, memory=b * MIB, procs=procs)
            for procs, more in ((1, 1.0), (2, float(rng.uniform(1.2, 2.5))))
            for s in SHARES
            for b in (1, 2, 5)
        ]
        profiles[name, "k"] = Profile(name, "k", points)
        models.append(Model(name=name, slo=float(rng.uniform(0.01, 0.2)), max_batch=int(rng.choice((2, 5)))))
    return Problem(
        models=tuple(models),
        rates=dict.fromkeys("abc", 100.0),
        fleet=(Kind(name="k", cuts=SHARES, memory=memory),),
        profiles=profiles,
    )


def make_catalog(problem: Problem) -> ModeCatalog:
    slots, names = partition_sizes(problem), list(problem.rates)
    return ModeCatalog(problem, names, slots, np.ones((len(slots), len(names))))


def feasible_modes(problem: Problem, slot: PartitionSize, models: Sequence[int]) -> Iterator[Mode]:
    """Yield every choice of batches and workers of these models that meets their targets and fits the memory."""
    kind = problem.fleet[slot.kind].name
    own = [problem.models[i] for i in models]
    options = [
        [
            (n, b, problem.profiles[model.name, kind].latency(b, slot.share, n))
            for n in (1, 2)
            for b in range(1, (model.max_batch or 0) + 1)
        ]
        for model in own
    ]
    for chosen in product(*options):
        length = sum(latency for _, _, latency in chosen)
        memory = sum(n * problem.profiles[m.name, kind].memory(b) for m, (n, b, _) in zip(own, chosen, strict=True))
        if memory <= slot.memory and all(length + lat <= m.slo for m, (_, _, lat) in zip(own, chosen, strict=True)):
            rates = tuple(n * b / length for n, b, _ in chosen)
            yield Mode(0, tuple(models), rates, tuple(b for _, b, _ in chosen), tuple(n for n, _, _ in chosen), memory)


memory_limits = st.sampled_from((1 << 40, 6 * MIB))
seeds = st.integers(0, 1000)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, memory=memory_limits)
def test_single_model_modes_of_any_problem_have_the_highest_rate(seed: int, memory: int) -> None:
    problem = random_problem(seed, memory)
    catalog = make_catalog(problem)
    best = {(mode.slot, mode.models[0]): mode.rates[0] for mode in catalog.single_model_modes(low_memory=False)}
    lighter = catalog.single_model_modes(low_memory=True)
    for (s, slot), i in product(enumerate(catalog.slots), range(3)):
        feasible = list(feasible_modes(problem, slot, [i]))
        assert best.get((s, i), 0.0) == pytest.approx(max((mode.rates[0] for mode in feasible), default=0.0))
        own = [mode for mode in lighter if (mode.slot, mode.models) == (s, (i,))]
        for mode in feasible:
            assert any(other.rates[0] >= mode.rates[0] * (1 - 1e-9) and other.memory <= mode.memory for other in own)
        for mode, other in combinations(own, 2):
            assert mode.rates > other.rates and mode.memory > other.memory


@settings(deadline=None, max_examples=30)
@given(seed=seeds, memory=memory_limits)
def test_pair_modes_of_any_problem_are_pareto_optimal(seed: int, memory: int) -> None:
    problem = random_problem(seed, memory)
    catalog = make_catalog(problem)
    every = range(len(catalog.slots))
    frontier = catalog.pair_frontiers(every)
    for (s, slot), (a, b) in product(enumerate(catalog.slots), combinations(range(3), 2)):
        feasible = {
            (mode.batches, mode.procs): msgspec.structs.replace(mode, slot=s)
            for mode in feasible_modes(problem, slot, [a, b])
        }
        for mode in (mode for mode in frontier if (mode.slot, mode.models) == (s, (a, b))):
            real = feasible[mode.batches, mode.procs]
            assert mode.rates == pytest.approx(real.rates)
            assert mode.memory == real.memory
        if memory < 1 << 40:
            continue  # Pareto-optimal modes that do not fit are left out
        own = [mode.rates for mode in frontier if (mode.slot, mode.models) == (s, (a, b))]
        for x, y in (mode.rates for mode in feasible.values()):
            assert any(p >= x * (1 - 1e-9) and q >= y / MIN_RATE_RATIO * (1 - 1e-9) for p, q in own)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, rates=st.tuples(*[st.floats(1, 100)] * 3), count=st.integers(1, 3))
def test_proportional_mode_of_any_rates_reaches_the_largest_multiple(
    seed: int, rates: tuple[float, ...], count: int
) -> None:
    problem = random_problem(seed)
    catalog = make_catalog(problem)
    models = tuple(range(count))
    for (s, slot), procs in product(enumerate(catalog.slots), product((1, 2), repeat=count)):
        mode = catalog.proportional_mode(s, models, rates[:count], procs)
        feasible = [mode for mode in feasible_modes(problem, slot, models) if mode.procs == procs]
        far = max((min(r / want for r, want in zip(mode.rates, rates, strict=False)) for mode in feasible), default=0.0)
        if mode is None:
            assert not feasible
            continue
        assert any(mode.batches == mode.batches for mode in feasible)
        reached = min(r / want for r, want in zip(mode.rates, rates, strict=False))
        assert far * (1 - 3e-3) <= reached <= far * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, memory=memory_limits, worth=st.tuples(*[st.floats(0.01, 1)] * 3))
def test_knapsack_modes_of_any_prices_are_feasible(seed: int, memory: int, worth: tuple[float, ...]) -> None:
    problem = random_problem(seed, memory)
    catalog = make_catalog(problem)
    for mode in catalog.knapsack_modes(range(len(catalog.slots)), np.array(worth), np.full(3, 100.0)):
        real = {(m.batches, m.procs): m for m in feasible_modes(problem, catalog.slots[mode.slot], mode.models)}
        assert len(mode.models) > 1
        assert mode.rates == pytest.approx(real[mode.batches, mode.procs].rates)
        assert mode.memory == real[mode.batches, mode.procs].memory


def test_knapsack_modes_of_small_models_share_one_partition() -> None:
    names = "abcd"
    problem = Problem(
        models=tuple(Model(name=name, slo=0.1) for name in names),
        rates=dict.fromkeys(names, 10.0),
        fleet=(Kind(name="k"),),
        profiles={(name, "k"): linear(name, "k", 0.001, 0.001, cuts=(1000,)) for name in names},
    )
    catalog = make_catalog(problem)
    modes = catalog.knapsack_modes(range(len(catalog.slots)), np.ones(4), np.full(4, 10.0))
    assert any(mode.models == (0, 1, 2, 3) and min(mode.rates) >= 10 for mode in modes)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0.5, 500.0))
def test_modes_of_any_demand_are_convex_combinations_of_those_limited_to_it(seed: int, demand: float) -> None:
    problem = random_problem(seed)
    catalog = make_catalog(problem)
    singles = catalog.single_model_modes(low_memory=False)
    rates = demand * np.array([1.0, 0.3, 3.0])
    limited = catalog.with_demand(singles, rates)
    most = {(mode.slot, mode.models[0]): mode.rates[0] for mode in limited}
    assert all(own.rates[0] <= mode.rates[0] for own, mode in zip(limited, singles, strict=True))
    for s, slot in enumerate(catalog.slots):
        for models in ((0,), (0, 1), (0, 1, 2)):
            for mode in feasible_modes(problem, slot, models):
                useful = zip(mode.models, mode.rates, strict=True)
                assert sum(min(rate, rates[i]) / most[s, i] for i, rate in useful) <= 1 + 1e-9


def test_mode_of_a_model_of_low_demand_fills_no_large_batch() -> None:
    """A batch of b takes 4 + b ms on the whole device, and the target is 100 ms.

    At 20 requests/s 1.88 rows are gathered in the 94 ms that are left beside a batch of two.
    """
    problem = Problem(
        models=(Model(name="a", slo=0.1),),
        rates={"a": 20.0},
        fleet=(Kind(name="k", cuts=(1000,)),),
        profiles={("a", "k"): linear("a", "k", 0.004, 0.001, cuts=(1000,), batches=(1, 46))},
    )
    catalog = make_catalog(problem)
    (single,) = catalog.single_model_modes(low_memory=False)
    assert single.rates[0] == pytest.approx(46 / 0.050)
    assert catalog.with_demand([single], np.array([1e9]))[0].rates == pytest.approx(single.rates)
    # min(2, 20 * (100 - 6) ms) / 6 ms
    assert catalog.with_demand([single], np.array([20.0]))[0].rates[0] == pytest.approx(1.88 / 0.006)
    assert catalog.with_demand([single], np.array([1.0]))[0].rates[0] == pytest.approx(0.095 / 0.005)


def test_mode_catalog_with_slowdowns_multiplies_latencies() -> None:
    problem = random_problem(1)
    plain = make_catalog(problem)
    slowed = ModeCatalog(problem, plain.names, plain.slots, np.full((3, 3), 1.5))
    assert slowed.options.latency == pytest.approx(plain.options.latency * 1.5)


def test_partition_sizes_of_plain_and_mig_kinds_are_shares_or_instances() -> None:
    cuts = mig.instance_shares("mig-a100-80gb")
    whole = Kind(name="whole", memory=5)
    sliced = Kind(name="sliced", cuts=cuts, geometry="mig-a100-80gb", memory=16 << 30)
    problem = Problem(models=(), rates={}, fleet=(whole, sliced), profiles={})
    first, *others = partition_sizes(problem)
    assert first == PartitionSize(0, 1000, 5)
    # No instance has more memory than the device; two profiles have one seventh.
    assert [slot.share for slot in others] == [142, 142, 285, 428, 571, 1000]
    assert others[0].memory < 10 << 30 < others[1].memory == 16 << 30
