"""What plans of a problem are made of, and what bounds them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.geometry import cutting_patterns as ways
from cotenant.planners.geometry.bounding import BoundSolver
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.device_assembly import current_devices
from cotenant.planners.geometry.interference import least_slowdown_factors, slowdown_factors
from cotenant.planners.geometry.modes import Mode, ModeCatalog, partition_sizes
from cotenant.planners.geometry.program import MilpInstance, MilpSolution, solve_milp
from cotenant.predictors import NoInterference

Array = NDArray[np.float64]

FEW = 12  # models whose pairs are all looked at
MANY = 40  # devices beyond which partitions shared in time are too few to tighten the bound
QUANTILES = (1.0, 0.5)  # of what neighbours may do, those that are reckoned with besides the least
GRID = 100  # ‰: of very many shares, those that are multiples of it


class PlanningContext:
    """What stays the same while plans are looked for. names: models that some share can serve in time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fleet = problem.fleet
        self.slots = partition_sizes(problem)
        asked = [name for name, rate in problem.rates.items() if rate > 0]
        self.menu = self._menu(asked, None)
        self.singles = self.menu.singles(light=False)
        self.names = [asked[i] for i in sorted({mode.models[0] for mode in self.singles})]
        # Where some model cannot be served at all no multiple is: the others get the rates that they ask for.
        self.hopeless = len(self.names) < len(asked)
        self.scale = problem.objective == "rate" and not self.hopeless
        self.rates = np.array([problem.rates[name] for name in self.names])
        if self.hopeless:
            self.menu = self._menu(self.names, None)
            self.singles = self.menu.singles(light=False)
        useful = {mode.slot for mode in self.singles}
        self.useful = [s for s in range(len(self.slots)) if s in useful]
        heaviest = max((mode.memory for mode in self.singles), default=0)
        # Memory is no question where one of the heaviest workers fits for each partition, and for each model one more.
        workers = [WHOLE // min(kind.cuts) + len(self.names) for kind in self.fleet]
        self.rooms = [
            None if kind.geometry or heaviest * many <= kind.memory else kind.memory
            for kind, many in zip(self.fleet, workers, strict=True)
        ]
        prices = [kind.price for kind in self.fleet if kind.price is not None]
        # A kind without a price, beside others that have one, comes last.
        unknown = 2 * max(prices) if prices and max(prices) > 0 else 1.0
        self.prices = [unknown if kind.price is None else kind.price for kind in self.fleet]
        self.counts = [math.inf if kind.count is None else float(kind.count) for kind in self.fleet]
        # What bounds every plan: modes of one model, and where memory is a question, lighter ones.
        self.relaxing = self.singles_of(self.menu) if any(self.rooms) else self.singles
        self.standing = current_devices(problem, self.slots, self.names)
        self.cuttings: list[CuttingPattern] = []
        self.planned = self.useful
        self._cut()
        self.relaxed = self._relax(self.ask(scale=self.scale)) if self.limited() else None
        if self.names and self.relaxed is None and not self.scale and math.inf in self.counts:
            # Some kind is too few: of those without end no more than would do for all.
            endless = self._relax(self.ask(scale=False, endless=True))
            most = math.ceil(sum(endless.cuttings)) + 1 if endless is not None else 1
            self.counts = [min(count, most) for count in self.counts]

    def _menu(self, names: Sequence[str], slow: Array | None) -> ModeCatalog:
        """What these models may do beside neighbours that slow them so, or without any."""
        return ModeCatalog(
            self.problem, names, self.slots, np.ones((len(self.slots), len(names))) if slow is None else slow
        )

    @cached_property
    def menus(self) -> list[ModeCatalog]:
        """What to choose from, with different guesses of what neighbours do; one where that is known."""
        if isinstance(self.problem.interference, NoInterference):
            return [self.menu]
        factors = [
            slowdown_factors(self.problem, self.slots, self.names, self.singles, quantile) for quantile in QUANTILES
        ]
        if (factors[0] == self.least).all():
            return [self._menu(self.names, self.least)]
        return [self._menu(self.names, each) for each in (*factors, self.least)]

    @cached_property
    def least(self) -> Array:
        """A factor on the latencies of each model on each slot: the least that neighbours may do."""
        return least_slowdown_factors(self.problem, self.slots, self.names, self.singles)

    def limited(self) -> bool:
        return bool(self.names) and not (self.scale and math.inf in self.counts)

    def ask(self, *, scale: bool, rates: Array | None = None, endless: bool = False) -> MilpInstance:
        return MilpInstance(
            rates=self.rates if rates is None else rates,
            counts=[math.inf] * len(self.counts) if endless else self.counts,
            prices=self.prices,
            rooms=self.rooms,
            scale=scale,
        )

    def linear(self, ask: MilpInstance, modes: Sequence[Mode]) -> MilpSolution | None:
        """The linear relaxation: quick, and nothing goes without it."""
        return solve_milp(ask, self.slots, self.cuttings, modes, whole=False)[0]

    def _cut(self) -> None:
        """Cuttings of every kind; where there are too many, those that the relaxation asks for."""
        self.sampled: list[int] = []
        for k, kind in enumerate(self.fleet):
            every = ways.enumerate_patterns(k, kind, self.slots, self.useful)
            if every is None:
                self.sampled.append(k)
                most = kind.max_partitions or WHOLE
                own = [s for s in self.useful if self.slots[s].kind == k]
                every = [CuttingPattern(k, ((s, min(WHOLE // self.slots[s].share, most)),)) for s in own]
            self.cuttings += every
        relaxed = self._relax(self.ask(scale=False, endless=True)) if self.sampled else None
        if relaxed is not None:
            self._thin(relaxed)

    def _thin(self, relaxed: MilpSolution) -> None:
        """Of kinds that may be cut in very many ways, plans use the shares that the relaxation does and a grid."""
        used = {mode.slot for mode, n in zip(self.relaxing, relaxed.modes, strict=True) if n > 1e-6}
        grid = {s for s in self.useful if self.slots[s].share % GRID == 0}
        self.planned = [s for s in self.useful if self.slots[s].kind not in self.sampled or s in used | grid]
        for k in self.sampled:
            every = ways.enumerate_patterns(k, self.fleet[k], self.slots, self.planned)
            self.cuttings += [each for each in every or () if each not in self.cuttings]

    # The bound.

    def bound(self) -> float | None:
        """What no sound plan can beat. With too few devices, how many there would have to be."""
        if self.hopeless and self.problem.objective == "rate":
            return 0.0
        if not self.limited():
            return None
        ask, relaxed = self.ask(scale=self.scale), self.relaxed
        if relaxed is None:
            ask = self.ask(scale=self.scale, endless=True)
            relaxed = self._relax(ask)
            if relaxed is None:
                return None
        limit = relaxed.value
        if self.problem.bounded and sum(relaxed.cuttings) <= MANY and self.bounding is not None:
            if self.scale:
                limit = self.bounding.largest(self.rates, ask.counts, limit)
            else:
                limit = self.bounding.cheapest(self.rates, ask.counts, self.prices, limit)
        if self.scale or all(kind.price is not None for kind in self.fleet):
            return limit
        # A cost to which some devices add nothing has no bound worth the name.
        return None if any(kind.price is not None for kind in self.fleet) else float(math.ceil(limit - 1e-6))

    @cached_property
    def bounding(self) -> BoundSolver | None:
        """What bounds every plan closer than the relaxation does; None where that would take too long."""
        if len(self.names) > FEW or self.planned != self.useful:
            return None
        modes = [*self.singles, *self.menu.frontiers(self.useful)]
        return BoundSolver(self.menu, self.useful, self.cuttings, modes)

    def refuted(self) -> bool:
        """Whether the devices cannot serve the rates: proven, or where neighbours matter as good as that."""
        bounding = self.bounding
        if bounding is None or self.relaxed is None or sum(self.relaxed.cuttings) > MANY:
            return False
        if not isinstance(self.problem.interference, NoInterference) and all(
            kind.cuts[-1] == WHOLE for kind in self.fleet
        ):
            # A partition that has no neighbour may as well have the whole device.
            menu = self._menu(self.names, self.least)
            bounding = BoundSolver(menu, self.useful, self.cuttings, menu.singles(light=False))
        return bounding.refutes(self.rates, self.counts)

    def ones(self, menu: ModeCatalog) -> list[Mode]:
        """Modes of one model, for plans."""
        return [mode for mode in self.singles_of(menu) if mode.slot in self.planned]

    def singles_of(self, menu: ModeCatalog) -> list[Mode]:
        return menu.singles(light=any(self.rooms))

    def _relax(self, ask: MilpInstance) -> MilpSolution | None:
        """The relaxation that bounds every plan: of cuttings that are not all there, with those that it asks for."""
        while True:
            relaxed = self.linear(ask, self.relaxing)
            if relaxed is None:
                return None
            asked = [cutting for k in self.sampled if (cutting := self._asked(k, ask, relaxed)) is not None]
            if not asked:
                return relaxed
            self.cuttings += asked

    def _asked(self, k: int, ask: MilpInstance, relaxed: MilpSolution) -> CuttingPattern | None:
        """The cutting of a kind that is worth most beyond what a device costs, if any is."""
        worth, best = ways.most_valuable_pattern(k, self.fleet[k], self.slots, relaxed.price)
        costs = (0.0 if ask.scale else self.prices[k]) + relaxed.more[k] - relaxed.room[k]
        return best if worth > costs + 1e-7 * max(worth, 1e-12) and best not in self.cuttings else None

    def about(self) -> float:
        """About how many there will be."""
        if self.relaxed is None or self.scale:
            return sum(self.counts)
        return float(sum(self.relaxed.cuttings))

    def cost(self, counts: Sequence[int]) -> float:
        """Of so many devices of each kind."""
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))
