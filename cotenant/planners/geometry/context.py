"""What plans of a problem are made of, and what bounds them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.geometry.bounding import BoundSolver
from cotenant.planners.geometry.cutting_patterns import CuttingPattern, enumerate_patterns, most_valuable_pattern
from cotenant.planners.geometry.device_assembly import current_devices
from cotenant.planners.geometry.interference import least_slowdown_factors, slowdown_factors
from cotenant.planners.geometry.modes import Mode, ModeCatalog, partition_sizes
from cotenant.planners.geometry.program import MilpInstance, MilpSolution, solve_milp

Array = NDArray[np.float64]

MAX_MODELS_FOR_PAIRS = 12  # models whose pairs are all looked at
MAX_DEVICES_TO_TIGHTEN = 40  # devices beyond which partitions shared in time are too few to tighten the bound
SLOWDOWN_QUANTILES = (1.0, 0.5)  # of what neighbours may do, those that are reckoned with besides the least
SHARE_GRID = 100  # ‰: of very many shares, those that are multiples of it


class PlanningContext:
    """What stays the same while plans are looked for. names: models that some share can serve in time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fleet = problem.fleet
        self.slots = partition_sizes(problem)
        asked = [name for name, rate in problem.rates.items() if rate > 0]
        self.catalog = self._catalog(asked, None)
        self.singles = self.catalog.single_model_modes(low_memory=False)
        self.names = [asked[i] for i in sorted({mode.models[0] for mode in self.singles})]
        # Where some model cannot be served at all no multiple is: the others get the rates that they ask for.
        self.has_unservable = len(self.names) < len(asked)
        self.maximize_scale = problem.objective == "rate" and not self.has_unservable
        self.rates = np.array([problem.rates[name] for name in self.names])
        if self.has_unservable:
            self.catalog = self._catalog(self.names, None)
            self.singles = self.catalog.single_model_modes(low_memory=False)
        usable_slots = {mode.slot for mode in self.singles}
        self.usable_slots = [s for s in range(len(self.slots)) if s in usable_slots]
        heaviest = max((mode.memory for mode in self.singles), default=0)
        # Memory is no question where one of the heaviest workers fits for each partition, and for each model one more.
        workers = [WHOLE // min(kind.cuts) + len(self.names) for kind in self.fleet]
        self.memory_limits = [
            None if kind.geometry or heaviest * many <= kind.memory else kind.memory
            for kind, many in zip(self.fleet, workers, strict=True)
        ]
        prices = [kind.price for kind in self.fleet if kind.price is not None]
        # A kind without a price, beside others that have one, comes last.
        unknown = 2 * max(prices) if prices and max(prices) > 0 else 1.0
        self.prices = [unknown if kind.price is None else kind.price for kind in self.fleet]
        self.counts = [math.inf if kind.count is None else float(kind.count) for kind in self.fleet]
        # What bounds every plan: modes of one model, and where memory is a question, lighter ones.
        self.relaxation_modes = self.single_model_modes(self.catalog) if any(self.memory_limits) else self.singles
        self.current_devices = current_devices(problem, self.slots, self.names)
        self.patterns: list[CuttingPattern] = []
        self.planning_slots = self.usable_slots
        self._cut()
        self.relaxation = (
            self._bounding_relaxation(self.instance(scale=self.maximize_scale)) if self.has_finite_optimum() else None
        )
        if self.names and self.relaxation is None and not self.maximize_scale and math.inf in self.counts:
            # Some kind is too few: of those without end no more than would do for all.
            endless = self._bounding_relaxation(self.instance(scale=False, endless=True))
            most = math.ceil(sum(endless.patterns)) + 1 if endless is not None else 1
            self.counts = [min(count, most) for count in self.counts]

    def _catalog(self, names: Sequence[str], slow: Array | None) -> ModeCatalog:
        """What these models may do beside neighbours that slow them so, or without any."""
        return ModeCatalog(
            self.problem, names, self.slots, np.ones((len(self.slots), len(names))) if slow is None else slow
        )

    @cached_property
    def catalogs(self) -> list[ModeCatalog]:
        """What to choose from, with different guesses of what neighbours do; one where that is known."""
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
        """A factor on the latencies of each model on each slot: the least that neighbours may do."""
        return least_slowdown_factors(self.problem, self.slots, self.names, self.singles)

    def has_finite_optimum(self) -> bool:
        return bool(self.names) and not (self.maximize_scale and math.inf in self.counts)

    def instance(self, *, scale: bool, rates: Array | None = None, endless: bool = False) -> MilpInstance:
        return MilpInstance(
            rates=self.rates if rates is None else rates,
            counts=[math.inf] * len(self.counts) if endless else self.counts,
            prices=self.prices,
            memory_limits=self.memory_limits,
            scale=scale,
        )

    def solve_relaxation(self, instance: MilpInstance, modes: Sequence[Mode]) -> MilpSolution | None:
        """The linear relaxation: quick, and nothing goes without it."""
        return solve_milp(instance, self.slots, self.patterns, modes, whole=False)[0]

    def _cut(self) -> None:
        """Cuttings of every kind; where there are too many, those that the relaxation asks for."""
        self.sampled: list[int] = []
        for k, kind in enumerate(self.fleet):
            every = enumerate_patterns(k, kind, self.slots, self.usable_slots)
            if every is None:
                self.sampled.append(k)
                most = kind.max_partitions or WHOLE
                own = [s for s in self.usable_slots if self.slots[s].kind == k]
                every = [CuttingPattern(k, ((s, min(WHOLE // self.slots[s].share, most)),)) for s in own]
            self.patterns += every
        relaxation = self._bounding_relaxation(self.instance(scale=False, endless=True)) if self.sampled else None
        if relaxation is not None:
            self._thin(relaxation)

    def _thin(self, relaxation: MilpSolution) -> None:
        """Of kinds that may be cut in very many ways, plans use the shares that the relaxation does and a grid."""
        used = {mode.slot for mode, n in zip(self.relaxation_modes, relaxation.modes, strict=True) if n > 1e-6}
        grid = {s for s in self.usable_slots if self.slots[s].share % SHARE_GRID == 0}
        self.planning_slots = [
            s for s in self.usable_slots if self.slots[s].kind not in self.sampled or s in used | grid
        ]
        for k in self.sampled:
            every = enumerate_patterns(k, self.fleet[k], self.slots, self.planning_slots)
            self.patterns += [each for each in every or () if each not in self.patterns]

    # The bound.

    def bound(self) -> float | None:
        """What no sound plan can beat. With too few devices, how many there would have to be."""
        if self.has_unservable and self.problem.objective == "rate":
            return 0.0
        if not self.has_finite_optimum():
            return None
        instance, relaxation = self.instance(scale=self.maximize_scale), self.relaxation
        if relaxation is None:
            instance = self.instance(scale=self.maximize_scale, endless=True)
            relaxation = self._bounding_relaxation(instance)
            if relaxation is None:
                return None
        limit = relaxation.value
        if (
            self.problem.bounded
            and sum(relaxation.patterns) <= MAX_DEVICES_TO_TIGHTEN
            and self.bound_solver is not None
        ):
            if self.maximize_scale:
                limit = self.bound_solver.largest(self.rates, instance.counts, limit)
            else:
                limit = self.bound_solver.cheapest(self.rates, instance.counts, self.prices, limit)
        if self.maximize_scale or all(kind.price is not None for kind in self.fleet):
            return limit
        # A cost to which some devices add nothing has no bound worth the name.
        return None if any(kind.price is not None for kind in self.fleet) else float(math.ceil(limit - 1e-6))

    @cached_property
    def bound_solver(self) -> BoundSolver | None:
        """What bounds every plan closer than the relaxation does; None where that would take too long."""
        if len(self.names) > MAX_MODELS_FOR_PAIRS or self.planning_slots != self.usable_slots:
            return None
        modes = [*self.singles, *self.catalog.pair_frontiers(self.usable_slots)]
        return BoundSolver(self.catalog, self.usable_slots, self.patterns, modes)

    def proves_infeasible(self) -> bool:
        """Whether the devices cannot serve the rates: proven, or where neighbours matter as good as that."""
        bound_solver = self.bound_solver
        if bound_solver is None or self.relaxation is None or sum(self.relaxation.patterns) > MAX_DEVICES_TO_TIGHTEN:
            return False
        if self.problem.interference.interferes and all(kind.cuts[-1] == WHOLE for kind in self.fleet):
            # A partition that has no neighbour may as well have the whole device.
            catalog = self._catalog(self.names, self.least_slowdowns)
            bound_solver = BoundSolver(
                catalog, self.usable_slots, self.patterns, catalog.single_model_modes(low_memory=False)
            )
        return bound_solver.proves_infeasible(self.rates, self.counts)

    def planning_modes(self, catalog: ModeCatalog) -> list[Mode]:
        """Modes of one model, for plans."""
        return [mode for mode in self.single_model_modes(catalog) if mode.slot in self.planning_slots]

    def single_model_modes(self, catalog: ModeCatalog) -> list[Mode]:
        return catalog.single_model_modes(low_memory=any(self.memory_limits))

    def _bounding_relaxation(self, instance: MilpInstance) -> MilpSolution | None:
        """The relaxation that bounds every plan: of cuttings that are not all there, with those that it asks for."""
        while True:
            relaxation = self.solve_relaxation(instance, self.relaxation_modes)
            if relaxation is None:
                return None
            asked = [pattern for k in self.sampled if (pattern := self._asked(k, instance, relaxation)) is not None]
            if not asked:
                return relaxation
            self.patterns += asked

    def _asked(self, k: int, instance: MilpInstance, relaxation: MilpSolution) -> CuttingPattern | None:
        """The cutting of a kind that is worth most beyond what a device costs, if any is."""
        worth, best = most_valuable_pattern(k, self.fleet[k], self.slots, relaxation.slot_duals)
        costs = (0.0 if instance.scale else self.prices[k]) + relaxation.device_duals[k] - relaxation.memory_duals[k]
        return best if worth > costs + 1e-7 * max(worth, 1e-12) and best not in self.patterns else None

    def estimated_devices(self) -> float:
        """About how many there will be."""
        if self.relaxation is None or self.maximize_scale:
            return sum(self.counts)
        return float(sum(self.relaxation.patterns))

    def cost(self, counts: Sequence[int]) -> float:
        """Of so many devices of each kind."""
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))
