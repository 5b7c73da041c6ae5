"""Hold the modes of the round knapsack against enumeration, and annealing against its promises."""

from __future__ import annotations

import random
from itertools import product

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.planner_problems import Recipe, problem
from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry import annealing
from cotenant.planners.geometry import annealing_modes as annealing_modes_module
from cotenant.planners.geometry.annealing import FleetAnnealer, pieces_by_kind, with_free_pieces
from cotenant.planners.geometry.annealing_modes import NEAR_PRICE_OF_MORE, annealing_modes
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import Fleet
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.diving import Diver
from cotenant.planners.geometry.pricing import DualPrices
from cotenant.planners.geometry.round_filling import RoundFiller
from cotenant.planners.geometry.round_knapsack import RoundKnapsack
from cotenant.planners.geometry.ruin_recreate import DeviceState

ASKED = msgspec.structs.replace(problem(Recipe(seed=24, models=4, devices=6, kinds=2, load=0.6)), time_limit=0.3)


def test_modes_of_the_round_knapsack_are_feasible_and_worth_nearly_what_the_best_are() -> None:
    """Every set of options of four models on a slot, against the best of several calls."""
    context = PlanningContext(ASKED)
    catalog, options = context.catalog, context.catalog.options
    value, demand = 1.0 / context.rates, context.rates * np.array([0.02, 0.05, 0.1, 0.2])
    knapsack, latest = RoundKnapsack(catalog, context.usable_slots), catalog.slo * (1 + ROUNDING_TOLERANCE)
    prices, least = DualPrices(demand, value * demand), np.zeros(len(context.slots))
    found = [mode for _ in range(3) for mode in knapsack.valuable_modes(prices, least, context.budget)]

    def worth(rates: NDArray[np.float64]) -> float:
        return float(value @ np.minimum(rates, demand))

    few = [None, *range(0, options.latency.shape[2], 5)]
    for s in context.usable_slots:
        best = 0.0
        for chosen in product(few, repeat=len(demand)):
            own = [(i, n) for i, n in enumerate(chosen) if n is not None]
            length = sum(options.latency[s, i, n] for i, n in own)
            if own and all(length + options.latency[s, i, n] <= latest[i] for i, n in own):
                rates = np.zeros(len(demand))
                for i, n in own:
                    rates[i] = options.rows[s, i, n] / length
                best = max(best, worth(rates))
        reached = 0.0
        for mode in (mode for mode in found if mode.slot == s):
            assert mode.memory <= context.slots[s].memory
            length = mode.batches[0] * mode.procs[0] / mode.rates[0]
            for i, batch in zip(mode.models, mode.batches, strict=True):
                n = int(np.flatnonzero(options.batch[s, i] == batch)[0])
                assert length + options.latency[s, i, n] <= latest[i] * (1 + 1e-9)
            rates = np.zeros(len(demand))
            rates[list(mode.models)] = mode.rates
            reached = max(reached, worth(rates))
        assert reached > 0.97 * best
    dear = np.full(len(context.slots), 1.01 * max(worth(demand), 1e-9))
    assert knapsack.valuable_modes(prices, dear, context.budget) == []


def annealer_of(context: PlanningContext) -> FleetAnnealer:
    fleet = Fleet(
        context.slots, context.patterns, context.counts, context.prices, context.memory_limits, 100 / context.rates
    )
    first = pieces_by_kind(fleet)
    prices, filler = 1 / context.rates, RoundFiller(context.catalog)
    return FleetAnnealer(fleet, context.singles, [], context.rates, prices, first, filler)


def shortfall(context: PlanningContext, devices: list[DeviceState]) -> float:
    served = np.zeros(len(context.rates))
    for device in devices:
        for mode in device.modes:
            if mode is not None:
                served[list(mode.models)] += mode.rates
    return float(np.maximum(1 - served / context.rates, 0.0).sum())


