"""Exhaustive search: every way to cut devices into at most two, and inside each the best assignment there is.

gpulet paper, section 5.2: the ideal scheduler tries every combination of the cuts 2:8, 4:6, 5:5 and 10:0 over the GPUs.
The authors' program runs its own greedy inside each; this one looks for any models that share any partition, with
rates split in any way, so that it says what two partitions a device can do at all. Fleets are tried from the cheapest
on, and the plan of `elastic` is the one to beat.

How rates are split makes the question continuous. It becomes finite thus: link two partitions that carry parts of one
model. Where the links form no ring, some partition has at most one link; it serves its other models to the end and of
the linked one, without loss, as much as it can, and what is left is the same question with one partition fewer. So a
plan is a sequence of such *splits*, and then of partitions that each serve some models to the end, which is bin
packing: the hardest model goes somewhere, with as many others as fit. Batches need no search: the smallest that keep
up are the best (`smallest_batches`).

Its limits: rings are not tried, a split has at most SPLIT_BESIDE other models, fleets have at most DEVICES devices, and
each gets STEPS steps; beyond them the plan is that of `elastic`. Where neighbours slow each other or memory is short,
sets of models that do not hold are tried with fewer, and once more with the slowdown that is usual; but a split may
still take more than is good for its neighbours, and the search is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import msgspec

from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem, elastic
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    RoundShare,
    build_plan,
    fits_device,
    latency_curve,
    max_throughput_batch,
    median_slowdown,
    smallest_batches,
)

PARTITIONS = 2  # on a device, where its kind sets no limit
DEVICES = 8  # in a fleet
STEPS = 10_000
SPLIT_BESIDE = 2

# Models with what is left of their rates, in requests/s, in the order of the problem.
Rates = tuple[tuple[str, float], ...]


class _Device(msgspec.Struct, frozen=True):
    """A device as it fills. kind: its number in the problem's fleet; cuts: share in ‰ and rates."""

    kind: int
    cuts: tuple[tuple[int, Rates], ...] = ()


Devices = tuple[_Device, ...]


def plan(problem: Problem) -> Plan:
    """Where the search finds nothing that serves all, or nothing cheaper than elastic does: as elastic has it."""
    problem = _cut(problem)
    fleet = problem.fleet
    best = msgspec.structs.replace(elastic.plan(problem), planner="ideal")
    searches = _searches(problem)
    served = not any(model in searches[0].cheapest for model in best.unserved)
    spent = _cost(problem, [sum(device.kind == kind.name for device in best.devices) for kind in fleet])
    for counts in _fleets(problem):
        if served and _cost(problem, counts) >= spent:
            return best
        found = next((found for search in searches if (found := search.serve(counts))), None)
        if found is not None:
            return _assembled(problem, found)
    return best


def feasible(problem: Problem) -> Plan | None:
    """A plan that serves all with as many devices as there are; None where none was found, or none is to be sought."""
    problem = _cut(problem)
    counts = [DEVICES + 1 if kind.count is None else kind.count for kind in problem.fleet]
    if not 0 < sum(counts) <= DEVICES:
        return None
    found = next((found for search in _searches(problem) if (found := search.serve(counts))), None)
    return None if found is None else _assembled(problem, found)


def _cut(problem: Problem) -> Problem:
    """The same with a limit to the partitions of a device where there is none."""
    fleet = (msgspec.structs.replace(kind, max_partitions=kind.max_partitions or PARTITIONS) for kind in problem.fleet)
    return msgspec.structs.replace(problem, fleet=tuple(fleet))


def _searches(problem: Problem) -> list[_Search]:
    free = _Search(problem, crowded=False)
    return [free, _Search(problem, crowded=True)] if problem.interference.interferes else [free]


def _assembled(problem: Problem, found: Devices) -> Plan:
    bins = [
        DeviceDraft(problem.fleet[device.kind], [PartitionDraft(share, dict(rates)) for share, rates in device.cuts])
        for device in found
        if device.cuts
    ]
    return build_plan(problem, "ideal", bins)


def _cost(problem: Problem, counts: Sequence[int]) -> tuple[float, int]:
    """What a fleet costs an hour, and how many devices it has; a kind without a price beside priced ones is dearest."""
    missing = 0.0 if all(kind.price is None for kind in problem.fleet) else math.inf
    prices = [missing if kind.price is None else kind.price for kind in problem.fleet]
    return sum(count * price for count, price in zip(counts, prices, strict=True) if count), sum(counts)


