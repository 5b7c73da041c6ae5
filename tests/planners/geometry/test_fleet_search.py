"""Hold the search of fixed fleets, its modes and its choice of fleets against brute force and against its promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.planner_problems import Recipe, problem
from cotenant.core.plan import Plan
from cotenant.planners import Problem, geometry
from cotenant.planners.geometry import fleet_search
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.competitors import Competitors
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.geometry.covering import Fleet
from cotenant.planners.geometry.diving import Diver
from cotenant.planners.geometry.fleet_search import FleetSearch, PlacedDevice
from cotenant.planners.geometry.large_fleet import cheapest_fleet
from cotenant.planners.geometry.modes import Mode

MIXED = Recipe(seed=21, models=8, devices=30, kinds=2, load=0.5)


def search_of(asked: Problem, seconds: float = 1.0) -> FleetSearch:
    """Return the search for the rates of a problem, at the prices of its relaxation."""
    context = PlanningContext(asked)
    penalties = 100.0 * max(context.prices) / context.rates
    fleet = Fleet(context.slots, context.patterns, context.counts, context.prices, context.memory_limits, penalties)
    budget = WorkBudget(msgspec.structs.replace(asked, time_limit=seconds))
    diver = Diver(fleet, context.catalog, context.singles, context.usable_slots, budget)
    relaxed = diver.relaxation(context.rates)
    assert relaxed is not None
    slot_prices = relaxed.solution.slot_duals
    return FleetSearch(diver, context.singles, context.rates, relaxed.prices(), slot_prices, budget)


def one_mode_each(search: FleetSearch) -> list[PlacedDevice]:
    """Return a device for each partition that a model needs alone on its largest one: correct, and wasteful."""
    devices = []
    for i, rate in enumerate(search.demand.tolist()):
        mode = max((mode for mode in search.diver.singles if mode.models == (i,)), key=lambda mode: mode.rates[0])
        kind = search.fleet.slots[mode.slot].kind
        devices += [PlacedDevice(kind, None, (mode,))] * int(np.ceil(rate / mode.rates[0]))
    return devices


def test_best_pairs_are_worth_what_the_best_of_all_choices_are() -> None:
    """Every two options of every two models, one after the other: none is worth more, and none is missed."""
    context = PlanningContext(problem(msgspec.structs.replace(MIXED, models=5)))
    catalog, options = context.catalog, context.catalog.options
    value, demand = 1.0 / context.rates, context.rates * np.linspace(0.02, 0.4, len(context.rates))
    models = list(range(len(context.rates)))
    compared = 0
    for s in context.usable_slots:
        best: dict[tuple[int, ...], float] = {}
        for a, b in combinations(models, 2):
            for x in range(options.latency.shape[2]):
                for y in range(options.latency.shape[2]):
                    length = options.latency[s, a, x] + options.latency[s, b, y]
                    late = length + options.latency[s, [a, b], [x, y]] > catalog.slo[[a, b]] * (1 + 1e-9)
                    if not np.isfinite(length) or late.any():
                        continue
                    rates = np.array([options.rows[s, a, x], options.rows[s, b, y]]) / length
                    worth = float(value[[a, b]] @ np.minimum(rates, demand[[a, b]]))
                    best[a, b] = max(best.get((a, b), 0.0), worth)
        found = catalog.best_pairs(s, models, value, demand, 0.0, 10_000)
        worth_of = [
            sum(value[i] * min(rate, demand[i]) for i, rate in zip(mode.models, mode.rates, strict=True))
            for mode in found
        ]
        assert worth_of == sorted(worth_of, reverse=True)
        reached: dict[tuple[int, ...], float] = {}
        for mode, worth in zip(found, worth_of, strict=True):
            reached[mode.models] = max(reached.get(mode.models, 0.0), worth)
        assert reached == pytest.approx(best)
        compared += len(best)
        threshold = float(np.median(worth_of)) if worth_of else 0.0
        above = catalog.best_pairs(s, models, value, demand, threshold, 3)
        assert [mode.models for mode in above] == [
            mode.models for mode, worth in zip(found, worth_of, strict=True) if worth > threshold
        ][:3]
    assert compared > 10


def test_fixed_fleet_serves_more_after_the_search_and_keeps_its_devices() -> None:
    search = search_of(problem(MIXED))
    start = search.resized(one_mode_each(search), [4, 4])
    before = search.shortfall(search.served(start))
    assert before > 0
    found = search.improve(start, search.budget)
    assert Counter(device.kind for device in found) == {0: 4, 1: 4}
    assert search.shortfall(search.served(found)) < 0.8 * before


def test_search_spares_devices_of_a_wasteful_plan_and_still_serves_everything() -> None:
    search = search_of(problem(MIXED))
    start = one_mode_each(search)
    assert search.rank(start)[0] == 0
    context = PlanningContext(problem(MIXED))

    def fleet_for(multiple: float) -> Sequence[int] | None:
        return cheapest_fleet(context, search.fleet, context.singles, context.rates * multiple)

    assert context.relaxation is not None
    found = search.cheaper(start, fleet_for, least=context.relaxation.value)
    assert (search.served(found) >= search.demand * (1 - 1e-6)).all()
    assert search.rank(found)[1] < 0.9 * search.rank(start)[1]


def test_search_serves_what_the_devices_that_it_begins_with_leave_unserved() -> None:
    search = search_of(problem(MIXED))
    start = one_mode_each(search)[1:]
    assert search.rank(start)[0] > 0
    found = search.cheaper(start, lambda _: None, least=1.0)
    assert search.rank(found)[0] == 0


def test_plan_that_serves_everything_outranks_a_cheaper_one_that_leaves_little_unserved() -> None:
    """A last hundredth of a percent may cost less, at any penalty, than the device that serves it."""
    search = search_of(problem(MIXED))
    whole = one_mode_each(search)
    surplus = search.served(whole) - search.demand
    (mode,) = whole[-1].modes
    (i,) = mode.models
    rest = msgspec.structs.replace(mode, rates=(mode.rates[0] - surplus[i] - 1e-4 * search.demand[i],))
    nearly = [PlacedDevice(whole[0].kind, None, (*whole[0].modes, rest)), *whole[1:-1]]
    assert search.rank(whole) < search.rank(nearly)


def test_search_is_the_same_in_every_run() -> None:
    found = []
    for _ in range(2):
        search = search_of(problem(MIXED), seconds=0.3)
        found.append(search.improve(search.resized(one_mode_each(search), [4, 4]), search.budget))
    assert found[0] == found[1]


@pytest.mark.parametrize(("devices", "asked"), [(8, True), (2000, False)])
def test_heuristics_whose_time_grows_with_the_fleet_are_left_out_on_large_ones(devices: int, asked: bool) -> None:
    made = problem(Recipe(seed=22, models=4, devices=devices, kinds=2, load=0.7))
    calls = []

    def heuristic(given: Problem) -> Plan:
        calls.append(given)
        return Plan(planner="elastic-plus", objective="devices", devices=())

    geometry.feasible(msgspec.structs.replace(made, time_limit=2.5), Competitors(quick={"elastic-plus": heuristic}))
    assert bool(calls) == asked


@pytest.mark.parametrize("many", [False, True])
def test_tries_go_on_from_what_left_least_and_again_from_where_that_began(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries leave two models, one, three and four unserved: the second, from a start made anew, is the best. Large
    fleets are not made anew: the second goes on from the first."""
    search = search_of(problem(MIXED))
    made = one_mode_each(search)
    without = [[device for device in made if device.modes[0].models[0] >= n] for n in (2, 1, 3, 4)]
    starts: list[list[PlacedDevice]] = []
    found = iter(without)

    def annealed(devices: Sequence[PlacedDevice], budget: WorkBudget) -> list[PlacedDevice]:
        starts.append(list(devices))
        return next(found)

    monkeypatch.setattr(fleet_search, "HOPELESS", 1.0)
    monkeypatch.setattr(fleet_search, "MAX_FILLED_DEVICES", len(made) - many)
    monkeypatch.setattr(search, "_annealed", annealed)
    counts = [sum(device.kind == k for device in made) for k in range(len(search.fleet.counts))]
    assert search._started(made, counts) == without[1]
    assert starts[0] == search.resized(made, counts)
    assert starts[1] != starts[0]
    assert (starts[1] == without[0]) == many
    assert starts[2] == without[1]
    assert starts[3] == starts[1]


