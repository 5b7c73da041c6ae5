"""Share among all searches for a plan of one problem: slots, modes, patterns, relaxation and bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.geometry.bounding import BoundSolver
from cotenant.planners.geometry.budget import Deadline, WorkBudget
from cotenant.planners.geometry.cutting_patterns import CuttingPattern, enumerate_patterns, most_valuable_pattern
from cotenant.planners.geometry.device_assembly import current_devices
from cotenant.planners.geometry.interference import least_slowdown_factors, slowdown_factors
from cotenant.planners.geometry.modes import Mode, ModeCatalog, partition_sizes
from cotenant.planners.geometry.program import MilpInstance, MilpSolution, solve_milp

Array = NDArray[np.float64]

MAX_MODELS_FOR_PAIRS = 12  # models up to which all pairs are considered
MAX_MODELS_TO_TIGHTEN = 24  # models up to which the bound is tightened
MAX_DEVICES_TO_TIGHTEN = 300  # devices beyond which time-shared partitions are too few to tighten the bound
MAX_DEMAND_ROUNDS = 5  # of tightening the bound on a multiple by the demand that it leaves
MIN_DEMAND_GAIN = 1e-3  # relative, below which they end
PAIRS_SHARE = 0.2  # of the time that is left, to enumerate modes of two models
BOUND_SHARE = 0.25  # of the time limit, for a bound tighter than the relaxation's
SLOWDOWN_QUANTILES = (1.0, 0.5)  # quantiles of possible slowdowns to plan with, besides the least
SHARE_GRID = 100  # ‰: where legal shares are very many, plans use multiples of this
SECONDS_PER_MODEL_AND_SLOT = 3e-5  # of work, to list the options of models
MAX_PLANNED_DEVICES = 100_000  # of which a plan takes some seconds
MIN_PRICE, MAX_PRICE = 1e-2, 1e4  # of a device, between which solvers take prices as they are
NEAR_ZERO_SHARE = 1e-3  # ‰ of all devices that the relaxation uses of a size, below which it counts as unused


class PlanningContext:
    """Hold everything about a problem that stays fixed during the search for plans.

    names: models with a rate that some share can serve within target; rates: theirs. singles: for each slot and model
    the mode of highest rate. usable_slots: those that have modes; planning_slots: those of them that plans use. prices:
    of a device of each kind, in `price_unit`. memory_limits: bytes of a device of each kind, where its partitions share
    them and could need more, else None.
    patterns, relaxation: what bounds every plan. priced_kinds: those with too many patterns to enumerate.
    """

    def __init__(self, problem: Problem, deadline: Deadline | None = None) -> None:
        self.problem = problem
        self.budget = WorkBudget(problem, deadline)
        self.fleet = problem.fleet
        self.slots = partition_sizes(problem)
        requested = [name for name, rate in problem.rates.items() if rate > 0]
        self.catalog = self._catalog(requested, None)
        self.singles = self.catalog.single_model_modes(low_memory=False)
        self.names = [requested[i] for i in sorted({mode.models[0] for mode in self.singles})]
        # Where some model cannot be served at all, no multiple of the rates can: serve the others at their rates.
        self.has_unservable = len(self.names) < len(requested)
        self.maximize_scale = problem.objective == "rate" and not self.has_unservable
        self.rates = np.array([problem.rates[name] for name in self.names])
        if self.has_unservable:
            self.catalog = self._catalog(self.names, None)
            self.singles = self.catalog.single_model_modes(low_memory=False)
        usable_slots = {mode.slot for mode in self.singles}
        self.usable_slots = [s for s in range(len(self.slots)) if s in usable_slots]
        largest_memory = max((mode.memory for mode in self.singles), default=0)
        # Memory cannot limit where a largest worker fits for each partition, and one more for each model.
        workers = [WHOLE // min(kind.cuts) + len(self.names) for kind in self.fleet]
        self.memory_limits = [
            None if kind.geometry or largest_memory * many <= kind.memory else kind.memory
            for kind, many in zip(self.fleet, workers, strict=True)
        ]
        prices = [kind.price for kind in self.fleet if kind.price is not None]
        self.price_unit = _price_unit(prices)
        # A kind without a price is the last choice where others have one.
        unknown = 2 * max(prices) if prices and max(prices) > 0 else 1.0
        self.prices = [(unknown if kind.price is None else kind.price) / self.price_unit for kind in self.fleet]
        self.counts = [math.inf if kind.count is None else float(kind.count) for kind in self.fleet]

        every = self.single_model_modes(self.catalog) if any(self.memory_limits) else self.singles
        self.relaxation_modes = every if self.maximize_scale else self.catalog.with_demand(every, self.rates)
        self.current_devices = current_devices(problem, self.slots, self.names)
        self.patterns: list[CuttingPattern] = []
        self.planning_slots = self.usable_slots
        self._build_patterns()
        self.relaxation = (
            self._bounding_relaxation(self.instance(maximize_scale=self.maximize_scale))
            if self.has_finite_optimum()
            else None
        )
        self._refuse_too_many_devices()
        self._limit_scaled_demand()
        if self.names and self.relaxation is None and not self.maximize_scale and math.inf in self.counts:
            # Where limited kinds do not suffice, consider no more of unlimited ones than would serve everything.
            unlimited = self._bounding_relaxation(self.instance(maximize_scale=False, unlimited=True))
            most = math.ceil(sum(unlimited.patterns)) + 1 if unlimited is not None else 1
            self.counts = [min(count, most) for count in self.counts]

    def _refuse_too_many_devices(self) -> None:
        """Raise PlanError where more devices are needed than a plan may list."""
        needed = 0.0 if self.relaxation is None or self.maximize_scale else sum(self.relaxation.patterns)
        if needed > MAX_PLANNED_DEVICES:
            rate, name = max((self.problem.rates[name], name) for name in self.names)
            raise PlanError(
                f"the rates need some {needed:.2g} devices, and a plan lists {MAX_PLANNED_DEVICES:,} at most; the "
                f"highest rate is {rate:.3g} requests/s, of {name}: lower it, or give each kind a count"
            )

    def _catalog(self, names: Sequence[str], slowdowns: Array | None) -> ModeCatalog:
        self.budget.spend(SECONDS_PER_MODEL_AND_SLOT * len(names) * len(self.slots))
        return ModeCatalog(
            self.problem, names, self.slots, np.ones((len(self.slots), len(names))) if slowdowns is None else slowdowns
        )

    @cached_property
    def catalogs(self) -> list[ModeCatalog]:
        """Return catalogs for different assumptions about interference; one if slowdowns do not depend on plans."""
        if not self.problem.interference.interferes:
            return [self.catalog]
        factors = [
            slowdown_factors(self.problem, self.slots, self.names, self.singles, quantile)
            for quantile in SLOWDOWN_QUANTILES
        ]
        if (factors[0] == self.least_slowdowns).all():
            return [self._catalog(self.names, self.least_slowdowns)]
        return [self._catalog(self.names, each) for each in (*factors, self.least_slowdowns)]

    @cached_property
    def least_slowdowns(self) -> Array:
        return least_slowdown_factors(self.problem, self.slots, self.names, self.singles)

    def has_finite_optimum(self) -> bool:
        return bool(self.names) and not (self.maximize_scale and math.inf in self.counts)

    def instance(self, *, maximize_scale: bool, rates: Array | None = None, unlimited: bool = False) -> MilpInstance:
        return MilpInstance(
            rates=self.rates if rates is None else rates,
            counts=[math.inf] * len(self.counts) if unlimited else self.counts,
            prices=self.prices,
            memory_limits=self.memory_limits,
            maximize_scale=maximize_scale,
        )

    def planning_patterns(self) -> list[CuttingPattern]:
        """Return the patterns that plans use: those of other slots would leave devices empty."""
        planned = set(self.planning_slots)
        return [pattern for pattern in self.patterns if all(s in planned for s, _ in pattern.pieces)]

    def solve_relaxation(self, instance: MilpInstance, modes: Sequence[Mode]) -> MilpSolution | None:
        """Solve the linear relaxation; None where it is infeasible."""
        return solve_milp(instance, self.slots, self.patterns, modes, budget=self.budget)

    def _build_patterns(self) -> None:
        """Enumerate the patterns of every kind; where there are too many, generate them by pricing."""
        self.priced_kinds: list[int] = []
        for k, kind in enumerate(self.fleet):
            enumerated = enumerate_patterns(k, kind, self.slots, self.usable_slots)
            if enumerated is None:
                self.priced_kinds.append(k)
                max_partitions = kind.max_partitions or WHOLE
                own = [s for s in self.usable_slots if self.slots[s].kind == k]
                enumerated = [CuttingPattern(k, ((s, min(WHOLE // self.slots[s].share, max_partitions)),)) for s in own]
            self.patterns += enumerated
        relaxation = (
            self._bounding_relaxation(self.instance(maximize_scale=False, unlimited=True))
            if self.priced_kinds
            else None
        )
        if relaxation is not None:
            self._restrict_slots(relaxation)

    def _restrict_slots(self, relaxation: MilpSolution) -> None:
        """Restrict plans on kinds with very many patterns to shares of which all patterns can be enumerated: those that
        the relaxation uses most, and a grid."""
        used = np.zeros(len(self.slots))
        for mode, many in zip(self.relaxation_modes, relaxation.modes, strict=True):
            used[mode.slot] += many * self.slots[mode.slot].share
        kept = {s for s in self.usable_slots if self.slots[s].kind not in self.priced_kinds}
        for k in self.priced_kinds:
            own = [s for s in self.usable_slots if self.slots[s].kind == k]
            grid = [s for s in own if self.slots[s].share % SHARE_GRID == 0]
            by_use = [s for s in sorted(own, key=lambda s: -used[s]) if used[s] > NEAR_ZERO_SHARE]
            patterns: list[CuttingPattern] = []
            chosen: list[int] = []
            for s in dict.fromkeys([*grid[-1:], *by_use, *grid]):
                enumerated = enumerate_patterns(k, self.fleet[k], self.slots, sorted([*chosen, s]))
                if enumerated is not None:
                    chosen, patterns = [*chosen, s], enumerated
            kept.update(chosen)
            self.patterns += [each for each in patterns if each not in self.patterns]
        self.planning_slots = [s for s in self.usable_slots if s in kept]

    # The bound.

    def _limit_scaled_demand(self) -> None:
        """Tighten the bound on the multiple of the rates: no plan serves more of a model than that multiple."""
        for _ in range(MAX_DEMAND_ROUNDS if self.maximize_scale else 0):
            if self.relaxation is None:
                break
            before = self.relaxation.value
            self.relaxation_modes = self.catalog.with_demand(self.relaxation_modes, before * self.rates)
            self.relaxation = self._bounding_relaxation(self.instance(maximize_scale=True))
            if self.relaxation is None or self.relaxation.value > before * (1 - MIN_DEMAND_GAIN):
                break

    def bound(self) -> float | None:
        """Return a proven bound on the objective; with too few devices, on how many are needed; None if unbounded."""
        if self.has_unservable and self.problem.objective == "rate":
            return 0.0
        if not self.has_finite_optimum():
            return None
        instance, relaxation = self.instance(maximize_scale=self.maximize_scale), self.relaxation
        if relaxation is None:
            instance = self.instance(maximize_scale=self.maximize_scale, unlimited=True)
            relaxation = self._bounding_relaxation(instance)
            if relaxation is None:
                return None
        bound_value = self._with_whole_devices(instance, relaxation.value)
        if (
            self.problem.bounded
            and sum(relaxation.patterns) <= MAX_DEVICES_TO_TIGHTEN
            and self.bound_solver is not None
        ):
            if self.maximize_scale:
                bound_value = self.bound_solver.scale_bound(self.rates, instance.counts, bound_value)
            else:
                bound_value = self.bound_solver.cost_bound(self.rates, instance.counts, self.prices, bound_value)
        if self.maximize_scale:
            return bound_value
        if all(kind.price is not None for kind in self.fleet):
            return bound_value * self.price_unit
        # With unpriced devices among priced ones the cost has no meaningful bound.
        return None if any(kind.price is not None for kind in self.fleet) else float(math.ceil(bound_value - 1e-6))

    @cached_property
    def bound_solver(self) -> BoundSolver | None:
        """Return a solver for bounds tighter than the relaxation's; None where it would take too long."""
        if len(self.names) > MAX_MODELS_TO_TIGHTEN or self.planning_slots != self.usable_slots:
            return None
        modes = list(self.singles)
        if len(self.names) <= MAX_MODELS_FOR_PAIRS:
            modes += self.catalog.pair_frontiers(self.usable_slots, self.budget.part(PAIRS_SHARE))
        return BoundSolver(self.catalog, self.usable_slots, self.patterns, modes, self.budget.part(BOUND_SHARE))

    def proves_infeasible(self) -> bool:
        """Return whether the devices cannot serve the rates; with interference this is not a strict proof.

        See `least_slowdown_factors` for what it then assumes.
        """
        bound_solver = self.bound_solver
        if bound_solver is None or self.relaxation is None or sum(self.relaxation.patterns) > MAX_DEVICES_TO_TIGHTEN:
            return False
        if self.problem.interference.interferes and all(kind.cuts[-1] == WHOLE for kind in self.fleet):
            # The least slowdowns assume a co-located partition: one without may as well have the whole device.
            catalog = self._catalog(self.names, self.least_slowdowns)
            bound_solver = BoundSolver(
                catalog,
                self.usable_slots,
                self.patterns,
                catalog.single_model_modes(low_memory=False),
                self.budget.part(BOUND_SHARE),
            )
        return bound_solver.proves_infeasible(self.rates, self.counts)

    def may_serve(self) -> bool:
        """Return whether the relaxation is feasible with the least slowdowns."""
        if self.has_unservable or (self.names and self.relaxation is None):
            return False
        if not self.names or not self.problem.interference.interferes:
            return True
        catalog = self._catalog(self.names, self.least_slowdowns)
        return self.solve_relaxation(self.instance(maximize_scale=False), self.single_model_modes(catalog)) is not None

    def planning_modes(self, catalog: ModeCatalog) -> list[Mode]:
        """Return the single-model modes on the slots that plans use."""
        return [mode for mode in self.single_model_modes(catalog) if mode.slot in self.planning_slots]

    def single_model_modes(self, catalog: ModeCatalog) -> list[Mode]:
        return catalog.single_model_modes(low_memory=any(self.memory_limits))

    def _bounding_relaxation(self, instance: MilpInstance) -> MilpSolution | None:
        """Solve the relaxation that bounds every plan, generating patterns of `priced_kinds` until none improves it."""
        while True:
            relaxation = self.solve_relaxation(instance, self.relaxation_modes)
            if relaxation is None:
                return None
            new_patterns = [
                pattern
                for k in self.priced_kinds
                if (pattern := self._priced_pattern(k, instance, relaxation)) is not None
            ]
            if not new_patterns:
                return relaxation
            self.patterns += new_patterns

    def _with_whole_devices(self, instance: MilpInstance, value: float) -> float:
        """Return the bound of the relaxation with whole devices of each kind, where all of their patterns are known."""
        if instance.maximize_scale or self.priced_kinds:
            return value
        whole = solve_milp(
            instance, self.slots, self.patterns, self.relaxation_modes, budget=self.budget, whole_devices=True
        )
        return value if whole is None else max(value, whole.bound)

    def _priced_pattern(self, k: int, instance: MilpInstance, relaxation: MilpSolution) -> CuttingPattern | None:
        """Return the most valuable pattern of a kind if its reduced cost is negative and it is new, else None."""
        value, best = most_valuable_pattern(k, self.fleet[k], self.slots, relaxation.slot_duals)
        costs = (
            (0.0 if instance.maximize_scale else self.prices[k])
            + relaxation.device_duals[k]
            - relaxation.memory_duals[k]
        )
        return best if value > costs + 1e-7 * max(value, 1e-12) and best not in self.patterns else None

    def estimated_devices(self) -> float:
        """Return the number of devices in the relaxation, or the whole fleet where the rates are to be scaled."""
        if self.relaxation is None or self.maximize_scale:
            return sum(self.counts)
        return float(sum(self.relaxation.patterns))

    def cost(self, counts: Sequence[int]) -> float:
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))


def _price_unit(prices: Sequence[float]) -> float:
    """Return the unit in which prices are counted: 1 where they are of ordinary size. Solvers' tolerances are absolute,
    and of prices of a millionth they leave nothing."""
    positive = [price for price in prices if price > 0]
    ordinary = not positive or (min(positive) >= MIN_PRICE and max(positive) <= MAX_PRICE)
    return 1.0 if ordinary else max(positive)