def test_annealing_serves_more_with_the_same_devices_and_the_same_in_every_run() -> None:
    context = PlanningContext(ASKED)
    filled = annealer_of(context).filled([2, 1], WorkBudget(ASKED))
    improved = [annealer_of(context).improved(filled, np.random.default_rng(1), WorkBudget(ASKED)) for _ in range(2)]
    assert [device.kind for device in improved[0]] == [0, 0, 1]
    assert shortfall(context, improved[0]) < 0.9 * shortfall(context, filled)
    assert improved[0] == improved[1]


def test_partitions_that_are_emptied_together_have_models_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices serve a model that is short: steps that empty related partitions never touch the others."""
    monkeypatch.setattr(annealing, "RELATED_PROBABILITY", 1.0)
    for other in ("RECUT_PROBABILITY", "TUNE_PROBABILITY", "MADE_PROBABILITY"):
        monkeypatch.setattr(annealing, other, 0.0)
    monkeypatch.setattr(annealing, "MORE_EMPTIED", 1e-9)
    emptied: list[list[tuple[int, int]]] = []
    ruined = annealing._Annealed.ruined

    def watched(state: annealing._Annealed) -> list[tuple[int, int]]:
        emptied.append(ruined(state))
        return emptied[-1]

    monkeypatch.setattr(annealing._Annealed, "ruined", watched)
    context = PlanningContext(ASKED)
    s = max(context.usable_slots, key=lambda s: context.slots[s].share)
    kind = context.slots[s].kind
    singles = {mode.models[0]: mode for mode in context.singles if mode.slot == s}
    demand = np.full(len(context.rates), 1e-9)
    demand[0], demand[1] = 1.5 * singles[0].rates[0], 2.5 * singles[1].rates[0]
    pattern = CuttingPattern(kind, ((s, 1),))
    counts = [6.0 * (k == kind) for k in range(len(context.counts))]
    fleet = Fleet(context.slots, [pattern], counts, context.prices, context.memory_limits, np.ones(len(demand)))
    modes, filler = [singles[i] for i in range(4)], RoundFiller(context.catalog)
    annealer = FleetAnnealer(fleet, modes, [], demand, 1 / demand, pieces_by_kind(fleet), filler)
    start = [DeviceState(kind, None, [s], [singles[i]]) for i in (0, 0, 1, 1, 2, 3)]
    annealer.improved(start, np.random.default_rng(1), WorkBudget(msgspec.structs.replace(ASKED, time_limit=0.02)))
    assert len(emptied) > 20
    assert {d for step in emptied for d, _ in step} == {2, 3}


def test_annealing_keeps_devices_within_their_memory() -> None:
    asked = msgspec.structs.replace(problem(Recipe(seed=25, models=6, devices=4, kinds=1, geometry="none", memory=8)))
    asked = msgspec.structs.replace(asked, time_limit=0.2)
    context = PlanningContext(asked)
    assert context.memory_limits == [8 << 30]
    annealer = annealer_of(context)
    improved = annealer.improved(annealer.filled([3], WorkBudget(asked)), np.random.default_rng(1), WorkBudget(asked))
    used = [sum(mode.memory for mode in device.modes if mode is not None) for device in improved]
    assert max(used) > 4 << 30
    assert max(used) <= 8 << 30


def test_a_batch_is_made_smaller_where_that_makes_room_for_a_model_that_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One partition, and a mode for either model alone in the pool: only batches made anew serve both."""
    monkeypatch.setattr(annealing, "MADE_PROBABILITY", 0.0)
    context = PlanningContext(ASKED)
    s = max(context.usable_slots, key=lambda s: context.slots[s].share)
    kind = context.slots[s].kind
    singles = {mode.models[0]: mode for mode in context.singles if mode.slot == s}
    demand = np.zeros(len(context.rates))
    for i in (0, 1):
        demand[i] = 0.1 * singles[i].rates[0]
    demand[2:] = 1e-9
    pattern = CuttingPattern(kind, ((s, 1),))
    counts = [float(k == kind) for k in range(len(context.counts))]
    fleet = Fleet(context.slots, [pattern], counts, context.prices, context.memory_limits, np.ones(len(demand)))
    prices = np.array([1.0, 1.0, 0.0, 0.0]) / demand
    filler, modes = RoundFiller(context.catalog), [singles[0], singles[1]]
    annealer = FleetAnnealer(fleet, modes, [], demand, prices, pieces_by_kind(fleet), filler)
    alone = [DeviceState(kind, None, [s], [singles[0]])]
    (device,) = annealer.improved(alone, np.random.default_rng(1), WorkBudget(ASKED))
    (mode,) = device.modes
    assert mode is not None
    served = dict(zip(mode.models, mode.rates, strict=True))
    assert all(served[i] >= demand[i] * (1 - ROUNDING_TOLERANCE) for i in (0, 1))


