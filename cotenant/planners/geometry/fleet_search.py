"""Improve a fleet by large neighbourhood search: take a few devices away and cover anew what they served.

What is left without them is a small covering program (covering.py), whose models are those of these devices: its modes
of one and of two models can be enumerated where they are near their price, and it is solved as an integer program.
Related devices are taken together, those that serve least for their price most often (Shaw, CP 1998).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.covering import ColumnPool, CoverProgram, CoverSolution
from cotenant.planners.geometry.device_assembly import pack_devices
from cotenant.planners.geometry.diving import NEAR_ZERO, Diver
from cotenant.planners.geometry.modes import Mode

Array = NDArray[np.float64]

FIRST_DEVICES = 3  # taken away at a time, to begin with
MAX_MODELS = 24  # that are covered anew at a time
MIN_PAIR_VALUE = 0.6  # value over price of a model alone from which on its pairs on a slot are enumerated
MAX_PAIRS = 1500  # modes of two models in one program
MAX_COLUMNS = 600  # in one integer program
MAX_WHOLE_MODELS = 30  # models up to which everything is first covered anew at once
STEP_SHARE = 0.25  # of the time left that one integer program may take
REL_IMPROVEMENT = 1e-6  # of the cost, which counts as better
SECONDS_PER_PAIR = 1e-4  # of work, for the modes of two models on a slot
SECONDS_PER_STEP = 2e-3


class PlacedDevice(msgspec.Struct, frozen=True):
    """Describe a device of the search. id: its number where it is one of the current plan's."""

    kind: int
    id: int | None
    modes: tuple[Mode, ...]