def test_multiples_are_raised_from_the_largest_that_is_reached_until_steps_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Annealing that serves every multiple up to 1.2 and, of larger ones, all of one model and little of the others."""
    search = search_of(problem(MIXED))
    rates, most = search.demand.copy(), 1.2
    models = tuple(range(len(rates)))
    tried: list[float] = []
    reached = [1.0]

    def serving(multiples: Sequence[float]) -> list[PlacedDevice]:
        served = tuple((rates * multiples).tolist())
        return [PlacedDevice(0, None, (Mode(0, models, served, (1,) * len(models), (1,) * len(models), 0),))]

    def annealed(devices: Sequence[PlacedDevice], budget: WorkBudget) -> list[PlacedDevice]:
        multiple = float((search.demand / rates).min())
        assert search.demand == pytest.approx(multiple * rates)
        assert multiple > reached[-1]
        assert vars(search)["_annealer"].demand == pytest.approx(search.demand)
        tried.append(multiple)
        if multiple > most:
            return serving([multiple, *[0.5] * (len(rates) - 1)])
        reached.append(multiple)
        return serving([multiple] * len(rates))

    class Annealer:
        def __init__(self, demand: NDArray[np.float64]) -> None:
            self.demand = demand

        def for_demand(self, demand: NDArray[np.float64]) -> Annealer:
            return Annealer(demand)

    search.demand = rates * (1 + fleet_search.FIRST_RAISE)
    monkeypatch.setitem(vars(search), "_annealer", Annealer(search.demand))
    monkeypatch.setattr(search, "_annealed", annealed)
    found = search.raised(serving([1.0] * len(rates)), rates, 1.0)
    assert tried[:3] == pytest.approx([1.05, 1.05 * 1.075, 1.05 * 1.075 * 1.1125])
    assert float((search.served(found) / rates).min()) == pytest.approx(reached[-1])
    assert most / (1 + 2 * fleet_search.LEAST_RAISE) < reached[-1] <= most
    assert len(tried) < 30


def test_dive_for_one_fleet_uses_what_it_has_of_each_kind_and_leaves_little_unserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = search_of(problem(MIXED), 10.0)
    plan = search.diver.cover(search.demand).cover
    counts = [0] * len(search.fleet.counts)
    for pattern, many in plan.patterns:
        counts[pattern.kind] += many
    dearest = max((k for k, count in enumerate(counts) if count), key=lambda k: search.fleet.prices[k])
    counts[dearest] -= 1
    found = search._dived(counts, search.budget)
    assert [sum(device.kind == k for device in found) for k in range(len(counts))] == counts
    assert search._shortfall_of(found) < search._shortfall_of(search.resized(search._packed(plan), counts))
    monkeypatch.setattr(search, "resized", lambda devices, _: devices)
    made = Counter(device.kind for device in search._dived(counts, search.budget))
    assert made and all(made[k] <= count for k, count in enumerate(counts))
