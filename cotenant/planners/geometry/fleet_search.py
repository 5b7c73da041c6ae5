"""Serve the demand with fewer or cheaper devices: fix a fleet, and search it for a plan that leaves nothing unserved.

The cost of a plan changes only where a whole device is spared, so a search that compares costs stands still between.
As in bin packing, the fleet is therefore fixed below the cost of the best plan, and what it leaves unserved, at the
prices of the relaxation, is reduced until nothing is. Fleets are chosen by bisection over the multiple of the
demand that their relaxation serves, between the largest that failed and the least that sufficed. What work is left then
goes into the one that leaves least unserved.

A fixed fleet is filled by a dive (diving.py) where there is work for one, and improved by simulated annealing
(annealing.py); where the largest multiple of the rates is wanted, by large neighbourhood search: a few devices are
taken away and cover what the others leave unserved anew, by an integer program (Shaw, CP 1998). At the prices of the
relaxation no device serves more than its value, so a mode that wastes more than all of these devices waste cannot
improve them, and the programs stay small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.annealing import FleetAnnealer, pieces_by_kind, with_free_pieces
from cotenant.planners.geometry.annealing_modes import annealing_modes
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.covering import ColumnPool, CoverProgram
from cotenant.planners.geometry.device_assembly import pack_devices
from cotenant.planners.geometry.diving import Cover, Diver
from cotenant.planners.geometry.modes import Mode
from cotenant.planners.geometry.round_filling import RoundFiller
from cotenant.planners.geometry.ruin_recreate import DeviceState

Array = NDArray[np.float64]

FIRST_DEVICES, MAX_DEVICES = 3, 6  # taken away at a time: to begin with, and after many steps without improvement
PATIENCE = 40  # steps without improvement at one such number; after as many at the last, the fleet is given up
MIN_PAIR_VALUE = 0.75  # value over price of a slot's whole partition for a model, from which on it shares one
MAX_PAIRED_MODELS = 24  # of which every two are paired on a slot: those of most value unserved
MAX_COLUMNS = 150  # in one integer program
MAX_NODES = 50
MAX_CHECKS = 25.0  # interrupt checks of the solver
NO_WASTE = 1e-9  # part of a fleet's value unserved that counts as none
FLEET_SHARE = 0.3  # of the time left that one fleet may take
NEXT_SLACK = (
    0.7  # where between the most slack that failed and the least that sufficed: success is quicker than failure
)
UNSERVED_SHARE = 0.5  # of the time left then, where all devices leave something unserved
DIVE_SHARE = 0.75  # of a fleet's work, which a dive for it may take
UNSERVED_FACTOR = 3.0  # what a request/s unserved costs there, over its price
FILLED_SHARE = 0.3  # of a fleet's time, which making a start anew may take
FIRST_RAISE, LEAST_RAISE = 0.05, 1e-3  # from a multiple of the rates that is served to the next that is tried, relative
RAISE_FACTOR = 1.5  # on such a step after one that was reached; half of it is tried after others
RAISE_SHARE = 0.2  # of the time left that one of them may take
TRIES = 4  # at a fleet: how long one takes varies more than tenfold
MAX_FILLED_DEVICES = 30  # above which filling takes longer than a try, and what it leaves is rarely mended in another
HOPELESS = 6e-3  # part of the demand's value that the first two leave unserved, above which a fleet is given up
MAX_FIRST_PATTERNS = 12  # of a kind, with which a start is made
MIN_SLACK = 1e-3  # difference of two multiples of the demand, below which no fleet between them is tried
SHORT_PROBABILITY = 0.5  # of starting from a device with a model that comes short, rather than one that wastes
LIKE_PROBABILITY = 0.5  # of taking devices with models in common, and of taking those that waste most
ASTRAY_PROBABILITY = 0.2  # of a step at other prices, whose plan may leave a little more unserved
PRICE_NOISE = 0.3  # of those, standard deviation of the logarithm
MAX_ASTRAY = 3e-4  # part of the demand's value that such a step may add to what is unserved
REL_IMPROVEMENT = 1e-4  # of what is unserved, that a step has to bring
EVEN_WASTE = 0.05  # part of a device's value that is added to its waste, so that each is taken at times
SECONDS_PER_STEP = 4e-3  # of work, besides integer programs
SECONDS_PER_CELL = 2e-8  # and for each two options of two models


class PlacedDevice(msgspec.Struct, frozen=True):
    """Describe a device of the search. id: its number where it is one of the current plan's."""

    kind: int
    id: int | None
    modes: tuple[Mode, ...]


