"""Cover demand with whole numbers of modes: price, round, and price again for what is left.

Column generation solves the linear relaxation of the covering program (covering.py). Whole partitions of its solution
are fixed, and the program is solved again for the demand that remains: modes are priced for remainders, since a mode
counts no more than the demand. Where no whole partition is left, the largest fractions are rounded up. This is diving
with residual problems (Wäscher and Gau, OR Spektrum 18, 1996; Sadykov et al., INFORMS Journal on Computing 31, 2019).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.bundles import Bundler
from cotenant.planners.geometry.covering import (
    MEMORY_LIMITS,
    ColumnPool,
    CoverProgram,
    CoverSolution,
    Fleet,
    IntArray,
    memory_parts,
)
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.pricing import DualPrices
from cotenant.planners.geometry.round_knapsack import RoundKnapsack

Array = NDArray[np.float64]

MAX_ROOT_ROUNDS = 16  # of pricing for the prices by which fleets are searched
THOROUGH_SHARE = 0.15  # of the work left, which dynamic programming may take for them
MAX_PRICING_ROUNDS = 8  # of the first program of a dive; fewer below
MAX_COLUMNS_PER_ROUND = 2000
REL_PROGRESS = 2e-4  # of the objective, below which pricing stops
NEAR_ZERO = 1e-6  # parts of columns, and of a bundle, that count as none
NEAR_ONE = 1e-4  # by which a part of a column may fall short of 1 and count as whole
MIN_BUNDLED = 1.8  # partitions in the relaxation from which on a model is covered by bundles
OVERFLOW = 2.0  # price of a device beyond the counts, over the dearest, while parts of devices are fixed
DROPPED = (1.5, 3.0, 100.0, 100.0)  # price of a partition that devices do not hold, over that of its slot, in each dive
MIN_PENALTY = 1e-3  # of a partition that is not held, where devices cost nothing
MAX_BUNDLED = 60.0  # partitions up to which it is: more may not be of one kind, which a bundle is
CUT_GAP = 1e-4  # relative, for whole devices
MAX_CUT_NODES = 500
MAX_CUT_CHECKS = 2000
SECONDS_PER_BUNDLE = 3e-5
MAX_BUNDLED_COLUMNS = 1500  # in the integer program over bundles
MAX_NEAREST_COLUMNS = 600  # in the integer program over those nearest to their price, besides those of covers
MAX_SINGLE_COLUMNS = 4000  # in the integer program over modes of one model, but for
MIN_MODES_PER_MODEL = 4
MIN_SECONDS_PER_COLUMN = 2e-4  # of work, with less of which an integer program finds nothing worth its time
INTEGER_GAP = 3e-4
MAX_INTEGER_NODES = 5000
ROUNDED_UP = 0.1  # part of the fractional partitions that is rounded up at a time
MIN_USEFUL = 0.97  # part of its value that a mode must still have to be rounded up
KEPT_VALUE = 0.6  # value over price from which on columns stay in the program
SECONDS_PER_PRICING = 1e-7  # of work, for each slot, model and option


class Cover(msgspec.Struct):
    """Hold whole numbers of modes and patterns that cover some demand."""

    modes: list[tuple[Mode, int]]
    patterns: list[tuple[CuttingPattern, int]]


class Relaxed(msgspec.Struct, frozen=True):
    """Hold a solved relaxation of the whole demand."""

    solution: CoverSolution
    program: CoverProgram

    def excess(self, demand: Array) -> Array:
        """Return by how much the price of each column exceeds what it is worth at the prices of this relaxation."""
        return self.program.prices_of(self.solution) - self.program.pool.values(self.solution.demand_duals, demand)


class Dive(msgspec.Struct, frozen=True):
    """Hold what a dive found. relaxed: over modes, which bounds every plan; bundled: over bundles of large demands."""

    cover: Cover
    relaxed: Relaxed | None
    bundled: Relaxed | None


class Diver:
    """Solve covering programs of one fleet over a shared pool of columns.

    singles: modes of one model, which each program starts with; slots: those that modes may use.
    """

    def __init__(
        self, fleet: Fleet, catalog: ModeCatalog, singles: Sequence[Mode], slots: Sequence[int], budget: WorkBudget
    ) -> None:
        self.fleet, self.catalog, self.slots, self.budget = fleet, catalog, slots, budget
        self.singles = list(dict.fromkeys(singles))
        self.pool = ColumnPool(fleet.slots, fleet.memory_limits, self.singles)
        self.geometries = [kind.geometry for kind in catalog.problem.fleet]
        self._share_prices = np.array([fleet.prices[slot.kind] * slot.share / WHOLE for slot in fleet.slots])
        self.knapsack = RoundKnapsack(catalog, slots)
        self._pricing_work = SECONDS_PER_PRICING * len(slots) * catalog.options.latency[0].size

    def relax(
        self,
        program: CoverProgram,
        rounds: int,
        bundled: Bundled | None = None,
        *,
        thorough: WorkBudget | None = None,
    ) -> CoverSolution | None:
        """Solve the relaxation, generating columns until none improves it, or little; None where it is infeasible, or
        the deadline passed before it was solved once.

        thorough: budget for dynamic programming, which finds better ones and takes longer; None: without it.
        """
        solution = program.solve(deadline=self.budget.deadline)
        for _ in range(rounds):
            if solution is None:
                return None
            self.budget.spend(program.work)
            if not self.budget.left():
                break
            if bundled is not None:
                self.budget.spend(bundled.work)
                program.pool.extend(bundled.bundler.cheapest(solution.slot_duals))
            allowed = None if bundled is None else bundled.allowed(program.pool)
            if not program.add_improving(solution, MAX_COLUMNS_PER_ROUND, allowed):
                self.budget.spend(self._pricing_work)
                priced = self.catalog.knapsack_modes(
                    self.slots, solution.demand_duals, program.demand, solution.slot_duals
                )
                if thorough is not None and thorough.left():
                    prices = DualPrices(program.demand, solution.demand_duals * program.demand)
                    priced += self.knapsack.valuable_modes(prices, solution.slot_duals, thorough)
                program.pool.extend(((mode, 1),) for mode in priced)
                allowed = None if bundled is None else bundled.allowed(program.pool)
                if not program.add_improving(solution, MAX_COLUMNS_PER_ROUND, allowed):
                    break
            last, before = solution, solution.value
            solution = program.solve(deadline=self.budget.deadline)
            if solution is None:
                return program.extended(last)
            if before - solution.value < REL_PROGRESS * abs(before):
                break
        return solution

    def relaxation(self, demand: Array) -> Relaxed | None:
        """Return the solved relaxation of covering the demand, at whose prices the search goes: near its optimum."""
        program = CoverProgram(self.fleet, self.pool, np.arange(len(self.singles)), demand)
        solution = self.relax(program, MAX_ROOT_ROUNDS, thorough=self.budget.part(THOROUGH_SHARE))
        return None if solution is None else Relaxed(solution, program)

    def cover(self, demand: Array, *, bundles: bool = True) -> Dive:
        """Return a cover of the demand, as far as one was found, and the relaxations.

        bundles: whether models that take several partitions are covered by bundles once rounding begins.
        """
        return self._completed(Counter(), Counter(), demand, bundles=bundles)

    def solve_integer(self, columns: IntArray, demand: Array, share: float) -> Cover | None:
        """Return the cover of the integer program over some columns; None where none was found that serves everything.

        share: of the time that is left, which it may take.
        """
        allowed = share * self.budget.left()
        if allowed < MIN_SECONDS_PER_COLUMN * len(columns):
            return None
        added_up = frozenset(k for k, limit in enumerate(self.geometries) if limit is None)
        fleet = msgspec.structs.replace(self.fleet, added_up=added_up)
        program = CoverProgram(fleet, self.pool, columns, demand, integer=True, serve_all=True)
        answer = program.solve(
            gap=INTEGER_GAP,
            nodes=MAX_INTEGER_NODES,
            checks=program.checks_for(allowed),
            deadline=self.budget.deadline,
        )
        self.budget.spend(program.work)
        if answer is None:
            return None
        modes: Counter[Mode] = Counter()
        for n, count in zip(columns.tolist(), answer.modes.tolist(), strict=True):
            for mode, many in self.pool.columns[n] if count else ():
                modes[mode] += many * int(count)
        cut = self._cut(self.fleet, modes, np.zeros(len(self.fleet.slots)), DROPPED[0] * self._share_prices)
        return self._completed(Counter(dict(cut.modes)), Counter(dict(cut.patterns)), demand).cover

    def solve_one_model_each(self, dive: Dive, demand: Array, share: float) -> Cover | None:
        """Return the cover of the integer program over modes of one model; of very many, those of each model that are
        nearest to their price in the relaxation."""
        columns = np.arange(len(self.singles))
        if dive.relaxed is not None and len(columns) > MAX_SINGLE_COLUMNS:
            excess = dive.relaxed.excess(demand)[columns]
            model = np.array([mode.models[0] for mode in self.singles])
            order = np.lexsort((excess, model))
            first = np.searchsorted(model[order], model[order], side="left")
            most = max(MIN_MODES_PER_MODEL, MAX_SINGLE_COLUMNS // len(demand))
            columns = np.sort(order[np.arange(len(order)) - first < most])
        return self.solve_integer(columns, demand, share)

    def solve_bundled(self, dive: Dive, demand: Array, share: float) -> Cover | None:
        """Return the cover of the integer program over the columns near their price in the relaxation over bundles."""
        if dive.bundled is None:
            return None
        program = dive.bundled.program
        excess = dive.bundled.excess(program.demand)
        order = program.columns[np.argsort(excess[program.columns], kind="stable")]
        used = self.pool.indices(((mode, 1),) for mode, _ in dive.cover.modes)
        return self.solve_integer(np.unique(np.concatenate([order[:MAX_BUNDLED_COLUMNS], used])), demand, share)

    def solve_nearest(self, relaxed: Relaxed, covers: Sequence[Cover], demand: Array, share: float) -> Cover | None:
        """Return the cover of the integer program over the columns of the pool that are nearest to their price in the
        relaxation, and those of some covers."""
        used = self.pool.indices(((mode, 1),) for cover in covers for mode, _ in cover.modes)
        nearest = np.argsort(relaxed.excess(demand), kind="stable")[:MAX_NEAREST_COLUMNS]
        return self.solve_integer(np.unique(np.concatenate([nearest, used])), demand, share)

    def _completed(
        self, modes: Counter[Mode], patterns: Counter[CuttingPattern], demand: Array, *, bundles: bool = True
    ) -> Dive:
        """Return a cover that contains these modes on these patterns.

        Whole devices hold fewer partitions than parts of devices: what they do not is covered again, with the devices
        and the pieces that are left.
        """
        first: _Dived | None = None
        for dropped in DROPPED:
            served = np.zeros(len(demand))
            for mode, many in modes.items():
                served[list(mode.models)] += many * np.array(mode.rates)
            left = np.where(demand - served > ROUNDING_TOLERANCE * demand, demand - served, 0.0)
            if not left.any():
                break
            fleet, free = self._rest(modes, patterns)
            dived = self._dive(fleet, left, free, bundles=bundles)
            first = first or dived
            prices = self._share_prices
            if dived.relaxed is not None:
                prices = np.maximum(prices, dived.relaxed.solution.slot_duals)
            cut = self._cut(fleet, dived.modes, free, dropped * prices)
            modes.update(dict(cut.modes))
            patterns.update(dict(cut.patterns))
        cover = Cover(list(modes.items()), list(patterns.items()))
        return Dive(cover, None, None) if first is None else Dive(cover, first.relaxed, first.bundled)

    def _rest(self, modes: Counter[Mode], patterns: Counter[CuttingPattern]) -> tuple[Fleet, Array]:
        """Return the fleet without the devices of some patterns, and the pieces of each slot that modes leave free."""
        counts, free = list(self.fleet.counts), np.zeros(len(self.fleet.slots))
        for pattern, many in patterns.items():
            counts[pattern.kind] -= many
            for s, pieces in pattern.pieces:
                free[s] += many * pieces
        for mode, many in modes.items():
            free[mode.slot] -= many
        return msgspec.structs.replace(self.fleet, counts=counts), free

    def _dive(self, fleet: Fleet, demand: Array, free: Array, *, bundles: bool) -> _Dived:
        """Return the relaxations, and modes that cover the demand as far as parts of devices hold them.

        free: pieces on each slot that need no device.
        """
        left = demand.copy()
        fixed: Counter[Mode] = Counter()
        occupied, memory = -free, np.zeros(MEMORY_LIMITS * len(fleet.counts))
        program = CoverProgram(fleet, self.pool, np.arange(len(self.singles)), left, occupied=occupied)
        solution = self.relax(program, MAX_PRICING_ROUNDS)
        if solution is None:
            return _Dived(self._cheapest_alone(fleet, left), None, None)
        relaxed = Relaxed(solution, program)
        bundled: Relaxed | None = None
        chosen: dict[int, int] = {}
        while solution is not None and left.any():
            if self.budget.left():
                most = MAX_BUNDLED if bundles else 0.0
                program, solution = self._next(fleet, program, solution, left, occupied, memory, most)
                if solution is None:
                    break
                bundled = bundled or Relaxed(solution, program)
                chosen = self._rounded(program, solution, left)
            else:
                chosen, solution = self._rounded_up(program, solution, chosen, left), None
            if not chosen:
                break
            for n, count in chosen.items():
                for mode, many in self.pool.columns[n]:
                    fixed[mode] += count * many
                    occupied[mode.slot] += count * many
                    kind = fleet.slots[mode.slot].kind
                    for row, part in memory_parts(kind, fleet.memory_limits, mode.memory).items():
                        memory[row] += count * many * part
                    left[list(mode.models)] -= count * many * np.array(mode.rates)
            left[left <= ROUNDING_TOLERANCE * demand] = 0.0
        return _Dived(fixed, relaxed, bundled)

    def _cheapest_alone(self, fleet: Fleet, demand: Array) -> Counter[Mode]:
        """Return modes of one model that cover the demand, of kinds that are left the cheapest for each request/s: no
        program is solved."""
        cheapest: dict[int, tuple[float, Mode]] = {}
        for mode in self.singles:
            (i,), (rate,) = mode.models, mode.rates
            price = float(self._share_prices[mode.slot]) / rate
            if fleet.counts[fleet.slots[mode.slot].kind] >= 1 and (i not in cheapest or price < cheapest[i][0]):
                cheapest[i] = price, mode
        wanted = ((i, mode) for i, (_, mode) in cheapest.items() if demand[i] > 0)
        return Counter({mode: math.ceil(float(demand[i]) / mode.rates[0]) for i, mode in wanted})

    def _next(
        self,
        fleet: Fleet,
        program: CoverProgram,
        solution: CoverSolution,
        left: Array,
        occupied: Array,
        memory: Array,
        most_bundled: float,
    ) -> tuple[CoverProgram, CoverSolution | None]:
        """Return the relaxation for what is left, over bundles where models take several partitions, and its solution.

        program, solution: the last one, whose columns near their price are kept. most_bundled: partitions up to which
        a model is covered by bundles.
        """
        partitions = np.zeros(len(left))
        owner, at = self.pool.models.of(program.columns)
        np.add.at(
            partitions, self.pool.models.index[at], solution.modes[owner] * self.pool.sizes[program.columns][owner]
        )
        large = (partitions >= MIN_BUNDLED) & (partitions <= most_bundled)
        bundled = Bundled(Bundler(self.singles, np.where(large, left, 0.0)), left, large)
        self.pool.extend(bundled.bundler.cheapest(solution.slot_duals))
        value = self.pool.values(solution.demand_duals, left)
        near = value >= KEPT_VALUE * program.prices_of(solution)
        near[: len(self.singles)] |= left[[mode.models[0] for mode in self.singles]] > 0
        columns = np.flatnonzero(near & bundled.allowed(self.pool) & (self.pool.values(np.ones(len(left)), left) > 0))
        following = CoverProgram(
            fleet, self.pool, columns, left, occupied=occupied, memory_used=memory, overflow=OVERFLOW
        )
        return following, self.relax(following, MAX_PRICING_ROUNDS // 2, bundled)

    def _rounded(self, program: CoverProgram, solution: CoverSolution, left: Array) -> dict[int, int]:
        """Return how many of which columns to fix: whole ones, or where there are none the largest parts."""
        whole = np.floor(solution.modes + NEAR_ONE).astype(np.int64)
        if whole.any():
            return {int(program.columns[n]): int(whole[n]) for n in np.flatnonzero(whole)}
        order = np.argsort(-solution.modes, kind="stable")
        order = order[solution.modes[order] > NEAR_ZERO]
        most = max(1, int(ROUNDED_UP * solution.modes.sum()))
        models, remaining = self.pool.models, left.copy()
        chosen: dict[int, int] = {}
        for n in program.columns[order].tolist():
            own = slice(models.starts[n], models.starts[n + 1])
            i, rates = models.index[own], models.value[own]
            worth = solution.demand_duals[i] @ np.minimum(rates, np.maximum(remaining[i], 0.0))
            if worth < MIN_USEFUL * (solution.demand_duals[i] @ np.minimum(rates, left[i])):
                continue
            chosen[n] = 1
            remaining[i] -= rates
            if len(chosen) == most:
                break
        return chosen

    def _rounded_up(
        self, program: CoverProgram, solution: CoverSolution, fixed: Mapping[int, int], left: Array
    ) -> dict[int, int]:
        """Return how many of which columns cover what is left at once, where no work is left. Whole ones come first,
        then the largest parts, as far as they are of use.

        solution: includes the columns that are `fixed`, whose demand is not left.
        """
        columns, models, remaining = program.columns[: len(solution.modes)].tolist(), self.pool.models, left.copy()
        parts = np.maximum(solution.modes - [fixed.get(n, 0) for n in columns], 0.0)
        whole = np.floor(parts + NEAR_ONE).astype(np.int64)
        rest = parts - whole
        chosen: dict[int, int] = {}
        steps = [(at, int(whole[at])) for at in np.flatnonzero(whole).tolist()]
        steps += [(at, 1) for at in np.argsort(-rest, kind="stable").tolist() if rest[at] > NEAR_ONE]
        for at, many in steps:
            n = columns[at]
            own = slice(models.starts[n], models.starts[n + 1])
            i = models.index[own]
            if (remaining[i] > ROUNDING_TOLERANCE * left[i]).any():
                chosen[n] = chosen.get(n, 0) + many
                remaining[i] -= many * models.value[own]
        for n in reversed(list(chosen)):  # what later ones have made superfluous
            own = slice(models.starts[n], models.starts[n + 1])
            i, rates = models.index[own], models.value[own]
            spare = min(chosen[n], math.floor((-remaining[i] / rates).min() + NEAR_ZERO))
            if spare > 0:
                chosen[n] -= spare
                remaining[i] += spare * rates
        return {n: many for n, many in chosen.items() if many}

    def _cut(self, fleet: Fleet, modes: Counter[Mode], free: Array, penalties: Array) -> Cover:
        """Return the cheapest patterns for the modes, and the modes that they hold.

        penalties: cost of a partition on each slot that they do not hold.
        """
        wanted = np.maximum(-free, 0.0)
        memory = np.zeros(len(wanted))
        for mode, many in modes.items():
            wanted[mode.slot] += many
            memory[mode.slot] += many * mode.memory
        occupied = np.flatnonzero(wanted)
        units = [Mode(int(s), (int(s),), (1.0,), (1,), (1,), int(memory[s] / wanted[s])) for s in occupied]
        program = CoverProgram(
            msgspec.structs.replace(fleet, penalties=np.maximum(penalties, MIN_PENALTY)),
            ColumnPool(fleet.slots, fleet.memory_limits, units),
            np.arange(len(units)),
            wanted,
            occupied=-np.maximum(free, 0.0),
            integer=True,
        )
        # No plan without it: it ends after so many checks, whatever the time.
        solution = program.solve(gap=CUT_GAP, nodes=MAX_CUT_NODES, checks=MAX_CUT_CHECKS)
        self.budget.spend(program.work)
        if solution is None:
            return Cover([], [])
        room = Counter({int(s): round(n) for s, n in zip(occupied, solution.modes, strict=True)})
        kept = []
        for mode, many in modes.items():
            held = min(many, room[mode.slot])
            room[mode.slot] -= held
            if held:
                kept.append((mode, held))
        return Cover(kept, [(each, int(n)) for each, n in zip(fleet.patterns, solution.patterns, strict=True) if n])


class _Dived(msgspec.Struct, frozen=True):
    modes: Counter[Mode]
    relaxed: Relaxed | None
    bundled: Relaxed | None


class Bundled:
    """Say which columns a program over bundles may use: of models that take several partitions, whole bundles.

    left: demand; large: those models.
    """

    def __init__(self, bundler: Bundler, left: Array, large: NDArray[np.bool_]) -> None:
        self.bundler, self._left, self._large = bundler, left, large
        self.work = SECONDS_PER_BUNDLE * len(bundler.models)

    def allowed(self, pool: ColumnPool) -> NDArray[np.bool_]:
        """Return for each column whether the program may use it."""
        models = pool.models
        first = models.starts[:-1]
        alone = models.starts[1:] - first == 1
        part = models.value[first] < self._left[models.index[first]] * (1 - NEAR_ZERO)
        allowed: NDArray[np.bool_] = ~(alone & part & self._large[models.index[first]])
        return allowed
