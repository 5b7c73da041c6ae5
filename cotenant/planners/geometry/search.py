"""The search for a plan: which modes the program may choose from, and what becomes of its answer."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Device, Partition, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import QUICK, Problem, ideal, load
from cotenant.planners.capacity import accounted, as_batched, partitions
from cotenant.planners.geometry import cuttings as ways
from cotenant.planners.geometry.bounding import Bounding
from cotenant.planners.geometry.cuttings import Cutting
from cotenant.planners.geometry.exchange import Box, Offer, exchange
from cotenant.planners.geometry.layout import Group, Place, cuts, lay, pair, standing
from cotenant.planners.geometry.modes import Menu, Mode, slots_of
from cotenant.planners.geometry.neighbours import least, slow
from cotenant.planners.geometry.program import Answer, Ask, solve
from cotenant.predictors import Alone

Array = NDArray[np.float64]
Mix = tuple[list[tuple[Mode, int]], list[tuple[Cutting, int]]]

FEW = 12  # models whose pairs are all looked at
VERY_FEW = 5  # models of which larger sets are looked at, too
SMALL = 16  # devices up to which they are filled one by one
MANY = 40  # devices beyond which partitions shared in time are too few to tighten the bound
QUANTILES = (1.0, 0.5, 0.0)  # of what neighbours may do, those that are reckoned with: the worst, the usual, the least
MIXED = 100  # modes of several models that the program may choose from
STEPS = 4500  # of filling devices anew, for each second of the time limit
ROUNDS = 3  # of so many steps, at most
CHOICES = 20_000  # sets of devices of mixed kinds that are looked at, and of those, how many are tried
FLEETS = 6
PARTS = (1.0, 0.97, 0.93, 0.87, 0.8, 0.7, 0.55, 0.4, 0.2)  # of what a device was to carry, those that are tried
BISECTIONS = 6
TINY = 1e-12
GRID = 100  # ‰: of very many shares, those that are multiples of it
LEAST = 0.05  # seconds that the program gets when no time is left: it must have some plan
REPAIRS = 4  # times that models which come short are asked for more
RIVALS = tuple(load(name) for name in QUICK)


class Search:
    """What stays the same while plans are looked for. names: models that some share can serve in time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fleet = problem.fleet
        self.slots = slots_of(problem)
        self.left = problem.time_limit
        self.steps = round(STEPS * problem.time_limit * ROUNDS)
        asked = [name for name, rate in problem.rates.items() if rate > 0]
        self.menu = self._menu(asked)
        self.singles = self.menu.singles(light=False)
        self.names = [asked[i] for i in sorted({mode.models[0] for mode in self.singles})]
        # Where some model cannot be served at all no multiple is: the others get the rates that they ask for.
        self.hopeless = len(self.names) < len(asked)
        self.scale = problem.objective == "rate" and not self.hopeless
        self.rates = np.array([problem.rates[name] for name in self.names])
        if self.hopeless:
            self.menu = self._menu(self.names)
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
        self.relaxing = self._singles(self.menu) if any(self.rooms) else self.singles
        self.standing = standing(problem, self.slots, self.names)
        self.cuttings: list[Cutting] = []
        self.planned = self.useful
        self._cut()
        self.relaxed = self._relax(self._ask(scale=self.scale)) if self._limited() else None
        if self.names and self.relaxed is None and not self.scale and math.inf in self.counts:
            # Some kind is too few: of those without end no more than would do for all.
            endless = self._relax(self._ask(scale=False, endless=True))
            most = math.ceil(sum(endless.cuttings)) + 1 if endless is not None else 1
            self.counts = [min(count, most) for count in self.counts]

    def _menu(self, names: Sequence[str]) -> Menu:
        """What these models may do without neighbours."""
        return Menu(self.problem, names, self.slots, np.ones((len(self.slots), len(names))))

    @cached_property
    def menus(self) -> list[Menu]:
        """What to choose from, with different guesses of what neighbours do; one where that is known."""
        if isinstance(self.problem.interference, Alone):
            return [self.menu]
        factors = [slow(self.problem, self.slots, self.names, self.singles, quantile) for quantile in QUANTILES]
        if (factors[0] == factors[-1]).all():
            factors = factors[:1]
        return [Menu(self.problem, self.names, self.slots, each) for each in factors]

    def _limited(self) -> bool:
        return bool(self.names) and not (self.scale and math.inf in self.counts)

    def _ask(self, *, scale: bool, rates: Array | None = None, endless: bool = False) -> Ask:
        return Ask(
            rates=self.rates if rates is None else rates,
            counts=[math.inf] * len(self.counts) if endless else self.counts,
            prices=self.prices,
            rooms=self.rooms,
            scale=scale,
        )

    def _solve(self, ask: Ask, modes: Sequence[Mode], *, seconds: float = math.inf, **options: object) -> Answer | None:
        """See `program.solve`; whole numbers are searched for no longer than time is left."""
        allowed = min(seconds, max(self.left, LEAST))
        answer, took = solve(ask, self.slots, self.cuttings, modes, seconds=allowed, **options)  # type: ignore[arg-type]
        self.left -= took
        return answer

    def _linear(self, ask: Ask, modes: Sequence[Mode]) -> Answer | None:
        """The linear relaxation: quick, and nothing goes without it."""
        return solve(ask, self.slots, self.cuttings, modes, whole=False)[0]

    def _cut(self) -> None:
        """Cuttings of every kind; where there are too many, those that the relaxation asks for."""
        self.sampled: list[int] = []
        for k, kind in enumerate(self.fleet):
            every = ways.every(k, kind, self.slots, self.useful)
            if every is None:
                self.sampled.append(k)
                most = kind.max_partitions or WHOLE
                own = [s for s in self.useful if self.slots[s].kind == k]
                every = [Cutting(k, ((s, min(WHOLE // self.slots[s].share, most)),)) for s in own]
            self.cuttings += every
        relaxed = self._relax(self._ask(scale=False, endless=True)) if self.sampled else None
        if relaxed is not None:
            self._thin(relaxed)

    def _thin(self, relaxed: Answer) -> None:
        """Of kinds that may be cut in very many ways, plans use the shares that the relaxation does and a grid."""
        used = {mode.slot for mode, n in zip(self.relaxing, relaxed.modes, strict=True) if n > 1e-6}
        grid = {s for s in self.useful if self.slots[s].share % GRID == 0}
        self.planned = [s for s in self.useful if self.slots[s].kind not in self.sampled or s in used | grid]
        for k in self.sampled:
            every = ways.every(k, self.fleet[k], self.slots, self.planned)
            self.cuttings += [each for each in every or () if each not in self.cuttings]

    # The bound.

    def bound(self) -> float | None:
        """What no sound plan can beat. With too few devices, how many there would have to be."""
        if self.hopeless and self.problem.objective == "rate":
            return 0.0
        if not self._limited():
            return None
        ask, relaxed = self._ask(scale=self.scale), self.relaxed
        if relaxed is None:
            ask = self._ask(scale=self.scale, endless=True)
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
    def bounding(self) -> Bounding | None:
        """What bounds every plan closer than the relaxation does; None where that would take too long."""
        if len(self.names) > FEW or self.planned != self.useful:
            return None
        modes = [*self.singles, *self.menu.frontiers(self.useful)]
        return Bounding(self.menu, self.useful, self.cuttings, modes)

    def _ones(self, menu: Menu) -> list[Mode]:
        """Modes of one model, for plans."""
        return [mode for mode in self._singles(menu) if mode.slot in self.planned]

    def _singles(self, menu: Menu) -> list[Mode]:
        return menu.singles(light=any(self.rooms))

    def _relax(self, ask: Ask) -> Answer | None:
        """The relaxation that bounds every plan: of cuttings that are not all there, with those that it asks for."""
        while True:
            relaxed = self._linear(ask, self.relaxing)
            if relaxed is None:
                return None
            asked = [cutting for k in self.sampled if (cutting := self._asked(k, ask, relaxed)) is not None]
            if not asked:
                return relaxed
            self.cuttings += asked

    def _asked(self, k: int, ask: Ask, relaxed: Answer) -> Cutting | None:
        """The cutting of a kind that is worth most beyond what a device costs, if any is."""
        worth, best = ways.dearest(k, self.fleet[k], self.slots, relaxed.price)
        costs = (0.0 if ask.scale else self.prices[k]) + relaxed.more[k] - relaxed.room[k]
        return best if worth > costs + 1e-7 * max(worth, 1e-12) and best not in self.cuttings else None

    # The plan.

    def plan(self) -> Plan:
        limit = self.bound()
        best = self._account(())
        if self.names:
            for candidate in self._candidates():
                if self._merit(candidate) > self._merit(best):
                    best = candidate
                if self._reaches(best, limit):
                    break
        if self.scale and limit is not None and self._devices() <= MANY:
            best = self._raised(best, limit)
        return msgspec.structs.replace(best, bound=limit)

    def _raised(self, best: Plan, limit: float) -> Plan:
        """A plan for a larger multiple of the rates, asked for one multiple after the other.

        With neighbours in play that finds more than to ask for the largest; and no rival may serve more.
        """
        low, high = max(0.0, best.scale), limit
        known = len(self.menus) == 1
        for n in range(BISECTIONS):
            # Where all went well, rivals do no better, and one question is enough.
            multiple = (low + high) / 2
            if n == 0:
                multiple = low * 1.001 if known else min(max(1.0, low * 1.001), high)
            rates = {name: rate * multiple for name, rate in self.problem.rates.items()}
            asked = msgspec.structs.replace(
                self.problem, rates=rates, objective="devices", time_limit=self.problem.time_limit / BISECTIONS
            )
            if known:
                found = next((plan for rival in RIVALS if not (plan := rival(asked)).unserved), None)
            else:
                found = Search(asked).feasible(thorough=False)
            if found is not None:
                low, best = multiple, self._account(found.devices)
            elif n == 0 and known:
                break
            else:
                high = multiple
        return best

    def feasible(self, *, thorough: bool = True) -> Plan | None:
        """Any plan that serves the rates."""
        if not self.names and not self.hopeless:
            return self._account(())
        if self.relaxed is None or self.hopeless:
            return None
        for candidate in self._candidates(first=True, thorough=thorough):
            if not candidate.unserved:
                return candidate
        return None

    def _candidates(self, *, first: bool = False, thorough: bool = True) -> Generator[Plan, None, None]:
        """Plans, each a try of its own. first: any that serves the rates will do. thorough: whatever it takes."""
        small = bool(self.names) and self._devices() <= SMALL
        rivals = RIVALS if self.names and not self.scale and self._devices() <= MANY else ()
        if self.names and self.standing:
            yield self._as_it_stands()
        if first:
            yield from (self._account(rival(self.problem).devices) for rival in rivals)
            if thorough and self._refuted():
                return
        for n, menu in enumerate(self.menus):
            done = small and (yield from self._exchanged(menu, first=first))
            if n == 0 and not first:
                yield from (self._account(rival(self.problem).devices) for rival in rivals)
            if done or (small and (first or self.scale)):
                continue
            served = self.relaxed is not None and (yield from self._tries(menu, scale=self.scale))
            if not served and not self.scale and not first:
                yield from self._tries(menu, scale=True)
        if thorough and len(self.menus) > 1 and not self.scale and self._devices() <= ideal.DEVICES:
            found = ideal.feasible(self.problem) if first else ideal.plan(self.problem)
            yield self._account(found.devices if found else ())

    def _refuted(self) -> bool:
        """Whether the devices cannot serve the rates: proven, or where neighbours matter as good as that."""
        bounding = self.bounding
        if bounding is None or self.relaxed is None or sum(self.relaxed.cuttings) > MANY:
            return False
        if not isinstance(self.problem.interference, Alone) and all(kind.cuts[-1] == WHOLE for kind in self.fleet):
            # A partition that has no neighbour may as well have the whole device.
            crowded = least(self.problem, self.slots, self.names, self.singles)
            menu = Menu(self.problem, self.names, self.slots, crowded)
            bounding = Bounding(menu, self.useful, self.cuttings, menu.singles(light=False))
        return bounding.refutes(self.rates, self.counts)

    def _as_it_stands(self) -> Plan:
        """The devices of the plan in force, with their models, for the rates that are asked now."""
        modes = self._stood(self.menu)
        groups = []
        for device in self.standing:
            known = tuple(modes[place] for place in device.places if place in modes)
            if known:
                groups.append(Group(device.kind, known, (device.id,)))
        return self._laid(self.menu, groups, most=self.scale)

    def _stood(self, menu: Menu) -> dict[Place, Mode]:
        """What each partition of the plan in force may run, in proportion to the rates that it has."""
        places = dict.fromkeys(place for device in self.standing for place in device.places)
        modes = ((place, menu.towards(*msgspec.structs.astuple(place))) for place in places)
        return {place: mode for place, mode in modes if mode is not None}

    def _devices(self) -> float:
        """About how many there will be."""
        if self.relaxed is None or self.scale:
            return sum(self.counts)
        return float(sum(self.relaxed.cuttings))

    def _exchanged(self, menu: Menu, *, first: bool) -> Generator[Plan, None, bool]:
        """What emptying and filling devices finds, from the fewest devices up. Returns whether it serves the rates."""
        priced = self._linear(self._ask(scale=self.scale, endless=not self.scale), self._ones(menu))
        if priced is None:
            return False
        worth = priced.worth * self.rates
        enough = priced.value if self.scale else 1.0
        offer = Offer(self._offered(menu, priced), self.rates)
        pieces = [
            [[s for s, many in cutting.pieces for _ in range(many)] for cutting in self.cuttings if cutting.kind == k]
            for k in range(len(self.fleet))
        ]
        every = self._every()
        # Of several kinds more sets of devices are looked at, and each gets less.
        share = self.problem.time_limit / min(2, len(self.fleet))
        for fleet in self._fleets(menu, first=first):
            boxes = self._boxes([k for k in fleet if pieces[k]], offer)
            wanted = np.ones(len(self.names))
            for _ in range(REPAIRS):
                steps = min(self.steps, round(STEPS * share))
                served, boxes, taken = exchange(
                    boxes, offer.for_more(wanted), pieces, self.rooms, worth, enough=enough, steps=steps
                )
                self.steps -= taken
                plan = self._laid(menu, self._grouped(boxes), most=self.scale)
                yield plan
                more = self._more(plan)
                if more is None or (not self.scale and served < 1 - 1e-9):
                    break
                wanted *= more
            if not self.scale and more is None:
                return len(self.fleet) == 1 or fleet != every  # with all that there are, no choice was made of kinds
        return False

    def _every(self) -> list[int]:
        return [k for k, count in enumerate(self.counts) for _ in range(int(min(count, SMALL)))]

    def _fleets(self, menu: Menu, *, first: bool) -> Iterable[list[int]]:
        """Kinds of devices to try with: the cheapest with which the relaxation serves the rates; at last all."""
        every = self._every()
        if self.scale or self.relaxed is None or first:
            yield every
            return
        most = [range(int(min(count, SMALL)) + 1) for count in self.counts]
        choices = (
            counts
            for counts in itertools.islice(itertools.product(*most), CHOICES)
            if 0 < sum(counts) <= SMALL and self._cost(counts) >= self.relaxed.value - 1e-9
        )
        tried, ones = 0, self._ones(menu)
        for counts in sorted(choices, key=self._cost):
            ask = msgspec.structs.replace(self._ask(scale=False), counts=[float(count) for count in counts])
            if self._linear(ask, ones) is not None:
                yield [k for k, count in enumerate(counts) for _ in range(count)]
                tried += 1
            if tried == FLEETS:
                break
        yield every

    def _cost(self, counts: Sequence[int]) -> float:
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))

    def _offered(self, menu: Menu, priced: Answer) -> list[Mode]:
        """All modes of one model and of two, the best of more, and those of the plan in force."""
        clip = self.rates * (priced.value if self.scale else 1.0)
        pairs = menu.frontiers(self.planned) if len(self.names) <= FEW else []
        several = menu.several(self.planned, self.rates) if len(self.names) <= VERY_FEW else []
        return [
            *self._stood(menu).values(),
            *self._ones(menu),
            *pairs,
            *several,
            *menu.fills(self.planned, priced.worth, clip),
        ]

    def _boxes(self, kinds: Sequence[int], offer: Offer) -> list[Box]:
        """Devices to begin with: those of the plan in force, and others in one piece each."""
        known = {(mode.slot, mode.models): mode for modes in offer.modes.values() for mode in reversed(modes)}
        left = list(kinds)
        boxes = []
        for device in self.standing:
            modes = [known.get((place.slot, place.models)) for place in device.places]
            if device.kind in left and all(modes):
                left.remove(device.kind)
                boxes.append(Box(device.kind, device.id, [place.slot for place in device.places], modes))
        return boxes + [Box(kind, None, [], []) for kind in left]

    def _grouped(self, boxes: Sequence[Box]) -> list[Group]:
        """As groups of one, with numbers."""
        taken = {(box.kind, box.id) for box in boxes}
        groups = []
        for box in boxes:
            modes = tuple(mode for mode in box.modes if mode is not None)
            number = box.id if box.id is not None else next(n for n in itertools.count() if (box.kind, n) not in taken)
            taken.add((box.kind, number))
            if modes:
                groups.append(Group(box.kind, modes, (number,)))
        return groups

    def _tries(self, menu: Menu, *, scale: bool) -> Generator[Plan, None, bool]:
        """What the program answers; where models come short of it, once more with more asked for them.

        Returns whether all came to what they should.
        """
        wanted = self.rates.copy()
        for _ in range(REPAIRS):
            mix = self._find(menu, self._ask(scale=scale, rates=wanted))
            if mix is None:
                return False
            plan = self._laid(menu, lay(*mix, self.rooms, self.standing), most=self.scale)
            yield plan
            more = self._more(plan)
            if more is None:
                return True
            if scale != self.scale:
                return False
            wanted *= more
        return False

    def _more(self, plan: Plan) -> Array | None:
        """How many times as much to ask for each model that came short; None where none did."""
        served = self._served(plan)
        target = float(served.max()) if self.scale else 1.0
        if (served > target * (1 - 1e-6)).all():
            return None
        times: Array = np.clip(1.005 * target / np.maximum(served, 1e-9), 1.0, 1.5)
        return times

    def _merit(self, plan: Plan) -> tuple[float, float, float, int, int]:
        """More is better: the least part of a rate that is served, the part over all; the price, what stays as it was,
        and how few workers there are."""
        served = self._served(plan).tolist()
        over_all = 0.0 if self.scale else sum(min(1.0, part) for part in served)
        workers = sum(placement.procs for _, _, placement in plan.placements())
        return (
            round(min(served), 6),
            round(over_all, 6),
            -self._spent(plan),
            _stays(plan, self.problem.current),
            -workers,
        )

    def _served(self, plan: Plan) -> Array:
        """The part of each model's rate."""
        carried = plan.rates()
        parts: Array = np.array([carried.get(name, 0.0) for name in self.names]) / self.rates
        return parts

    def _reaches(self, plan: Plan, limit: float | None) -> bool:
        if self.scale or limit is None or plan.unserved:
            return False
        return self._spent(plan) <= limit * (1 + 1e-6)

    def _spent(self, plan: Plan) -> float:
        price = {kind.name: price for kind, price in zip(self.fleet, self.prices, strict=True)}
        return sum(price[device.kind] for device in plan.devices)

    def _account(self, devices: Sequence[Device]) -> Plan:
        plan = Plan(planner="geometry", objective=self.problem.objective, devices=tuple(devices))
        return accounted(plan, self.problem)

    def _find(self, menu: Menu, ask: Ask) -> Mix | None:
        """Modes and cuttings, and how many of each; None where nothing serves what is asked."""
        ones = self._ones(menu)
        relaxed = self._linear(ask, ones)
        if relaxed is None:
            return None
        clip = ask.rates * (relaxed.value if ask.scale else 1.0)
        chosen = self._mixed(menu, ask, ones, relaxed)
        places = [(place.slot, place.models) for device in self.standing for place in device.places]
        favour = [n for n, mode in enumerate(chosen) if (mode.slot, mode.models) in set(places)]
        # Most of a large fleet is as the relaxation has it; the question is the rest.
        numbers = zip([*ones, *self.cuttings], [*relaxed.modes, *relaxed.cuttings], strict=True)
        least = {each: max(0, math.floor(n + 1e-6) - 1) for each, n in numbers}
        answer = self._solve(
            ask, chosen, clip=clip, favour=favour, stays=1 + len(places), least=least, gap=1e-3, nodes=200
        )
        if answer is None:
            return None
        return (
            [(mode, int(n)) for mode, n in zip(chosen, answer.modes, strict=True) if n > 0],
            [(cutting, int(n)) for cutting, n in zip(self.cuttings, answer.cuttings, strict=True) if n > 0],
        )

    def _mixed(self, menu: Menu, ask: Ask, ones: Sequence[Mode], relaxed: Answer) -> list[Mode]:
        """Of a large fleet: modes of one model that are near what the relaxation pays, and the best of several."""

        def worth(mode: Mode) -> float:
            value = sum(relaxed.worth[i] * rate for i, rate in zip(mode.models, mode.rates, strict=True))
            price = float(relaxed.price[mode.slot])
            return value / price if price > 0 else 1.0

        near = [mode for mode in ones if worth(mode) >= 0.9]
        rest = ask.rates * (relaxed.value if ask.scale else 1.0)
        for mode, n in zip(ones, relaxed.modes, strict=True):
            rest[mode.models[0]] -= math.floor(n + 1e-6) * mode.rates[0]
        several = menu.fills(self.planned, relaxed.worth, np.maximum(rest, 0.0))
        if len(self.names) <= FEW:
            several += menu.pairs(self.planned)
        return near + sorted(several, key=worth, reverse=True)[:MIXED]

    def _laid(self, menu: Menu, groups: list[Group], *, most: bool) -> Plan:
        """The plan with these devices. most: for the largest multiple of the rates that they carry."""
        groups = pair(self.problem, menu, groups, self.rooms)
        carried = np.zeros(len(self.names))
        for group in groups:
            for mode in group.modes:
                for i, rate in zip(mode.models, mode.rates, strict=True):
                    carried[i] += rate * group.count
        factors = np.minimum(1.0, self.rates / np.maximum(carried, TINY))
        if most:
            factors = self.rates * float((carried / self.rates).min()) / np.maximum(carried, TINY)
            factors *= self._stretch(menu, groups, factors)
        devices = [
            Device(kind=self.fleet[group.kind].name, id=number, partitions=made)
            for group, made in zip(groups, [self._fitted(menu, group, factors) for group in groups], strict=True)
            for number in group.ids
        ]
        return self._account(devices)

    def _stretch(self, menu: Menu, groups: Sequence[Group], factors: Array) -> float:
        """By how much more than was reckoned all rates may grow, with the neighbours that there are."""
        low, high = 1.0, 1.0 if isinstance(self.problem.interference, Alone) else 2.0
        while high - low > 1e-3:
            multiple = (low + high) / 2
            if all(self._fits(menu, group, factors * multiple) for group in groups):
                low = multiple
            else:
                high = multiple
        return low

    def _fits(self, menu: Menu, group: Group, factors: Array) -> tuple[Partition, ...] | None:
        wanted = cuts(menu, group, factors)
        kind = self.fleet[group.kind]
        return (
            partitions(self.problem, kind, wanted, full=True)
            or partitions(self.problem, kind, wanted)
            or as_batched(self.problem, kind, wanted, [mode.batches for mode in group.modes])
        )

    def _fitted(self, menu: Menu, group: Group, factors: Array) -> tuple[Partition, ...]:
        """The partitions of one device; where neighbours slow each other too much, with less, or with fewer of them.

        Slowdowns need not fall with rates, nor with batches: hence no bisection.
        """
        if not group.modes:
            return ()
        for part in PARTS:
            if (made := self._fits(menu, group, factors * part)) is not None:
                return made
        # The first without which the others fit; else the last, and so on.
        fewer = [Group(group.kind, group.modes[:n] + group.modes[n + 1 :], group.ids) for n in range(len(group.modes))]
        fitting = (less for less in fewer if less.modes and self._fits(menu, less, factors) is not None)
        return self._fitted(menu, next(fitting, fewer[-1]), factors)


def _stays(plan: Plan, current: Plan | None) -> int:
    """How many partitions are as they were, on the same device with the same models."""

    def what(of: Plan | None) -> Counter[object]:
        return Counter(
            (device.kind, device.id, partition.share, frozenset(p.model for p in partition.placements))
            for device in (of.devices if of else ())
            for partition in device.partitions
        )

    return (what(plan) & what(current)).total() if current else 0