class FleetSearch:
    """Search for cheaper devices that serve the demand.

    diver: solves covering programs of the fleet. prices, slot_prices: of a request/s of each model and of a partition
    on each slot in the relaxation, by which the search goes. dive_work: seconds that a dive takes; inf: none is made.
    """

    def __init__(
        self,
        diver: Diver,
        singles: Sequence[Mode],
        demand: Array,
        prices: Array,
        slot_prices: Array,
        budget: WorkBudget,
        *,
        dive_work: float = math.inf,
        seed: int = 0,
    ) -> None:
        self.diver, self.fleet, self.catalog = diver, diver.fleet, diver.catalog
        self.demand, self.budget = demand, budget
        self.prices, self.slot_prices = prices, slot_prices
        self.values = np.zeros(len(self.fleet.counts))
        for pattern in self.fleet.patterns:
            own = sum(float(self.slot_prices[s]) * many for s, many in pattern.pieces)
            self.values[pattern.kind] = max(self.values[pattern.kind], own)
        self._dive_work = dive_work
        self._rng = np.random.default_rng(seed)
        self._singles: dict[int, list[Mode]] = {}
        self._sharing: dict[int, list[int]] = {}
        for mode in singles:
            (i,) = mode.models
            self._singles.setdefault(i, []).append(mode)
            if self.prices[i] * mode.rates[0] >= MIN_PAIR_VALUE * self.slot_prices[mode.slot]:
                own_models = self._sharing.setdefault(mode.slot, [])
                if i not in own_models:
                    own_models.append(i)

    # Fleets.

    def cheaper(
        self, devices: Sequence[PlacedDevice], fleet_for: Callable[[float], Sequence[int] | None], *, least: float
    ) -> list[PlacedDevice]:
        """Return devices that leave no more unserved and cost no more.

        fleet_for: returns the cheapest numbers of devices whose relaxation serves a multiple of the demand, or None.
        least: cost at which the search stops.
        """
        best = list(devices)
        if self._missing(self.served(best)).any():
            best = self._completed(best, math.inf)
        if self._missing(self.served(best)).any():
            found = self._started(best, [0 if count == math.inf else round(count) for count in self.fleet.counts])
            if self._missing(self.served(found)).any():
                found = self._annealed(found, self.budget.part(UNSERVED_SHARE))
            best = min([best, [device for device in found if device.modes]], key=self.rank)
        if not best or least <= 0 or self._missing(self.served(best)).any():
            return best
        failed, enough = 0.0, self._cost(best) / least - 1
        tried: set[tuple[int, ...]] = set()
        nearest: list[PlacedDevice] | None = None  # of the fleets that still leave something unserved
        while self.budget.left() and self._cost(best) > least * (1 + 1e-9):
            if enough - failed > MIN_SLACK:
                slack = failed + NEXT_SLACK * (enough - failed)
                counts = fleet_for(1 + slack)
                if counts is None or self._cost_of(counts) >= self._cost(best) * (1 - 1e-9):
                    enough = slack
                    continue
                if tuple(counts) in tried:
                    failed = slack
                    continue
                tried.add(tuple(counts))
                found = self._started(best, counts)
                best = min([best, self._completed(found, self._cost(best))], key=self.rank)
                if self._cost(best) <= self._cost_of(counts) * (1 + 1e-9):
                    enough = slack
                else:
                    failed = slack
                    nearest = min([found, *([] if nearest is None else [nearest])], key=self._shortfall_of)
            elif nearest is not None and self._cost(nearest) < self._cost(best) * (1 - 1e-9):
                found = self._annealed(nearest, self.budget)
                best = min([best, self._completed(found, self._cost(best))], key=self.rank)
                # Where that sufficed, cheaper ones have not been tried for long.
                nearest, failed, enough = None, 0.0, self._cost(best) / least - 1
            else:
                break
        return best

    def raised(self, devices: Sequence[PlacedDevice], rates: Array, scale: float) -> list[PlacedDevice]:
        """Return the devices cut and filled anew for larger multiples of the rates in turn, or those given where none
        is reached. scale: the multiple below the demand of the search, by `FIRST_RAISE`."""
        best = start = list(devices)
        most, step = float((self.served(best) / rates).min()), FIRST_RAISE
        while step >= LEAST_RAISE and self.budget.left():
            start = self._annealed(start, self.budget.part(RAISE_SHARE))
            served = self.served(start)
            if (reached := float((served / rates).min())) > most:
                best, most = start, reached
            # What nearly serves a multiple is a good start for a smaller one.
            step = step / 2 if self._missing(served).any() else step * RAISE_FACTOR
            scale = max(scale, most)
            self.demand = rates * scale * (1 + step)
            self._annealer = self._annealer.for_demand(self.demand)
        return best

    def rank(self, devices: Iterable[PlacedDevice]) -> tuple[float, float]:
        """Rank devices, smaller is better: what they leave unserved, at its penalties, then their price."""
        devices = list(devices)
        unserved = float(self.fleet.penalties @ self._missing(self.served(devices)))
        return round(unserved, 9), self._cost(devices)

    def served(self, devices: Iterable[PlacedDevice]) -> Array:
        """Return the requests/s of each model that devices serve."""
        served = np.zeros(len(self.demand))
        for device in devices:
            for mode in device.modes:
                for i, rate in zip(mode.models, mode.rates, strict=True):
                    served[i] += rate
        return served

    def _missing(self, served: Array) -> Array:
        missing = np.maximum(self.demand - served, 0.0)
        missing[missing <= ROUNDING_TOLERANCE * self.demand] = 0.0
        return missing

    def _counted(self, devices: Iterable[PlacedDevice]) -> list[int]:
        counts = Counter(device.kind for device in devices if device.modes)
        return [counts[k] for k in range(len(self.fleet.counts))]

    def _cost(self, devices: Iterable[PlacedDevice]) -> float:
        return self._cost_of(self._counted(devices))

    def _cost_of(self, counts: Sequence[float]) -> float:
        return sum(price * count for price, count in zip(self.fleet.prices, counts, strict=True))

    def _started(self, devices: Sequence[PlacedDevice], counts: Sequence[int]) -> list[PlacedDevice]:
        """Return this fleet after a part of the search, from these devices and, if they are few, others made anew."""
        budget = self.budget.part(FLEET_SHARE)
        tried: list[list[PlacedDevice]] = []
        starts = [self.resized(devices, counts)]  # which often suffice: they serve everything, with a little more
        if self._dive_work <= DIVE_SHARE * budget.left():
            starts.insert(0, self._dived(counts, budget.part(DIVE_SHARE)))
        for n in range(TRIES):
            if n == len(starts) == 1:
                few = sum(counts) <= MAX_FILLED_DEVICES
                starts.append(_placed(self._annealer.filled(counts, budget.part(FILLED_SHARE))) if few else tried[0])
            if n == 2:
                better = int(np.argmin([self._shortfall_of(found) for found in tried]))
                if self._shortfall_of(tried[better]) > HOPELESS * float(self.prices @ self.demand):
                    break
                # On from what left least, as large fleets need, and once more from where that began, as small ones do.
                starts += [tried[better], starts[better]]
            tried.append(self._annealed(starts[n], budget.part(1 / (TRIES - n))))
            if not self._missing(self.served(tried[-1])).any():
                return tried[-1]
        return min(tried, key=self._shortfall_of)

    def _dived(self, counts: Sequence[int], budget: WorkBudget) -> list[PlacedDevice]:
        """Return this fleet, filled by a dive for it alone."""
        fleet = msgspec.structs.replace(
            self.fleet, counts=[float(count) for count in counts], penalties=UNSERVED_FACTOR * self.prices
        )
        diver = Diver(fleet, self.catalog, self.diver.singles, self.diver.slots, budget, self.diver.pool)
        before = budget.used
        cover = diver.cover(self.demand).cover
        self._dive_work = budget.used - before
        return self.resized(self._packed(cover), counts)

    def _annealed(self, devices: Sequence[PlacedDevice], budget: WorkBudget) -> list[PlacedDevice]:
        start = [self._state_of(device) for device in devices]
        return _placed(self._annealer.improved(start, self._rng, budget))

    @cached_property
    def _annealer(self) -> FleetAnnealer:
        """Return the annealer of the columns near their price; devices are filled first with the patterns that earn
        most at the prices of slots."""
        modes, more = annealing_modes(self.diver, self.demand, self.prices, self.slot_prices, self.budget)
        first = [
            sorted(patterns, key=lambda pieces: -float(self.slot_prices[list(pieces)].sum()))[:MAX_FIRST_PATTERNS]
            for patterns in pieces_by_kind(self.fleet)
        ]
        filler = RoundFiller(self.catalog)
        return FleetAnnealer(self.fleet, modes, more, self.demand, self.prices, first, filler)

    def _state_of(self, device: PlacedDevice) -> DeviceState:
        pieces = with_free_pieces(device.modes, pieces_by_kind(self.fleet)[device.kind])
        return DeviceState(device.kind, device.id, [s for s, _ in pieces], [mode for _, mode in pieces])

    def _completed(self, devices: Sequence[PlacedDevice], below: float) -> list[PlacedDevice]:
        """Return the devices with further ones for what they leave unserved, unless these cannot cost less than so
        much."""
        found = [device for device in devices if device.modes]
        missing = self._missing(self.served(found))
        if not missing.any() or self._cost(found) + min(self.fleet.prices) >= below:
            return found
        used = self._counted(found)
        rest = msgspec.structs.replace(
            self.fleet, counts=[most - own for most, own in zip(self.fleet.counts, used, strict=True)]
        )
        cover = Diver(rest, self.catalog, self.diver.singles, self.diver.slots, self.budget).cover(missing).cover
        return found + self._packed(cover)

    def _packed(self, cover: Cover) -> list[PlacedDevice]:
        packed = pack_devices(cover.modes, cover.patterns, self.fleet.memory_limits)
        return [PlacedDevice(kind, None, modes) for kind, modes in packed]

    def resized(self, devices: Sequence[PlacedDevice], counts: Sequence[int]) -> list[PlacedDevice]:
        """Return so many devices of each kind: the most valuable ones, and empty ones."""
        resized = []
        for k, count in enumerate(counts):
            own = sorted((device for device in devices if device.kind == k), key=lambda each: -self._worth(each))
            resized += own[:count] + [PlacedDevice(k, None, ())] * (count - len(own))
        return resized

    def _worth(self, device: PlacedDevice) -> float:
        return float(self.prices @ self.served([device]))

    # One fleet.

    def _shortfall_of(self, devices: Sequence[PlacedDevice]) -> float:
        return self.shortfall(self.served(devices))

    def shortfall(self, served: Array) -> float:
        """Return what is unserved, at the prices of the relaxation."""
        return float(self.prices @ self._missing(served))

    def improve(self, devices: Sequence[PlacedDevice], budget: WorkBudget) -> list[PlacedDevice]:
        """Return the same number of devices of each kind that leave no more unserved."""
        best = current = list(devices)
        served = self.served(current)
        least = shortfall = self.shortfall(served)
        value = float(self.prices @ self.demand)
        count, unchanged = FIRST_DEVICES, 0
        while least > NO_WASTE * value and budget.left() and len(current) > 1:
            taken = self._chosen(current, served, min(count, len(current)))
            found = self._recovered(current, taken, served, shortfall, budget)
            unchanged += 1
            if found is not None:
                new_served = self.served(found)
                after = self.shortfall(new_served)
                if after <= max(shortfall, least + MAX_ASTRAY * value * self._rng.random()):
                    current, served, shortfall = found, new_served, after
                if after < least * (1 - REL_IMPROVEMENT):
                    best, least, unchanged = found, after, 0
            if unchanged >= PATIENCE:
                if count >= min(MAX_DEVICES, len(best)):
                    break
                count, unchanged = count + 1, 0
        return best

    def _chosen(self, devices: Sequence[PlacedDevice], served: Array, count: int) -> list[int]:
        """Return indices of some devices: one that wastes much, and others at random, like it or wasting as well."""
        surplus = self.prices * np.maximum(served - self.demand, 0.0)
        models = [{i for mode in device.modes for i in mode.models} for device in devices]
        waste = np.array(
            [
                max(0.0, self.values[device.kind] - self._worth(device))
                + float(surplus[list(own)].sum()) / 3
                + EVEN_WASTE * self.values[device.kind]
                for device, own in zip(devices, models, strict=True)
            ]
        )
        if not waste.any():
            waste[:] = 1.0
        weights = waste
        if self._rng.random() < SHORT_PROBABILITY:
            short = self.prices * self._missing(served)
            hosts = np.array([float(short[list(own)].sum()) for own in models])
            weights = hosts if hosts.any() else waste
        first = int(self._rng.choice(len(devices), p=weights / weights.sum()))
        likeness = self._rng.random(len(devices))
        if self._rng.random() < LIKE_PROBABILITY:
            likeness += [len(own & models[first]) / max(1, len(own | models[first])) for own in models]
        if self._rng.random() < LIKE_PROBABILITY:
            likeness += waste / waste.max()
        likeness[first] = math.inf
        return sorted(np.argsort(-likeness, kind="stable")[:count].tolist())

    def _recovered(
        self, devices: Sequence[PlacedDevice], taken: Sequence[int], served: Array, shortfall: float, budget: WorkBudget
    ) -> list[PlacedDevice] | None:
        """Return the devices with those taken covering anew what the others do not; None where that cannot help."""
        budget.spend(SECONDS_PER_STEP)
        old = [devices[n] for n in taken]
        kept = [device for n, device in enumerate(devices) if n not in set(taken)]
        left = self._missing(served - self.served(old))
        counts = Counter(device.kind for device in old)
        value = sum(n * float(self.values[k]) for k, n in counts.items())
        # These devices cover what is left but for the shortfall: of their value, the rest is what they waste.
        waste = shortfall + value - float(self.prices @ left)
        if waste <= NO_WASTE * float(self.prices @ self.demand):
            return None
        modes = self._useful_modes(left, old, waste, budget)
        if not modes:
            return None
        found = self._solved(modes, left, counts, shortfall, budget)
        return None if found is None else kept + found

    def _useful_modes(
        self, left: Array, old: Sequence[PlacedDevice], most_waste: float, budget: WorkBudget
    ) -> list[Mode]:
        """Return modes of one, two and more models that waste no more of their slot's price than this."""
        kinds = {device.kind for device in old}
        wanted = np.flatnonzero(left)
        own = dict.fromkeys(mode for device in old for mode in device.modes)
        modes = dict.fromkeys(own)
        modes |= dict.fromkeys(
            mode
            for i in wanted.tolist()
            for mode in self._singles.get(i, ())
            if self.fleet.slots[mode.slot].kind in kinds
        )
        slots = [s for s in self.diver.slots if self.fleet.slots[s].kind in kinds]
        least = np.maximum(self.slot_prices - most_waste, 0.0)
        for s in slots:
            models = [i for i in self._sharing.get(s, ()) if left[i] > 0]
            models = sorted(models, key=lambda i: -self.prices[i] * left[i])[:MAX_PAIRED_MODELS]
            if len(models) > 1:
                budget.spend(SECONDS_PER_CELL * len(models) ** 2 * self.catalog.options.latency.shape[2] ** 2 / 2)
                modes |= dict.fromkeys(
                    self.catalog.best_pairs(s, models, self.prices, left, float(least[s]), MAX_COLUMNS // 4)
                )
        if any(len(mode.models) > 2 for mode in own) or self._rng.random() < 0.2:
            modes |= dict.fromkeys(self.catalog.knapsack_modes(slots, self.prices, left, least))
        every = list(modes)
        waste = np.array(
            [
                float(self.slot_prices[mode.slot])
                - sum(self.prices[i] * min(rate, left[i]) for i, rate in zip(mode.models, mode.rates, strict=True))
                for mode in every
            ]
        )
        waste[: len(own)] = -math.inf
        near = np.flatnonzero(waste <= most_waste)
        return [every[n] for n in near[np.argsort(waste[near], kind="stable")[:MAX_COLUMNS]].tolist()]

    def _solved(
        self,
        modes: Sequence[Mode],
        left: Array,
        counts: Counter[int],
        shortfall: float,
        budget: WorkBudget,
    ) -> list[PlacedDevice] | None:
        """Return devices that leave less of `left` unserved than the shortfall, of these modes.

        Now and then, the least at other prices, which is a way out of plans that no few devices improve.
        """
        models = np.flatnonzero(left)
        place = {int(i): n for n, i in enumerate(models)}
        narrow: dict[Mode, Mode] = {}
        for mode in modes:
            own = [(place[i], rate) for i, rate in zip(mode.models, mode.rates, strict=True) if i in place]
            if own:
                short = msgspec.structs.replace(
                    mode, models=tuple(i for i, _ in own), rates=tuple(rate for _, rate in own)
                )
                narrow.setdefault(short, mode)
        fleet = msgspec.structs.replace(
            self.fleet,
            patterns=[pattern for pattern in self.fleet.patterns if pattern.kind in counts],
            counts=[float(counts[k]) for k in range(len(self.fleet.counts))],
            prices=[0.0] * len(self.fleet.counts),
            penalties=self.prices[models],
        )
        astray = self._rng.random() < ASTRAY_PROBABILITY
        if astray:
            noise = np.exp(PRICE_NOISE * self._rng.standard_normal(len(models)))
            fleet = msgspec.structs.replace(fleet, penalties=fleet.penalties * noise)
        pool = ColumnPool(fleet.slots, fleet.memory_limits, narrow)
        program = CoverProgram(fleet, pool, np.arange(len(pool.modes)), left[models], integer=True)
        if not astray:
            program.limit_unserved(shortfall * (1 - REL_IMPROVEMENT))
        answer = program.solve(gap=1e-3, nodes=MAX_NODES, checks=MAX_CHECKS, deadline=budget.deadline)
        budget.spend(program.work)
        if answer is None:
            return None
        counted = zip(pool.modes, answer.modes.tolist(), strict=True)
        chosen = [(narrow[mode], int(many)) for mode, many in counted if many]
        patterns = [(each, int(n)) for each, n in zip(fleet.patterns, answer.patterns.tolist(), strict=True) if n]
        found = self._packed(Cover(chosen, patterns))
        used = Counter(device.kind for device in found)
        return found + [PlacedDevice(k, None, ()) for k, n in sorted(counts.items()) for _ in range(n - used[k])]


def _placed(devices: Sequence[DeviceState]) -> list[PlacedDevice]:
    return [
        PlacedDevice(device.kind, device.id, tuple(mode for mode in device.modes if mode is not None))
        for device in devices
    ]