class FleetSearch:
    """Search for cheaper devices that serve the demand. diver: solves relaxations of its fleet."""

    def __init__(
        self, diver: Diver, singles: Sequence[Mode], demand: Array, budget: WorkBudget, *, seed: int = 0
    ) -> None:
        self.diver, self.fleet, self.catalog = diver, diver.fleet, diver.catalog
        self.demand, self.budget = demand, budget
        self._rng = np.random.default_rng(seed)
        self._singles: dict[int, list[Mode]] = {}
        for mode in singles:
            self._singles.setdefault(mode.models[0], []).append(mode)

    def improve(self, devices: Sequence[PlacedDevice], *, least: float, patience: int) -> list[PlacedDevice]:
        """Return devices that cost no more, unserved rates counted at their penalties.

        least: cost at which the search stops. patience: steps without improvement after which it does.
        """
        best = list(devices)
        count, unchanged = FIRST_DEVICES, 0
        if best and len(self.demand) <= MAX_WHOLE_MODELS and self.budget.left():
            whole, _ = self._recovered([], best)
            if whole is not None and self.cost(whole) < self.cost(best):
                best = whole
        while best and unchanged < patience and self.budget.left() and self.cost(best) > least * (1 + 1e-9):
            taken = self._related(best, count)
            kept = [device for n, device in enumerate(best) if n not in taken]
            old = [best[n] for n in sorted(taken)]
            found, is_optimal = self._recovered(kept, old)
            before, after = self.cost(best), self.cost([*kept, *found]) if found is not None else np.inf
            unchanged += 1
            if found is not None and after <= before * (1 + 1e-12):
                best = [*kept, *found]
                if after < before * (1 - REL_IMPROVEMENT):
                    unchanged = 0
            most = len(best)
            count = max(2, count - 1) if not is_optimal else count
            if is_optimal and unchanged and unchanged % 6 == 0:
                count = min(count + 1, most)
            if is_optimal and len(taken) == most and unchanged:
                break
        return best

    def cost(self, devices: Iterable[PlacedDevice]) -> float:
        """Return the price of devices, and of what they leave unserved."""
        served = self._served(devices := list(devices))
        unserved = np.maximum(self.demand - served, 0.0)
        unserved[unserved <= NEAR_ZERO * self.demand] = 0.0
        return sum(self.fleet.prices[device.kind] for device in devices) + float(self.fleet.penalties @ unserved)

    def _served(self, devices: Iterable[PlacedDevice]) -> Array:
        served = np.zeros(len(self.demand))
        for device in devices:
            for mode in device.modes:
                for i, rate in zip(mode.models, mode.rates, strict=True):
                    served[i] += rate
        return served

    def _related(self, devices: Sequence[PlacedDevice], count: int) -> set[int]:
        """Return indices of some devices: one that serves little for its price, and others at random or like it."""
        served = self._served(devices)
        needed = np.array([self._needed(device, served) for device in devices])
        weights = 1.0 / (0.05 + needed)
        first = int(self._rng.choice(len(devices), p=weights / weights.sum()))
        models = {i for mode in devices[first].modes for i in mode.models}
        taken = {first}
        likeness = self._rng.random(len(devices))
        if self._rng.random() < 0.7:
            for n, device in enumerate(devices):
                own = {i for mode in device.modes for i in mode.models}
                likeness[n] += len(own & models) / max(1, len(own | models))
        else:
            likeness += weights / weights.max()
        for n in np.argsort(-likeness, kind="stable").tolist():
            own = {i for mode in devices[n].modes for i in mode.models}
            if len(taken) >= count or len(models | own) > MAX_MODELS:
                break
            models |= own
            taken.add(n)
        return taken

    def _needed(self, device: PlacedDevice, served: Array) -> float:
        """Return what would be unserved without a device, at its penalty, over its price."""
        own = np.zeros(len(served))
        for mode in device.modes:
            own[list(mode.models)] += mode.rates
        missing = np.maximum(self.demand - served + own, 0.0) - np.maximum(self.demand - served, 0.0)
        return float(self.fleet.penalties @ missing) / max(self.fleet.prices[device.kind], 1e-9)

    def _recovered(
        self, kept: Sequence[PlacedDevice], old: Sequence[PlacedDevice]
    ) -> tuple[list[PlacedDevice] | None, bool]:
        """Return devices that cover what `kept` does not, or None, and whether no better ones exist of these modes."""
        self.budget.spend(SECONDS_PER_STEP)
        left = np.maximum(self.demand - self._served(kept), 0.0)
        left[left <= NEAR_ZERO * self.demand] = 0.0
        models = np.flatnonzero(left).tolist()
        if not models:
            return [], True
        used = [0] * len(self.fleet.counts)
        for device in kept:
            used[device.kind] += 1
        fleet = msgspec.structs.replace(
            self.fleet, counts=[count - many for count, many in zip(self.fleet.counts, used, strict=True)]
        )
        own = [mode for device in old for mode in device.modes]
        singles = [mode for mode in own if len(mode.models) == 1 and left[mode.models[0]] > 0]
        singles += [mode for i in models for mode in self._singles.get(i, ())]
        diver = Diver(fleet, self.catalog, singles, self.diver.slots, self.budget)
        pool = diver.pool
        pool.extend(((mode, 1),) for mode in own)
        relaxed = self._relaxed(diver, left, models)
        old_cost = sum(fleet.prices[device.kind] for device in old) + float(
            fleet.penalties @ np.maximum(left - self._served(old), 0.0)
        )
        if relaxed is None or relaxed[0].value >= old_cost * (1 - REL_IMPROVEMENT):
            return None, True
        solution, program = relaxed
        # What costs more than the difference to the relaxation, by its duals, cannot be part of anything cheaper.
        excess = program.prices_of(solution) - pool.values(solution.demand_duals, left)
        columns = np.flatnonzero(excess <= old_cost - solution.value)
        columns = columns[np.argsort(excess[columns], kind="stable")[:MAX_COLUMNS]]
        cover = diver.solve_integer(np.sort(columns), left, STEP_SHARE)
        if cover is None:
            return None, False
        packed = pack_devices(cover.modes, cover.patterns, fleet.memory_limits)
        return [PlacedDevice(kind, None, modes) for kind, modes in packed], True

    def _relaxed(self, diver: Diver, left: Array, models: Sequence[int]) -> tuple[CoverSolution, CoverProgram] | None:
        """Return the solved relaxation over modes of one and two models, and over larger ones that pricing finds."""
        pool = diver.pool
        program = CoverProgram(diver.fleet, pool, np.arange(len(pool.columns)), left)
        solution = diver.relax(program, 1)
        if solution is None:
            return None
        pairs = self._near_pairs(pool, program, solution, models)
        pool.extend(((mode, 1),) for mode in pairs)
        program.add_improving(solution, MAX_PAIRS)
        solution = diver.relax(program, 3)
        return None if solution is None else (solution, program)

    def _near_pairs(
        self, pool: ColumnPool, program: CoverProgram, solution: CoverSolution, models: Sequence[int]
    ) -> list[Mode]:
        """Return modes of two models on the slots where each alone is worth nearly its price."""
        value = pool.values(solution.demand_duals, program.demand)
        near = value >= MIN_PAIR_VALUE * program.prices_of(solution)
        by_slot: dict[int, set[int]] = {}
        for n in np.flatnonzero(near).tolist():
            ((mode, _),) = pool.columns[n]
            by_slot.setdefault(mode.slot, set()).update(i for i in mode.models if program.demand[i] > 0)
        pairs = []
        for s, own in sorted(by_slot.items()):
            for a, b in combinations(sorted(own), 2):
                self.budget.spend(SECONDS_PER_PAIR)
                pairs += self.catalog.pair_frontier(s, a, b)
        return pairs