def test_further_modes_are_many_and_nearly_worth_their_price() -> None:
    context = PlanningContext(ASKED)
    singles = context.planning_modes(context.catalog)
    fleet = Fleet(
        context.slots, context.patterns, context.counts, context.prices, context.memory_limits, 1e3 / context.rates
    )
    diver = Diver(fleet, context.catalog, singles, context.planning_slots, context.budget)
    relaxed = diver.relaxation(context.rates)
    assert relaxed is not None
    prices, slot_prices = relaxed.solution.demand_duals, relaxed.solution.slot_duals
    modes, more = annealing_modes(diver, context.rates, prices, slot_prices, context.budget)
    assert set(diver.pool.modes) >= set(modes)
    assert len(set(more) - set(modes)) > len(modes)
    for mode in more:
        own = zip(mode.models, mode.rates, strict=True)
        worth = sum(prices[i] * min(rate, context.rates[i]) for i, rate in own)
        assert worth >= NEAR_PRICE_OF_MORE * slot_prices[mode.slot] * (1 - 1e-9)


def test_devices_stay_empty_where_no_work_is_left() -> None:
    budget = WorkBudget(ASKED)
    budget.spend(budget.left())
    filled = annealer_of(PlanningContext(ASKED)).filled([2, 1], budget)
    assert [device.kind for device in filled] == [0, 0, 1]
    assert not any(device.modes for device in filled)


def test_pieces_that_no_mode_takes_stay_free() -> None:
    context = PlanningContext(ASKED)
    mode = context.singles[0]
    patterns = [(mode.slot + 1,), (mode.slot, mode.slot)]
    assert with_free_pieces([mode], patterns) == [(mode.slot, mode), (mode.slot, None)]
    assert with_free_pieces([mode, mode, mode], patterns) == [(mode.slot, mode)] * 3


def test_a_step_that_is_undone_leaves_nothing_and_one_that_is_kept_all_that_it_changed() -> None:
    """What is counted step by step, against the same devices counted anew."""
    context = PlanningContext(ASKED)
    annealer = annealer_of(context)

    def state_of(devices: list[DeviceState]) -> annealing._Annealed:
        return annealing._Annealed(
            annealer._choices,
            devices,
            annealer._patterns,
            context.memory_limits,
            RoundFiller(context.catalog),
            random.Random(1),  # noqa: S311
            context.rates,
        )

    def devices_of(state: annealing._Annealed) -> list[DeviceState]:
        pairs = zip(kinds, *state.copy(), strict=True)
        return [
            DeviceState(k, None, list(own), [None if c is None else c.mode for c in chosen]) for k, own, chosen in pairs
        ]

    filled = annealer.filled([2, 1], WorkBudget(ASKED))
    kinds = [device.kind for device in filled]
    state, kept, changed = state_of(filled), filled, 0
    for n in range(300):
        state.step()
        during = devices_of(state)
        assert state.shortfall == pytest.approx(state_of(during).shortfall, abs=1e-12)
        changed += during != kept
        if n % 2:
            state.undo()
        else:
            state.keep()
            kept = during
        anew = state_of(kept)
        assert devices_of(state) == kept
        assert state.shortfall == pytest.approx(anew.shortfall, abs=1e-12)
        assert state._left == pytest.approx(anew._left, abs=1e-12)
        assert [sorted(hosts) for hosts in state._hosts] == [sorted(hosts) for hosts in anew._hosts]
        if state.shortfall <= annealing.NO_SHORTFALL:
            break
    assert changed > 20


