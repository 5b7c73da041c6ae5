"""Geometry: an integer program over ways to cut devices and modes of partitions, with a proven bound.

DESIGN.md, Planners. How many devices get each cutting, and how many partitions of each share run each mode, so that no
more partitions are used than cut and the rates are met: with the fewest devices, at the least price, or for the largest
common multiple of the rates. The program's size depends on models, shares and kinds, not on how many devices there are.

1. Modes of one model give the linear relaxation, and with it the bound (see modes.py). Where models are few, modes of
   pairs say what time-sharing costs, and whole numbers of partitions tighten it.
2. Sets of models that may share a partition: pairs, those that fill a partition best at the relaxation's prices, and
   those of the plan in force and of the papers' planner. A first program picks sets, any average of whose modes it may
   use; a second picks among single modes of those sets.
3. Devices are composed, neighbours paired so that they slow each other least, and every promise is checked.

Neighbours slow each other, which the program does not see: latencies are multiplied by what the worst neighbour may do,
or a part of that, and what results is checked with the neighbours that are really there. The bound counts no slowdown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Device, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem, elastic
from cotenant.planners.capacity import SLACK, accounted, partitions
from cotenant.planners.geometry import cuttings as ways
from cotenant.planners.geometry.cuttings import Cutting
from cotenant.planners.geometry.layout import Group, cuts, lay, pair
from cotenant.planners.geometry.modes import Menu, Mode, slots_of
from cotenant.planners.geometry.program import Answer, Ask, solve
from cotenant.predictors import Alone, Load

Array = NDArray[np.float64]

FEW = 12  # models whose pairs are all looked at
FOLDS = (1.0, 0.5, 0.0)  # of the worst that neighbours may do, the part that is reckoned with
NEAR = 0.85  # sets of models are looked at that are worth this part of what their partition costs
SETS = 150  # at most


def plan(problem: Problem) -> Plan:
    return _Search(problem).plan()


def bound(problem: Problem) -> float | None:
    """What no sound plan can beat: the least devices or cost, or the largest multiple of the rates.

    None where there is no limit, or nothing that can be served.
    """
    return _Search(problem).bound()


class _Search:
    """What stays the same while plans are looked for. names: models that some share can serve in time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fleet = problem.fleet
        self.slots = slots_of(problem)
        asked = [name for name, rate in problem.rates.items() if rate > 0]
        everyone = Menu(problem, asked, self.slots, np.ones((len(self.slots), len(asked))))
        self.names = [asked[i] for i in sorted({mode.models[0] for mode in everyone.singles(light=False)})]
        self.rates = np.array([problem.rates[name] for name in self.names])
        self.menu = Menu(problem, self.names, self.slots, np.ones((len(self.slots), len(self.names))))
        self.singles = self.menu.singles(light=False)
        self.useful = [s in {mode.slot for mode in self.singles} for s in range(len(self.slots))]
        heaviest = max((mode.memory for mode in self.singles), default=0)
        # Memory is no question where as many of the heaviest workers as there can be partitions fit.
        self.rooms = [
            None if kind.geometry or heaviest * (WHOLE // min(kind.cuts)) <= kind.memory else kind.memory
            for kind in self.fleet
        ]
        self.tight = any(self.rooms)
        prices = [kind.price for kind in self.fleet if kind.price is not None]
        # A kind without a price, beside others that have one, comes last.
        unknown = 2 * max(prices) if prices and max(prices) > 0 else 1.0
        self.prices = [unknown if kind.price is None else kind.price for kind in self.fleet]
        self.counts = [math.inf if kind.count is None else float(kind.count) for kind in self.fleet]
        self.cuttings = self._cut()
        self.seconds = 2.0

    def _ask(self, *, scale: bool, rates: Array | None = None, endless: bool = False) -> Ask:
        return Ask(
            rates=self.rates if rates is None else rates,
            counts=[math.inf] * len(self.counts) if endless else self.counts,
            prices=self.prices,
            rooms=self.rooms,
            scale=scale,
        )

    def _cut(self) -> list[Cutting]:
        """Cuttings of every kind; where there are too many, those that the relaxation asks for."""
        found: list[Cutting] = []
        endless = []
        for k, kind in enumerate(self.fleet):
            every = ways.every(k, kind, self.slots, self.useful)
            if every is None:
                endless.append(k)
                every = [
                    Cutting(k, {s: min(WHOLE // slot.share, kind.max_partitions or WHOLE)})
                    for s, slot in enumerate(self.slots)
                    if slot.kind == k and self.useful[s]
                ]
            found += every
        improved = bool(endless)
        while improved:
            improved = False
            relaxed = solve(self._ask(scale=False, endless=True), self.slots, found, self.singles, whole=False)
            if relaxed is None:
                break
            for k in endless:
                worth, best = ways.dearest(k, self.fleet[k], self.slots, relaxed.price)
                if worth > self.prices[k] * (1 + 1e-6) and best not in found:
                    found.append(best)
                    improved = True
        return found

    def bound(self) -> float | None:
        """See the function of that name."""
        if not self.names:
            return None
        scale = self.problem.objective == "rate"
        if scale and math.inf in self.counts:
            return None
        ask = self._ask(scale=scale)
        relaxed = self._relaxed(ask)
        if relaxed is None:
            # There are too few devices: so many would be needed.
            ask = self._ask(scale=scale, endless=True)
            relaxed = self._relaxed(ask)
            if relaxed is None:
                return None
        limit = relaxed.value
        if len(self.names) <= FEW and sum(relaxed.cuttings) <= 32:
            pairs = self.menu.pairs([s for s, useful in enumerate(self.useful) if useful], outer=True)
            modes = [*self._light_singles(), *pairs]
            groups = [None if len(mode.models) == 1 else mode.slot for mode in modes]
            whole = solve(
                ask,
                self.slots,
                self.cuttings,
                modes,
                groups=groups,
                clip=self.rates * (limit if scale else 1),
                averaged=True,
                nodes=300,
                seconds=self.seconds,
            )
            if whole is not None:
                limit = min(limit, whole.bound) if scale else max(limit, whole.bound)
        if not scale and all(kind.price is None for kind in self.fleet):
            return math.ceil(limit - 1e-6)
        return limit

    def _light_singles(self) -> list[Mode]:
        return self.menu.singles(light=True) if self.tight else self.singles

    def _relaxed(self, ask: Ask) -> Answer | None:
        return solve(ask, self.slots, self.cuttings, self._light_singles(), whole=False)

    # The plan.

    def plan(self) -> Plan:
        limit = self.bound()
        scale = self.problem.objective == "rate"
        best = self._empty()
        if self.names:
            for fold in (0.0,) if isinstance(self.problem.interference, Alone) else FOLDS:
                menu = self.menu if fold == 0 else Menu(self.problem, self.names, self.slots, self._slow(fold))
                candidate = self._plan(menu, scale=scale)
                if candidate is not None and self._better(candidate, best):
                    best = candidate
        return msgspec.structs.replace(best, bound=limit)

    def _empty(self) -> Plan:
        plan = accounted(Plan(planner="geometry", objective=self.problem.objective), self.problem)
        return plan

    def _better(self, one: Plan, other: Plan) -> bool:
        if abs(one.scale - other.scale) > 1e-6:
            return one.scale > other.scale
        return self._price(one) < self._price(other)

    def _price(self, plan: Plan) -> float:
        price = {kind.name: price for kind, price in zip(self.fleet, self.prices, strict=True)}
        return sum(price[device.kind] for device in plan.devices)

    def _plan(self, menu: Menu, *, scale: bool) -> Plan | None:
        if not scale:
            for more in (1.0, 1.01, 1.03):
                found = self._find(menu, self._ask(scale=False, rates=self.rates * more))
                if found is None:
                    break
                plan = self._made(menu, *found, limit=1.0)
                if not plan.unserved.keys() & set(self.names):
                    return plan
        found = self._find(menu, self._ask(scale=True)) if math.inf not in self.counts else None
        return None if found is None else self._made(menu, *found, limit=math.inf if scale else 1.0)

    def _find(self, menu: Menu, ask: Ask) -> tuple[list[tuple[Mode, int]], list[tuple[Cutting, int]]] | None:
        """Modes and cuttings, and how many of each."""
        singles = menu.singles(light=self.tight)
        relaxed = solve(ask, self.slots, self.cuttings, singles, whole=False)
        if relaxed is None:
            return None
        clip = ask.rates * (relaxed.value if ask.scale else 1.0)
        sets = self._sets(menu, ask, singles, clip)
        modes = [*singles, *(mode for chosen in sets.values() for mode in chosen)]
        groups = [*(None for _ in singles), *(n for n, chosen in enumerate(sets.values()) for _ in chosen)]
        averaged = solve(
            ask, self.slots, self.cuttings, modes, groups=groups, clip=clip, gap=2e-3, nodes=300, seconds=self.seconds
        )
        if averaged is None:
            return None
        exact = [*singles, *self._used(menu, list(sets.values()), averaged, modes, groups)]
        answer = solve(ask, self.slots, self.cuttings, exact, clip=clip, gap=1e-3, nodes=300, seconds=self.seconds)
        if answer is None:
            return None
        return (
            [(mode, int(n)) for mode, n in zip(exact, answer.modes, strict=True) if n > 0],
            [(cutting, int(n)) for cutting, n in zip(self.cuttings, answer.cuttings, strict=True) if n > 0],
        )

    def _sets(self, menu: Menu, ask: Ask, singles: Sequence[Mode], clip: Array) -> dict[object, list[Mode]]:
        """Modes of sets of models that may share a partition, by slot and set."""
        slots = [s for s, useful in enumerate(self.useful) if useful]
        found: dict[object, list[Mode]] = {}
        pairs = menu.pairs(slots, outer=False) if len(self.names) <= FEW else []
        relaxed = solve(ask, self.slots, self.cuttings, [*singles, *pairs], whole=False, clip=clip)
        if relaxed is None:
            return {}
        fills = menu.fills(relaxed.worth, clip)
        worth: dict[object, float] = {}
        for mode in [*pairs, *fills]:
            key = mode.slot, mode.models
            found.setdefault(key, []).append(mode)
            value = sum(relaxed.worth[i] * min(rate, clip[i]) for i, rate in zip(mode.models, mode.rates, strict=True))
            price = float(relaxed.price[mode.slot])
            worth[key] = max(worth.get(key, 0.0), value / price if price > 0 else 1.0)
        kept = sorted((key for key in found if worth[key] >= NEAR), key=lambda key: -worth[key])[:SETS]
        return {key: found[key] for key in kept}

    def _used(
        self,
        menu: Menu,
        sets: Sequence[list[Mode]],
        averaged: Answer,
        modes: Sequence[Mode],
        groups: Sequence[int | None],
    ) -> list[Mode]:
        """Single modes of the sets that an answer uses, and those nearest to the averages that it uses."""
        sums: dict[int, Counter[int]] = {}
        for mode, group, weight in zip(modes, groups, averaged.modes, strict=True):
            if group is not None and weight > 1e-6:
                for i, rate in zip(mode.models, mode.rates, strict=True):
                    sums.setdefault(group, Counter())[i] += weight * rate  # type: ignore[assignment]
        found: dict[Mode, None] = {}
        for group, rates in sums.items():
            first = sets[group][0]
            procs = dict(zip(first.models, first.procs, strict=True))
            aimed = menu.towards(first.slot, dict(rates), procs)
            variants = [int(np.flatnonzero((menu.owner == i) & (menu.procs == procs[i]))[0]) for i in first.models]
            frontier = menu.frontier(first.slot, *variants) if len(variants) == 2 else sets[group]
            found |= dict.fromkeys([*frontier, *([aimed] if aimed else [])])
        return list(found)

    def _made(
        self, menu: Menu, modes: Sequence[tuple[Mode, int]], cuts_: Sequence[tuple[Cutting, int]], *, limit: float
    ) -> Plan:
        """The plan with these modes. limit: the largest multiple of the rates to plan for."""
        groups = pair(self.problem, menu, lay(menu, modes, cuts_, self.rooms), self.rooms)
        carried = np.zeros(len(self.names))
        for group in groups:
            for mode in group.modes:
                for i, rate in zip(mode.models, mode.rates, strict=True):
                    carried[i] += rate * group.count
        with np.errstate(divide="ignore"):
            multiple = min(limit, float((carried / self.rates).min()))
            factors = np.where(
                carried > 0, np.minimum(1.0, self.rates * (multiple if limit > 1 else 1.0) / carried), 0.0
            )
        devices = []
        numbers: Counter[str] = Counter()
        for group in groups:
            kind = self.fleet[group.kind]
            made = self._fitted(menu, group, factors)
            for _ in range(group.count):
                devices.append(Device(kind=kind.name, id=numbers[kind.name], partitions=made))
                numbers[kind.name] += 1
        return accounted(
            Plan(planner="geometry", objective=self.problem.objective, devices=tuple(devices)), self.problem
        )

    def _fitted(self, menu: Menu, group: Group, factors: Array):
        kind = self.fleet[group.kind]
        part, step = 1.0, 0.5
        wanted = cuts(menu, group, factors.tolist())
        made = partitions(self.problem, kind, wanted, full=True) or partitions(self.problem, kind, wanted)
        if made is not None:
            return made
        best = ()
        for _ in range(10):
            part -= step if made is None else -step
            step /= 2
            made = partitions(self.problem, kind, cuts(menu, group, (factors * part).tolist()))
            best = made if made is not None else best
        return best

    def _slow(self, fold: float) -> Array:
        """For each slot and model, a part of the slowdown that the worst neighbours cause."""
        slow = np.ones((len(self.slots), len(self.names)))
        batches = {(mode.slot, mode.models[0]): mode.batches[0] for mode in self.singles}
        for (s, i), batch in batches.items():
            slot = self.slots[s]
            kind = self.fleet[slot.kind]
            victim = Load(self.names[i], batch, slot.share)
            worst = 1.0
            for many in range(1, min(3, (kind.max_partitions or WHOLE) - 1) + 1):
                room = (WHOLE - slot.share) // many
                beside = [t for t, other in enumerate(self.slots) if other.kind == slot.kind and other.share <= room]
                if not beside:
                    break
                t = max(beside, key=lambda t: self.slots[t].share)
                for j in range(len(self.names)):
                    if (t, j) in batches:
                        load = Load(self.names[j], batches[t, j], self.slots[t].share)
                        worst = max(worst, self.problem.interference.slowdown(victim, [load] * many))
            slow[s, i] = 1 + fold * (worst - 1)
        return slow
