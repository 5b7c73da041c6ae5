"""Cover demand with whole numbers of modes: price, cut, round, and price again for what is left.

Column generation solves the linear relaxation of the covering program (covering.py), with cuts on each model's demand
(demand_cuts.py): without them a partition that serves all of a model counts as a fraction of one, and what rounding
costs only shows once it is too late. Whole partitions of its solution are fixed, and where these are few the largest
fractions are rounded up; then the program is solved again for the demand that remains, with modes priced for
remainders, since a mode counts no more than the demand. This is diving with residual problems (Wäscher and Gau, OR
Spektrum 18, 1996; Sadykov et al., INFORMS Journal on Computing 31, 2019).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners.capacity import ROUNDING_TOLERANCE
from cotenant.planners.geometry.budget import WorkBudget
from cotenant.planners.geometry.covering import (
    MEMORY_LIMITS,
    NEAR_ZERO,
    ColumnPool,
    CoverProgram,
    CoverSolution,
    Fleet,
    IntArray,
    memory_parts,
)
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.round_knapsack import RoundKnapsack

Array = NDArray[np.float64]

MAX_PRICING_ROUNDS = 8  # of the first program of a dive; fewer below
MAX_COLUMNS_PER_ROUND = 2000
REL_PROGRESS = 2e-4  # of the objective, below which pricing stops
NEAR_ONE = 1e-4  # by which a part of a column may fall short of 1 and count as whole
OVERFLOW = 2.0  # price of a device beyond the counts, over the dearest, while parts of devices are fixed
DROPPED = (1.5, 3.0, 100.0, 100.0)  # price of a partition that devices do not hold, over that of its slot, in each dive
MIN_PENALTY = 1e-3  # of a partition that is not held, where devices cost nothing
PATTERN_GAP = 1e-4  # relative, for whole devices
MAX_CUT_ROUNDS = 3  # of cuts after each round of pricing
MAX_PATTERN_NODES = 500
MAX_PATTERN_CHECKS = 2000
MAX_NEAREST_COLUMNS = 600  # in the integer program over those nearest to their price, besides those of covers
MAX_SINGLE_COLUMNS = 4000  # in the integer program, but for
MIN_MODES_PER_MODEL = 4
MIN_SECONDS_PER_COLUMN = 2e-4  # of work, with less of which an integer program finds nothing worth its time
INTEGER_GAP = 3e-4
MAX_INTEGER_NODES = 5000
ROUNDED_UP = 0.3  # part of the fractional partitions that is rounded up at a time
STEPS_SHARE = 0.5  # of the work left, which the programs after the first may take together
ROOT_SHARE = 0.3  # of the work left, which dynamic programming may take for the first program
TINY = 1e-9
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

    def prices(self) -> Array:
        """Return the price of a request/s of each model where all of its demand is served."""
        return self.program.demand_prices(self.solution).average()

    def excess(self) -> Array:
        """Return by how much the price of each column exceeds what it is worth at the prices of this relaxation."""
        return self.program.prices_of(self.solution) - self.program.values_of(self.solution)


class Dive(msgspec.Struct, frozen=True):
    """Hold what a dive found. relaxed: the relaxation that it began with."""

    cover: Cover
    relaxed: Relaxed | None


class Diver:
    """Solve covering programs of one fleet over a shared pool of columns.

    singles: modes of one model, which each program starts with; slots: those that modes may use; pool: of another diver
    of the same singles, whose columns both use then.
    """

    def __init__(
        self,
        fleet: Fleet,
        catalog: ModeCatalog,
        singles: Sequence[Mode],
        slots: Sequence[int],
        budget: WorkBudget,
        pool: ColumnPool | None = None,
    ) -> None:
        self.fleet, self.catalog, self.slots, self.budget = fleet, catalog, slots, budget
        self.singles = list(dict.fromkeys(singles))
        self.pool = ColumnPool(fleet.slots, fleet.memory_limits, self.singles) if pool is None else pool
        self.geometries = [kind.geometry for kind in catalog.problem.fleet]
        self._share_prices = np.array([fleet.prices[slot.kind] * slot.share / WHOLE for slot in fleet.slots])
        self.knapsack = RoundKnapsack(catalog, slots)
        self._pricing_work = SECONDS_PER_PRICING * len(slots) * catalog.options.latency[0].size

    def relax(self, program: CoverProgram, rounds: int, *, thorough: WorkBudget) -> CoverSolution | None:
        """Solve the relaxation with cuts, generating columns until none improves it, or little; None where it is
        infeasible, or the deadline passed before it was solved once.

        thorough: budget for dynamic programming, which finds better ones and takes longer.
        """
        solution = program.solve(deadline=self.budget.deadline)
        for _ in range(rounds):
            if solution is None:
                return None
            self.budget.spend(program.work)
            solution = self._with_cuts(program, solution)
            if not self.budget.left():
                break
            if not program.add_improving(solution, MAX_COLUMNS_PER_ROUND):
                self.budget.spend(self._pricing_work)
                prices = program.demand_prices(solution)
                priced = self.catalog.knapsack_modes(self.slots, prices.average(), program.demand, solution.slot_duals)
                if thorough.left():
                    priced += self.knapsack.valuable_modes(prices, solution.slot_duals, thorough)
                program.pool.extend(priced)
                if not program.add_improving(solution, MAX_COLUMNS_PER_ROUND):
                    break
            last, before = solution, solution.value
            solution = program.solve(deadline=self.budget.deadline)
            if solution is None:
                return program.extended(last)
            if before - solution.value < REL_PROGRESS * abs(before):
                break
        return solution

    def _with_cuts(self, program: CoverProgram, solution: CoverSolution) -> CoverSolution:
        """Return the solution with cuts that it violates, as far as one is found."""
        for _ in range(MAX_CUT_ROUNDS):
            if not self.budget.left() or not program.add_cuts(solution):
                break
            following = program.solve(deadline=self.budget.deadline, priced=False)
            if following is None:
                break
            solution = following
            self.budget.spend(program.work)
        return solution

    def relaxation(self, demand: Array, fleet: Fleet | None = None, free: Array | None = None) -> Relaxed | None:
        """Return the solved relaxation of covering the demand, with cuts.

        fleet: where it is not that of the diver; free: pieces on each slot that need no device.
        """
        occupied = None if free is None else -free
        program = CoverProgram(fleet or self.fleet, self.pool, np.arange(len(self.singles)), demand, occupied=occupied)
        solution = self.relax(program, MAX_PRICING_ROUNDS, thorough=self.budget.part(ROOT_SHARE))
        return None if solution is None else Relaxed(solution, program)

    def cover(self, demand: Array, *, rounded_up: float = ROUNDED_UP) -> Dive:
        """Return a cover of the demand, as far as one was found, and the relaxation with cuts.

        rounded_up: part of what is fractional that is rounded up at a time, or more where work runs short.

        Whole devices hold fewer partitions than parts of devices: what they do not is covered again, with the devices
        and the pieces that are left.
        """
        modes: Counter[Mode] = Counter()
        patterns: Counter[CuttingPattern] = Counter()
        first: _Dived | None = None
        for dropped in DROPPED:
            served = np.zeros(len(demand))
            for mode, many in modes.items():
                served[list(mode.models)] += many * np.array(mode.rates)
            left = np.where(demand - served > ROUNDING_TOLERANCE * demand, demand - served, 0.0)
            if not left.any():
                break
            fleet, free = self._rest(modes, patterns)
            dived = self._dive(fleet, left, free, rounded_up)
            first = first or dived
            prices = self._share_prices
            if dived.relaxed is not None:
                prices = np.maximum(prices, dived.relaxed.solution.slot_duals)
            cut = self._cut(fleet, dived.modes, free, dropped * prices)
            modes.update(dict(cut.modes))
            patterns.update(dict(cut.patterns))
        cover = Cover(list(modes.items()), list(patterns.items()))
        return Dive(cover, None if first is None else first.relaxed)

    def one_model_each(self, dive: Dive, demand: Array, share: float) -> Cover | None:
        """Return the cover of the integer program over modes of one model; of very many, those of each model that are
        nearest to their price in the relaxation. None where none was found that serves everything.

        share: of the work that is left, which it may take.
        """
        columns = np.arange(len(self.singles))
        if dive.relaxed is not None and len(columns) > MAX_SINGLE_COLUMNS:
            excess = dive.relaxed.excess()[columns]
            model = np.array([mode.models[0] for mode in self.singles])
            order = np.lexsort((excess, model))
            first = np.searchsorted(model[order], model[order], side="left")
            most = max(MIN_MODES_PER_MODEL, MAX_SINGLE_COLUMNS // len(demand))
            columns = np.sort(order[np.arange(len(order)) - first < most])
        return self._integer(columns, demand, share)

    def nearest(self, relaxed: Relaxed, covers: Sequence[Cover], demand: Array, share: float) -> Cover | None:
        """Return the cover of the integer program over the columns that are nearest to their price in the relaxation,
        and those of some covers. None where none was found that serves everything.

        share: of the work that is left, which it may take.
        """
        used = self.pool.indices(mode for cover in covers for mode, _ in cover.modes)
        nearest = np.argsort(relaxed.excess(), kind="stable")[:MAX_NEAREST_COLUMNS]
        return self._integer(np.unique(np.concatenate([nearest, used])), demand, share)

    def _integer(self, columns: IntArray, demand: Array, share: float) -> Cover | None:
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
        counted = zip(columns.tolist(), answer.modes.tolist(), strict=True)
        modes = Counter({self.pool.modes[n]: int(count) for n, count in counted if count})
        # Partitions that devices do not hold are left out, for the search of fleets to serve.
        return self._cut(self.fleet, modes, np.zeros(len(self.fleet.slots)), DROPPED[-1] * self._share_prices)

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

    def _dive(self, fleet: Fleet, demand: Array, free: Array, rounded_up: float) -> _Dived:
        """Return the relaxation, and modes that cover the demand as far as parts of devices hold them.

        free: pieces on each slot that need no device.
        """
        left = demand.copy()
        fixed: Counter[Mode] = Counter()
        occupied, memory = -free, np.zeros(MEMORY_LIMITS * len(fleet.counts))
        relaxed = self.relaxation(left, fleet, free)
        if relaxed is None:
            return _Dived(self._cheapest_alone(fleet, left), None)
        program, solution, part = relaxed.program, relaxed.solution, rounded_up
        while left.any():
            ends = not self.budget.left()
            chosen = self._rounded_up(program, solution, left) if ends else self._rounded(program, solution, left, part)
            for n, count in chosen.items():
                mode = self.pool.modes[n]
                fixed[mode] += count
                occupied[mode.slot] += count
                kind = fleet.slots[mode.slot].kind
                for row, own in memory_parts(kind, fleet.memory_limits, mode.memory).items():
                    memory[row] += count * own
                left[list(mode.models)] -= count * np.array(mode.rates)
            left[left <= ROUNDING_TOLERANCE * demand] = 0.0
            if ends or not chosen:
                break
            before = self.budget.used
            program, following = self._next(fleet, program, solution, left, occupied, memory)
            if following is None:
                break
            solution = following
            # The work of a program falls with what is fractional: steps of this size take about this share of the rest.
            part = max(rounded_up, (self.budget.used - before) / max(STEPS_SHARE * self.budget.left(), TINY))
        return _Dived(fixed, relaxed)

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
    ) -> tuple[CoverProgram, CoverSolution | None]:
        """Return the relaxation for what is left, and its solution.

        program, solution: the last one, whose columns near their price are kept.
        """
        near = program.values_of(solution) >= KEPT_VALUE * program.prices_of(solution)
        near[: len(self.singles)] |= left[[mode.models[0] for mode in self.singles]] > 0
        columns = np.flatnonzero(near & (self.pool.values(np.ones(len(left)), left) > 0))
        following = CoverProgram(
            fleet, self.pool, columns, left, occupied=occupied, memory_used=memory, overflow=OVERFLOW
        )
        return following, self.relax(following, MAX_PRICING_ROUNDS // 2, thorough=self.budget)

    def _rounded(self, program: CoverProgram, solution: CoverSolution, left: Array, part: float) -> dict[int, int]:
        """Return how many of which columns to fix: whole ones, and where these are few the largest parts.

        part: of what is fractional that is fixed at least, as far as it is of use.
        """
        whole = np.floor(solution.modes + NEAR_ONE).astype(np.int64)
        models, remaining = self.pool.models, left.copy()
        chosen = {int(program.columns[n]): int(whole[n]) for n in np.flatnonzero(whole)}
        most = max(1, int(min(part, 1.0) * solution.modes.sum()))
        if len(chosen) >= most:
            return chosen
        for n, many in chosen.items():
            i, rates = models.row(n)
            remaining[i] -= rates * many
        parts = solution.modes - whole
        order = np.argsort(-parts, kind="stable")
        order = order[parts[order] > NEAR_ZERO]
        prices = program.demand_prices(solution).average()
        for n in program.columns[order].tolist():
            i, rates = models.row(n)
            worth = prices[i] @ np.minimum(rates, np.maximum(remaining[i], 0.0))
            if worth < MIN_USEFUL * (prices[i] @ np.minimum(rates, left[i])):
                continue
            chosen[n] = chosen.get(n, 0) + 1
            remaining[i] -= rates
            if len(chosen) >= most:
                break
        return chosen

    def _rounded_up(self, program: CoverProgram, solution: CoverSolution, left: Array) -> dict[int, int]:
        """Return how many of which columns cover what is left at once, where no work is left. Whole ones come first,
        then the largest parts, as far as they are of use."""
        models, remaining = self.pool.models, left.copy()
        whole = np.floor(solution.modes + NEAR_ONE).astype(np.int64)
        rest = solution.modes - whole
        chosen: dict[int, int] = {}
        steps = [(at, int(whole[at])) for at in np.flatnonzero(whole).tolist()]
        steps += [(at, 1) for at in np.argsort(-rest, kind="stable").tolist() if rest[at] > NEAR_ONE]
        for at, many in steps:
            n = int(program.columns[at])
            i, rates = models.row(n)
            if (remaining[i] > ROUNDING_TOLERANCE * left[i]).any():
                chosen[n] = chosen.get(n, 0) + many
                remaining[i] -= many * rates
        for n in reversed(list(chosen)):  # what later ones have made superfluous
            i, rates = models.row(n)
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
        solution = program.solve(gap=PATTERN_GAP, nodes=MAX_PATTERN_NODES, checks=MAX_PATTERN_CHECKS)
        self.budget.spend(program.work)
        if solution is None:
            return Cover([], [])
        room = Counter({int(s): round(n) for s, n in zip(occupied, solution.modes, strict=True)})
        kept: list[tuple[Mode, int]] = []
        for mode, many in modes.items():
            held = min(many, room[mode.slot])
            room[mode.slot] -= held
            if held:
                kept.append((mode, held))
        return Cover(kept, [(each, int(n)) for each, n in zip(fleet.patterns, solution.patterns, strict=True) if n])


class _Dived(msgspec.Struct, frozen=True):
    modes: Counter[Mode]
    relaxed: Relaxed | None