def test_pairs_take_a_part_of_the_work_left() -> None:
    context = PlanningContext(ASKED)
    singles = context.planning_modes(context.catalog)
    fleet = Fleet(
        context.slots, context.patterns, context.counts, context.prices, context.memory_limits, 1e3 / context.rates
    )
    diver = Diver(fleet, context.catalog, singles, context.planning_slots, context.budget)
    relaxed = diver.relaxation(context.rates)
    assert relaxed is not None
    prices, slot_prices = relaxed.solution.demand_duals, relaxed.solution.slot_duals
    found = []
    for seconds in (1.0, 0.01, 1e-6):
        budget = WorkBudget(msgspec.structs.replace(ASKED, time_limit=2 * seconds))
        found.append(annealing_modes_module._pairs(diver, context.rates, prices, slot_prices, budget))
        assert budget.used <= annealing_modes_module.PAIRS_SHARE * seconds
    assert {i for mode in found[0] for i in mode.models} == set(range(4))
    assert len(found[0]) > len(found[1]) > 0
    assert found[2] == []


@pytest.mark.parametrize(("least", "kept_at_first"), [(1.0, True), (1e-5, False)])
def test_rises_are_kept_at_first_but_not_in_the_end_nor_where_the_demand_is_nearly_served(
    least: float, kept_at_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that raise the least shortfall by the temperature at first, and steps back where that was kept."""
    budget = WorkBudget(ASKED)
    steps, seconds = 2000, budget.left()
    taken, kept = 0, list[int]()

    class Hill:
        def __init__(self, *_: object) -> None:
            self.work, self.shortfall, self.before = 0.0, least, least

        def step(self) -> None:
            nonlocal taken
            taken += 1
            self.work += seconds / steps
            self.shortfall = least if self.before > least else least + annealing.TEMPERATURE

        def keep(self) -> None:
            if self.shortfall > least:
                kept.append(taken)
            self.before = self.shortfall

        def undo(self) -> None:
            self.shortfall = self.before

        def copy(self) -> tuple[list[list[int]], list[list[object]]]:
            return [], []

    monkeypatch.setattr(annealing, "_Annealed", Hill)
    annealer_of(PlanningContext(ASKED)).improved([], np.random.default_rng(1), budget)
    assert budget.left() == 0
    assert (sum(n < 0.1 * steps for n in kept) > 20) == kept_at_first
    assert not any(n > 0.9 * steps for n in kept)
    assert bool(kept) == kept_at_first


def test_made_mode_that_serves_more_than_is_short_counts_for_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first model ten times its demand, which is a quarter of the value, or half of the second's."""
    for probability in ("MADE_PROBABILITY", "FILL_PROBABILITY"):
        monkeypatch.setattr(annealing, probability, 1.0)
    context = PlanningContext(ASKED)
    s = max(context.usable_slots, key=lambda s: context.slots[s].share)
    singles = {mode.models[0]: mode for mode in context.singles if mode.slot == s}
    demand = np.full(len(context.rates), 1e-9)
    demand[0], demand[1] = 0.1 * singles[0].rates[0], 2.0 * singles[1].rates[0]
    choices = annealing._Choices([singles[0], singles[1]], np.array([0.25, 0.75, 0.0, 0.0]) / demand)
    devices = [DeviceState(context.slots[s].kind, None, [s], [None])]
    patterns: list[list[tuple[int, ...]]] = [[(s,)] for _ in context.counts]
    filler, rng = RoundFiller(context.catalog), random.Random(1)  # noqa: S311
    state = annealing._Annealed(choices, devices, patterns, context.memory_limits, filler, rng, demand)
    monkeypatch.setattr(state, "_made", lambda *_: choices.of(singles[0]))
    state.refill([(0, 0)])
    assert state.copy()[1] == [[choices.of(singles[1])]]
    assert state.shortfall == pytest.approx(0.25 + 0.75 / 2)
