"""What no plan can do with less than: patterns of a cutting-stock problem, priced and cut.

The linear relaxation of modes of one model counts all that a partition carries. But of a model no partition carries
more that counts than is asked for, and with that limit modes of several models matter: they are the patterns of Gilmore
and Gomory (Operations Research 9, 1961), made as their prices ask for them.

That partitions are whole is brought in by Chvátal's cuts on what each model gets. Partitions that carry parts a_c of
what is asked of a model must have Σ a_c ≥ 1, so Σ ⌈u · a_c⌉ ≥ ⌈u⌉ for any u > 0: of partitions that carry less than a
half there must be three. Only the part that a mode carries matters for a cut, so that modes can still be priced.

The proof is the Lagrangian's: at any prices, all that is asked is worth W, a partition on slot s is worth no more than
V_s, and hence a device no more than its dearest cutting. It holds whatever the program's tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import highspy
import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, ModeCatalog
from cotenant.planners.geometry.pricing import DualPrices, StepValue, price_modes

Array = NDArray[np.float64]

MAX_ROUNDS = 40  # of pricing and cutting
MAX_TRIALS = 8  # multiples of the rates, or fleets, that are tried
REL_GAP = 3e-4  # how near to what can be proven
REL_ROUNDING = 1e-6  # of a multiple: sums of floats
REL_MULTIPLIER_SLACK = 1e-7  # of a cut's multiplier, for the same reason
MAX_CUT_NUMERATOR = 6  # multiples of the parts that partitions carry that are tried for a cut
MAX_CUT_MULTIPLIER = 40.0  # largest multiplier of a cut
MIN_CUT_VIOLATION = 1e-3  # by how much of it a cut must be broken
NEAR_ZERO = 1e-9  # prices and numbers that are as good as none
MAX_COLUMNS_PER_ROUND = 60  # modes that are taken in at once


class BoundCertificate(msgspec.Struct, frozen=True):
    """What some rates are worth at some prices, and at most each device of a kind: `asked` ≤ Σ count · device."""

    asked: float
    device: Array

    def part(self, counts: Sequence[float]) -> float:
        """Of so many devices of each kind, the part that no plan can do with less than."""
        worth = sum(count * float(own) for count, own in zip(counts, self.device, strict=True) if own > 0)
        return self.asked / worth if worth > 0 else math.inf


class BoundSolver:
    """What rates of the models of a menu need. slots: of use; modes: any, to begin with."""

    def __init__(
        self, catalog: ModeCatalog, slots: Sequence[int], patterns: Sequence[CuttingPattern], modes: Sequence[Mode]
    ) -> None:
        self.catalog, self.slots, self.patterns = catalog, slots, patterns
        self.pool: list[Mode] = []
        self.carried = np.zeros((0, len(catalog.names)))
        self.extend(modes)
        self.chosen = [n for n, mode in enumerate(self.pool) if len(mode.models) == 1]
        self.multipliers: list[tuple[int, float]] = []

    def extend(self, modes: Sequence[Mode]) -> list[int]:
        """Take modes into the pool; their numbers there."""
        carried = np.zeros((len(modes), len(self.catalog.names)))
        count = [len(mode.models) for mode in modes]
        rows, models = np.repeat(np.arange(len(modes)), count), [i for mode in modes for i in mode.models]
        carried[rows, models] = [rate for mode in modes for rate in mode.rates]
        fresh = list(range(len(self.pool), len(self.pool) + len(modes)))
        self.pool += modes
        self.carried = np.concatenate([self.carried, carried])
        self.slot = np.array([mode.slot for mode in self.pool])
        return fresh

    def largest(self, rates: Array, counts: Sequence[float], limit: float) -> float:
        """A multiple of the rates that no plan exceeds, no more than `limit`, which is known to be one."""
        low, multiple = 0.0, limit
        for _ in range(MAX_TRIALS):
            proof = self.prove(rates * multiple, counts)
            part = proof.part(counts) if proof is not None else 0.0
            if part > 1 + REL_ROUNDING:
                limit = multiple
                multiple = max(limit / part * (1 + REL_GAP), (limit + low) / 2 if low else 0.0)
            else:
                low = multiple
                multiple = (limit + low) / 2
            if limit - multiple < REL_GAP * limit:
                break
        return limit * (1 + REL_ROUNDING)

    def cheapest(self, rates: Array, counts: Sequence[float], prices: Sequence[float], limit: float) -> float:
        """A cost that no plan for the rates goes below, no less than `limit`, which is known to be one."""
        proofs: list[BoundCertificate] = []
        for _ in range(MAX_TRIALS):
            fleet = _fleet(proofs, counts, prices, limit)
            if fleet is None:
                break
            limit = max(limit, sum(price * count for price, count in zip(prices, fleet, strict=True)))
            proof = self.prove(rates, fleet)
            if proof is None or proof.part(fleet) <= 1 + REL_ROUNDING:
                break
            proofs.append(proof)
        return limit

    def proves_infeasible(self, rates: Array, counts: Sequence[float]) -> bool:
        """Whether so many devices of each kind are proven to be too few."""
        proof = self.prove(rates, counts, enough=1 + REL_ROUNDING)
        return proof is not None and proof.part(counts) > 1 + REL_ROUNDING

    def prove(self, rates: Array, counts: Sequence[float], *, enough: float = math.inf) -> BoundCertificate | None:
        """How much of some devices the rates take; None where nothing of use was proven.

        enough: the part of the devices beyond which no closer proof is looked for.
        """
        best: BoundCertificate | None = None
        program = _Patterns(self, rates, counts)
        for _ in range(MAX_ROUNDS):
            program.run()
            if program.value is None:
                break
            served = program.value <= 1.0
            prices = program.prices()
            if (not served and program.take(prices)) or program.cut():
                continue
            if served:
                return best
            worth = program.worth()
            found: list[Mode] = []
            most = self._spared(prices, len(counts)) * (1 + REL_GAP) + NEAR_ZERO
            for s in self.slots:
                most[s], new = price_modes(self.catalog, s, worth, float(most[s]))
                found += [mode for _, mode in new]
            proof = BoundCertificate(worth.all(), self._devices(most, len(counts)))
            best = max(best or proof, proof, key=lambda each: each.part(counts))
            part = best.part(counts)
            if not found or part > enough or part >= program.value * (1 - 2 * REL_GAP):
                break
            program.extend(found)
        return best

    def _spared(self, prices: Array, kinds: int) -> Array:
        """Prices of partitions on each slot that are as high as they may be without a device becoming dearer."""
        dearest = self._devices(prices, kinds)
        spare = np.full(len(prices), math.inf)
        for pattern in self.patterns:
            own = sum(float(prices[s]) * many for s, many in pattern.pieces)
            count = sum(many for _, many in pattern.pieces)
            for s, _ in pattern.pieces:
                spare[s] = min(spare[s], max(0.0, dearest[pattern.kind] - own) / count)
        higher: Array = prices + np.where(np.isfinite(spare), spare, 0.0)
        return higher

    def _devices(self, most: Array, kinds: int) -> Array:
        """What a device of each kind is worth at most, where partitions are."""
        worth = np.zeros(kinds)
        for pattern in self.patterns:
            own = sum(float(most[s]) * many for s, many in pattern.pieces)
            worth[pattern.kind] = max(worth[pattern.kind], own)
        return worth


def _fleet(
    proofs: Sequence[BoundCertificate], counts: Sequence[float], prices: Sequence[float], limit: float
) -> list[float] | None:
    """The cheapest fleet of no less than a cost that no proof refuses; None where there is none."""
    program = highspy.Highs()  # type: ignore[no-untyped-call]
    program.setOptionValue("output_flag", False)
    program.setOptionValue("mip_rel_gap", 0.0)  # what is near the cheapest may cost more than a plan
    columns = list(range(len(counts)))
    for k in columns:
        program.addCol(prices[k], 0.0, min(counts[k], highspy.kHighsInf), 0, [], [])
        program.changeColIntegrality(k, highspy.HighsVarType.kInteger)
    program.addRow(limit * (1 - REL_ROUNDING), highspy.kHighsInf, len(columns), columns, list(prices))
    for proof in proofs:
        program.addRow(
            proof.asked * (1 - REL_ROUNDING), highspy.kHighsInf, len(columns), columns, proof.device.tolist()
        )
    program.run()
    if program.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    return [float(round(count)) for count in program.getSolution().col_value]


class _Patterns:
    """The program for some rates and devices: the part of the fleet that is used is to be least.

    Columns: that part, cuttings, modes. Rows: devices of each kind, partitions on each slot, models, cuts.
    """

    def __init__(self, of: BoundSolver, rates: Array, counts: Sequence[float]) -> None:
        self.of, self.rates = of, rates
        self.value: float | None = None
        self.columns: list[int] = []
        self.cuts: list[tuple[int, float]] = []
        self._pooled()
        self.program = highspy.Highs()  # type: ignore[no-untyped-call]
        self.program.setOptionValue("output_flag", False)
        self.program.setOptionValue("threads", 1)
        kinds, slots = len(counts), len(of.catalog.slots)
        self.at_slot, self.at_model, self.at_cut = kinds, kinds + slots, kinds + slots + len(rates)
        for n in range(self.at_cut):
            low, high = (1.0, highspy.kHighsInf) if n >= self.at_model else (-highspy.kHighsInf, 0.0)
            self.program.addRow(low, high, 0, [], [])
        self._column(1.0, list(range(kinds)), [-count for count in counts])
        for pattern in of.patterns:
            rows = [pattern.kind, *(self.at_slot + s for s, _ in pattern.pieces)]
            self._column(0.0, rows, [1.0, *(-float(many) for _, many in pattern.pieces)])
        self._add(of.chosen)
        for model, times in of.multipliers:
            self._cut(model, times)

    def _column(self, cost: float, rows: list[int], values: list[float]) -> None:
        self.program.addCol(cost, 0.0, highspy.kHighsInf, len(rows), rows, values)

    def _pooled(self) -> None:
        """Of what is asked of each model, the part that each mode of the pool carries."""
        self.parts = np.minimum(self.of.carried / self.rates, 1.0)
        self.taken = np.zeros(len(self.parts), dtype=bool)
        self.taken[self.columns] = True

    def _add(self, numbers: Sequence[int]) -> None:
        for n in numbers:
            own = self.parts[n]
            models = np.flatnonzero(own).tolist()
            steps = [(c, math.ceil(times * own[i])) for c, (i, times) in enumerate(self.cuts) if own[i] > 0]
            rows = [self.at_slot + int(self.of.slot[n]), *(self.at_model + i for i in models)]
            self._column(
                0.0,
                rows + [self.at_cut + c for c, _ in steps],
                [1.0, *own[models].tolist(), *(float(step) for _, step in steps)],
            )
        self.columns += numbers
        self.taken[list(numbers)] = True

    def _cut(self, model: int, times: float) -> None:
        steps = np.ceil(times * self.parts[self.columns, model])
        able = np.flatnonzero(steps)
        columns = (able + 1 + len(self.of.patterns)).tolist()
        self.program.addRow(float(math.ceil(times)), highspy.kHighsInf, len(able), columns, steps[able].tolist())
        self.cuts.append((model, times))

    def run(self) -> None:
        self.program.run()
        optimal = self.program.getModelStatus() == highspy.HighsModelStatus.kOptimal
        self.value = float(self.program.getInfo().objective_function_value) if optimal else None
        solution = self.program.getSolution()
        self.used = np.array(solution.col_value)[1 + len(self.of.patterns) :]
        self.duals: Array = np.array(solution.row_dual)

    def prices(self) -> Array:
        """Of a partition on each slot."""
        price: Array = np.maximum(-self.duals[self.at_slot : self.at_model], 0.0)
        return price

    def worth(self) -> DualPrices:
        """What carrying models is worth at these prices."""
        whole = np.maximum(self.duals[self.at_model : self.at_cut], 0.0)
        values = self.duals[self.at_cut :].tolist()
        steps = [StepValue(i, times, value) for (i, times), value in zip(self.cuts, values, strict=True) if value > 0]
        return DualPrices(self.rates, whole, steps)

    def take(self, prices: Array) -> bool:
        """Take in the modes of the pool that are worth most beyond their price. Whether there are any."""
        worth = self.worth()
        price = prices[self.of.slot] * (1 + REL_GAP) + NEAR_ZERO
        value = self.parts @ worth.whole
        for step in worth.steps:
            value += step.value * np.ceil(step.times * self.parts[:, step.model])
        able = np.flatnonzero((value > price) & ~self.taken)
        fresh = able[np.argsort(-(value / price)[able], kind="stable")][:MAX_COLUMNS_PER_ROUND].tolist()
        self.of.chosen += fresh
        self._add(fresh)
        return bool(fresh)

    def extend(self, modes: Sequence[Mode]) -> None:
        """Take in modes that were not in the pool."""
        fresh = self.of.extend(modes)
        self.of.chosen += fresh
        self._pooled()
        self._add(fresh)

    def cut(self) -> bool:
        """Add for each model the cut that what is used breaks most. Whether there are any."""
        before = len(self.cuts)
        active = np.flatnonzero(self.used > NEAR_ZERO)
        carried = self.parts[np.array(self.columns)[active]]
        for i, parts in enumerate(carried.T):
            known = np.unique(np.round(parts[parts > 0], 9))
            times = (np.arange(1, MAX_CUT_NUMERATOR + 1)[:, None] / known).ravel() * (1 - REL_MULTIPLIER_SLACK)
            times = times[times <= MAX_CUT_MULTIPLIER]
            if len(times):
                least = np.ceil(times)
                short = 1 - np.ceil(times[:, None] * parts) @ self.used[active] / least
                n = int(short.argmax())
                if short[n] > MIN_CUT_VIOLATION:
                    self._cut(i, float(times[n]))
                    self.of.multipliers.append((i, float(times[n])))
        return len(self.cuts) > before