def _fleets(problem: Problem) -> list[tuple[int, ...]]:
    """Numbers of devices of each kind, the cheapest fleet first."""
    most = [range(1 + min(DEVICES if kind.count is None else kind.count, DEVICES)) for kind in problem.fleet]
    fleets = [counts for counts in product(*most) if 0 < sum(counts) <= DEVICES]
    return sorted(fleets, key=lambda counts: _cost(problem, counts))


class _Search:
    """crowded: whether a partition is reckoned to have a neighbour before it has one. cheapest: by model and kind the
    least share of a device, in ‰, that one request/s takes; no model without one."""

    def __init__(self, problem: Problem, *, crowded: bool) -> None:
        self.problem = problem
        self.crowded = crowded
        self.cheapest: dict[str, list[float]] = {}
        self._slos = {model.name: model.slo for model in problem.models}
        for model, rate in problem.rates.items():
            costs = [math.inf if kind.count == 0 else self._cost(model, kind) for kind in problem.fleet]
            if rate > 0 and min(costs, default=math.inf) < math.inf:
                self.cheapest[model] = costs
        # Without neighbours and limits on memory what is on a device does not matter, only how it is cut.
        self._plain = not problem.interference.interferes and all(
            kind.memory >= 1 << 62 and kind.geometry is None for kind in problem.fleet
        )
        self._holds: dict[tuple[int, int, Rates], bool] = {}
        self._most: dict[tuple[int, int, Rates, str], float] = {}
        self._curves: dict[tuple[int, int, str], list[float]] = {}
        self._sets: dict[tuple[int, int, str, Rates], list[Rates]] = {}
        self._failed: set[tuple[object, Rates, int]] = set()
        self._steps = 0

    def serve(self, counts: Sequence[int]) -> Devices | None:
        """The devices of a fleet, filled so that every model that can be served is; None where no way was found."""
        devices = tuple(_Device(kind) for kind, count in enumerate(counts) for _ in range(count))
        left = tuple((model, self.problem.rates[model]) for model in self.cheapest)
        used = {device.kind for device in devices}
        if any(self._cheapest(model, used) == math.inf for model, _ in left):
            return None
        self._failed.clear()
        self._steps = STEPS
        most = sum(self.problem.fleet[device.kind].max_partitions or PARTITIONS for device in devices) - 1
        for splits in range(self._fewest_splits(left, used), most + 1):
            found = self._split(devices, left, splits)
            if found is not None or self._steps <= 0:
                return found
        return None

    def _cost(self, model: str, kind: Kind) -> float:
        most = [
            max_throughput_batch(latency_curve(self.problem, model, kind.name, cut), self._slos[model])[1]
            for cut in kind.cuts
        ]
        return min((cut / rate for cut, rate in zip(kind.cuts, most, strict=True) if rate), default=math.inf)

    def _cheapest(self, model: str, kinds: set[int]) -> float:
        return min(self.cheapest[model][kind] for kind in kinds)

    def _fewest_splits(self, left: Rates, kinds: set[int]) -> int:
        """A model that saturates partitions must be on several."""
        splits = 0
        for model, rate in left:
            alone = max(
                max_throughput_batch(
                    latency_curve(self.problem, model, self.problem.fleet[k].name, cut), self._slos[model]
                )[1]
                for k in kinds
                for cut in self.problem.fleet[k].cuts
            )
            splits += math.ceil(rate / alone * (1 - ROUNDING_TOLERANCE)) - 1
        return splits

    def _hopeless(self, devices: Devices, left: Rates, splits: int) -> bool:
        """Whether what is left takes more than is free, or this was tried; counts the try."""
        self._steps -= 10
        kinds = {device.kind for device in devices}
        needed = sum(rate * self._cheapest(model, kinds) for model, rate in left)
        free = sum(
            WHOLE - sum(share for share, _ in device.cuts) for device in devices if next(self._cuts(device), None)
        )
        if self._steps < 0 or needed > free * (1 + ROUNDING_TOLERANCE):
            return True
        cut: object = sorted((d.kind, sorted(share for share, _ in d.cuts) if self._plain else d.cuts) for d in devices)
        state = repr(cut), left, splits
        if state in self._failed:
            return True
        self._failed.add(state)
        return False

    def _split(self, devices: Devices, left: Rates, splits: int) -> Devices | None:
        """Cuts that each serve some models to the end and a part of another one; then those without such parts."""
        if splits == 0:
            return self._pack(devices, left)
        if self._hopeless(devices, left, splits):
            return None
        choices = []
        for index, share, whole in self._places(devices):
            for size in range(min(SPLIT_BESIDE, len(left) - 1) + 1):
                for rates in combinations(left, size):
                    for model, rate in left if self._steps > 0 else ():
                        if all(model != other for other, _ in rates):
                            part = self._part(devices[index].kind, share, rates, model)
                            if rate / 100 < part < rate * (1 - ROUNDING_TOLERANCE):
                                choices.append((self._use((*rates, (model, part))) / whole, index, share, rates, model))
        for _, index, share, rates, model in sorted(choices, key=lambda choice: -choice[0]):
            part = self._part(devices[index].kind, share, rates, model)
            grown = self._with(devices, index, share, (*rates, (model, part)))
            rest = tuple(
                (name, rate - part if name == model else rate) for name, rate in left if (name, rate) not in rates
            )
            if grown and (found := self._split(grown, rest, splits - 1)):
                return found
            if self._steps <= 0:
                break
        return None

    def _pack(self, devices: Devices, left: Rates) -> Devices | None:
        """Bin packing of models that are each on one partition."""
        if not left:
            return devices
        if self._hopeless(devices, left, 0):
            return None
        kinds = {device.kind for device in devices}
        partners = {item: sum(self._together(kinds, item, other) for other in left) for item in left}
        order = sorted(left, key=lambda item: (partners[item], -self._use((item,))))
        apart: list[tuple[str, float]] = []
        for item in order:
            if not any(self._together(kinds, item, other) for other in apart):
                apart.append(item)
        if len(apart) > sum(self._places_left(device) for device in devices):
            return None
        first = order[0]
        others = tuple(item for item in left if item != first)
        choices = []
        smaller: dict[int, int] = {}
        for index, share, whole in self._places(devices):
            kind = devices[index].kind
            choices += [
                (self._use(rates) / whole, index, share, rates)
                for rates in self._fullest(kind, share, first, others)
                if not (self._plain and index in smaller and self._hold(kind, smaller[index], rates))
            ]
            smaller[index] = share
        choices.sort(key=lambda choice: -choice[0])
        for _, index, share, rates in choices:
            grown = self._with(devices, index, share, rates)
            if grown is None:
                # Memory or neighbours: with fewer models beside the first.
                shorter = [tuple(item for item in rates if item != gone) for gone in rates if gone != first]
                choices.extend(
                    (0.0, index, share, some) for some in shorter if (0.0, index, share, some) not in choices
                )
            elif found := self._pack(grown, tuple(item for item in left if item not in rates)):
                return found
            if self._steps <= 0:
                break
        return None

    def _places(self, devices: Devices) -> Iterator[tuple[int, int, int]]:
        """Which device may be cut at which share, and how much of the device that takes: equal ones once."""
        seen = set()
        for index, device in enumerate(devices):
            state = (device.kind, tuple(share for share, _ in device.cuts) if self._plain else device.cuts)
            if state in seen:
                continue
            seen.add(state)
            for share, whole in self._cuts(device):
                yield index, share, whole

    def _places_left(self, device: _Device) -> int:
        """How many more partitions it may have, at most."""
        limit = self.problem.fleet[device.kind].max_partitions or PARTITIONS
        return limit - len(device.cuts) if next(self._cuts(device), None) else 0

    def _together(self, kinds: set[int], a: tuple[str, float], b: tuple[str, float]) -> bool:
        """Whether any partition serves both to the end."""
        return any(self._hold(kind, self.problem.fleet[kind].cuts[-1], (a, b) if a < b else (b, a)) for kind in kinds)

    def _cuts(self, device: _Device) -> Iterator[tuple[int, int]]:
        """The last cut of a device takes all that is left."""
        kind = self.problem.fleet[device.kind]
        limit = kind.max_partitions or PARTITIONS
        shares = [share for share, _ in device.cuts]
        free = WHOLE - sum(shares)
        legal = [cut for cut in kind.cuts if cut <= free]
        if kind.geometry is not None:
            legal = [
                cut for cut in legal if mig.placements_fit(kind.geometry, [(share, 0) for share in (*shares, cut)])
            ]
        if len(shares) + 1 < limit:
            for cut in legal:
                yield cut, (cut if cut + kind.cuts[0] <= free else free)
        elif len(shares) < limit and legal:
            yield legal[-1], free

    def _with(self, devices: Devices, index: int, share: int, rates: Rates) -> Devices | None:
        """The devices with one more cut; None where it does not hold."""
        device = _Device(devices[index].kind, (*devices[index].cuts, (share, rates)))
        cuts = [PartitionDraft(share, dict(rates)) for share, rates in device.cuts]
        if not self._plain and not fits_device(self.problem, self.problem.fleet[device.kind], cuts):
            return None
        return (*devices[:index], device, *devices[index + 1 :])

    def _use(self, rates: Rates) -> float:
        return sum(rate * min(self.cheapest[model]) for model, rate in rates)

    def _work(self, kind: int, share: int, model: str, rate: float) -> RoundShare:
        key = kind, share, model
        if key not in self._curves:
            of = self.problem.fleet[kind]
            factor = median_slowdown(self.problem, model, of, share) if self.crowded else 1.0
            self._curves[key] = [factor * latency for latency in latency_curve(self.problem, model, of.name, share)]
        return RoundShare(self._curves[key], rate, self._slos[model])

    def _hold(self, kind: int, share: int, rates: Rates) -> bool:
        """Whether a partition serves the models to the end."""
        key = kind, share, rates
        if key not in self._holds:
            self._holds[key] = smallest_batches([self._work(kind, share, *item) for item in rates]) is not None
        return self._holds[key]

    def _part(self, kind: int, share: int, rates: Rates, model: str) -> float:
        """The most requests/s of a model beside others that are served to the end."""
        key = kind, share, rates, model
        if not self._hold(kind, share, rates):
            return 0.0
        if key not in self._most:
            self._steps -= 1
            works = [self._work(kind, share, *item) for item in rates]
            self._most[key] = second_model_rate(works, self._work(kind, share, model, 0.0))
        return self._most[key]

    def _fullest(self, kind: int, share: int, first: tuple[str, float], others: Rates) -> list[Rates]:
        """Every set of models with the first one that a partition serves to the end, and to which none can be added."""
        key = kind, share, first[0], (first, *others)
        if key not in self._sets:
            self._sets[key] = self._enumerated(kind, share, (first,), others)
        return self._sets[key]

    def _enumerated(self, kind: int, share: int, base: Rates, others: Rates) -> list[Rates]:
        if not self._hold(kind, share, base):
            return []
        others = tuple(item for item in others if self._hold(kind, share, (*base, item)))
        if self._hold(kind, share, (*base, *others)):
            return [(*base, *others)]
        found: list[frozenset[tuple[str, float]]] = []
        for size in range(len(others) - 1, -1, -1):
            for some in combinations(others, size):
                if not any(known.issuperset(some) for known in found) and self._hold(kind, share, (*base, *some)):
                    found.append(frozenset(some))
        return [(*base, *(item for item in others if item in some)) for some in found]


def second_model_rate(works: Sequence[RoundShare], another: RoundShare) -> float:
    """The most requests/s of another model on a partition whose works keep up; its own rate does not count.

    For each of its batches the others' least batches are a fixed point, as in `smallest_batches`, and only grow with
    it.
    """
    batches = [1] * len(works)
    best = 0.0
    for rows, latency in enumerate(another.curve, 1):
        while True:
            length = latency + sum(work.curve[batch - 1] for work, batch in zip(works, batches, strict=True))
            if length + latency > another.slo:
                return best
            grew = False
            for i, work in enumerate(works):
                need = math.ceil(work.rate * length * (1 - ROUNDING_TOLERANCE))
                if need > len(work.curve) or length + work.curve[batches[i] - 1] > work.slo:
                    return best
                if need > batches[i]:
                    batches[i], grew = need, True
            if not grew:
                break
        best = max(best, rows / length)
    return best
