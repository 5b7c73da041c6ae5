"""Search exhaustively: every way to cut devices into at most two partitions, with the best assignment for each.

gpulet paper, section 5.2: the ideal scheduler tries every combination of the cuts 2:8, 4:6, 5:5 and 10:0 over the GPUs.
The authors' program runs its own greedy inside each. This one searches for any models on any partition, with rates
split in any way, and so shows what two partitions a device can achieve. Fleets are tried from the cheapest on, and must
beat the plan of `elastic-plus`.

Split rates make the problem continuous. It becomes finite as follows: link two partitions that serve parts of one
model. If the links form no cycle, some partition has at most one. Without loss it serves its other models fully and as
much as it can of the linked one; what remains is the same problem with one partition fewer. So a plan is a sequence of
such *splits*, followed by partitions that each serve some models fully, which is bin packing: the hardest model first,
with as many others as fit. Batches need no search: the smallest that keep up are optimal (`smallest_batches`).

Limits: cycles are not tried, a split has at most MAX_SPLIT_COLOCATED other models, fleets have at most MAX_DEVICES
devices, and each gets MAX_STEPS steps; beyond them the plan is that of `elastic-plus`. With interference or tight
memory, infeasible sets of models are tried with fewer models, and the whole search once more with the median slowdown;
but a split may still take more than co-located partitions allow, so that the search is no proof.
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
from cotenant.planners import Problem, elastic_plus
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

DEFAULT_MAX_PARTITIONS = 2  # partitions on a device, where its kind sets no limit
MAX_DEVICES = 8  # devices in a fleet
MAX_STEPS = 10_000  # steps of the search for each fleet
MAX_SPLIT_COLOCATED = 2  # maximum number of models that a split serves fully

# Models with the unserved part of their rates in requests/s, in the order of the problem.
Rates = tuple[tuple[str, float], ...]


class _Device(msgspec.Struct, frozen=True):
    """Describe a device while it is filled. kind: index in the fleet; cuts: share in ‰ and rates of each partition."""

    kind: int
    cuts: tuple[tuple[int, Rates], ...] = ()


Devices = tuple[_Device, ...]


def plan(problem: Problem) -> Plan:
    """Search for the cheapest plan that serves every model; return that of `elastic-plus` where none is cheaper."""
    problem = _with_partition_limit(problem)
    fleet = problem.fleet
    best = msgspec.structs.replace(elastic_plus.plan(problem), planner="ideal")
    searches = _searches(problem)
    all_served = not any(model in searches[0].share_per_rate for model in best.unserved)
    cost = _fleet_cost(problem, [sum(device.kind == kind.name for device in best.devices) for kind in fleet])
    for counts in _fleets(problem):
        if all_served and _fleet_cost(problem, counts) >= cost:
            return best
        devices = next((devices for search in searches if (devices := search.serve(counts))), None)
        if devices is not None:
            return _build(problem, devices)
    return best


def feasible(problem: Problem) -> Plan | None:
    """Search for a plan that serves every model on all devices; None where none is found or there are too many."""
    problem = _with_partition_limit(problem)
    counts = [MAX_DEVICES + 1 if kind.count is None else kind.count for kind in problem.fleet]
    if not 0 < sum(counts) <= MAX_DEVICES:
        return None
    devices = next((devices for search in _searches(problem) if (devices := search.serve(counts))), None)
    return None if devices is None else _build(problem, devices)


def _with_partition_limit(problem: Problem) -> Problem:
    fleet = (
        msgspec.structs.replace(kind, max_partitions=kind.max_partitions or DEFAULT_MAX_PARTITIONS)
        for kind in problem.fleet
    )
    return msgspec.structs.replace(problem, fleet=tuple(fleet))


def _searches(problem: Problem) -> list[_Search]:
    plain = _Search(problem, with_median_slowdown=False)
    return [plain, _Search(problem, with_median_slowdown=True)] if problem.interference.interferes else [plain]


def _build(problem: Problem, devices: Devices) -> Plan:
    drafts = [
        DeviceDraft(problem.fleet[device.kind], [PartitionDraft(share, dict(rates)) for share, rates in device.cuts])
        for device in devices
        if device.cuts
    ]
    return build_plan(problem, "ideal", drafts)


def _fleet_cost(problem: Problem, counts: Sequence[int]) -> tuple[float, int]:
    """Return a fleet's cost per hour and size; a kind without a price among priced ones is the most expensive."""
    missing = 0.0 if all(kind.price is None for kind in problem.fleet) else math.inf
    prices = [missing if kind.price is None else kind.price for kind in problem.fleet]
    return sum(count * price for count, price in zip(counts, prices, strict=True) if count), sum(counts)


def _fleets(problem: Problem) -> list[tuple[int, ...]]:
    """Return all fleets as numbers of devices of each kind, the cheapest first."""
    ranges = [range(1 + min(MAX_DEVICES if kind.count is None else kind.count, MAX_DEVICES)) for kind in problem.fleet]
    fleets = [counts for counts in product(*ranges) if 0 < sum(counts) <= MAX_DEVICES]
    return sorted(fleets, key=lambda counts: _fleet_cost(problem, counts))


class _Search:
    """Search for plans of one problem.

    with_median_slowdown: plan every partition with the median slowdown. share_per_rate: by model and kind, the least
    share in ‰ that one request/s takes (inf: not servable); only models that some kind can serve.
    """

    def __init__(self, problem: Problem, *, with_median_slowdown: bool) -> None:
        self.problem = problem
        self.with_median_slowdown = with_median_slowdown
        self.share_per_rate: dict[str, list[float]] = {}
        self._slos = {model.name: model.slo for model in problem.models}
        for model, rate in problem.rates.items():
            costs = [math.inf if kind.count == 0 else self._share_per_rate(model, kind) for kind in problem.fleet]
            if rate > 0 and min(costs, default=math.inf) < math.inf:
                self.share_per_rate[model] = costs
        # Without interference and memory limits only a device's shares matter, not the models on it.
        self._ignores_contents = not problem.interference.interferes and all(
            kind.memory >= 1 << 62 and kind.geometry is None for kind in problem.fleet
        )
        self._serves_cache: dict[tuple[int, int, Rates], bool] = {}
        self._partial_rate_cache: dict[tuple[int, int, Rates, str], float] = {}
        self._curves: dict[tuple[int, int, str], list[float]] = {}
        self._sets_cache: dict[tuple[int, int, str, Rates], list[Rates]] = {}
        self._failed: set[tuple[object, Rates, int]] = set()
        self._steps = 0

    def serve(self, counts: Sequence[int]) -> Devices | None:
        """Fill the devices of a fleet so that every servable model is served; None where no way is found."""
        devices = tuple(_Device(kind) for kind, count in enumerate(counts) for _ in range(count))
        unserved = tuple((model, self.problem.rates[model]) for model in self.share_per_rate)
        used = {device.kind for device in devices}
        if any(self._least_of_kinds(model, used) == math.inf for model, _ in unserved):
            return None
        self._failed.clear()
        self._steps = MAX_STEPS
        max_splits = (
            sum(self.problem.fleet[device.kind].max_partitions or DEFAULT_MAX_PARTITIONS for device in devices) - 1
        )
        for splits in range(self._fewest_splits(unserved, used), max_splits + 1):
            filled = self._split(devices, unserved, splits)
            if filled is not None or self._steps <= 0:
                return filled
        return None

    def _share_per_rate(self, model: str, kind: Kind) -> float:
        max_rates = [
            max_throughput_batch(latency_curve(self.problem, model, kind.name, cut), self._slos[model])[1]
            for cut in kind.cuts
        ]
        return min((cut / rate for cut, rate in zip(kind.cuts, max_rates, strict=True) if rate), default=math.inf)

    def _least_of_kinds(self, model: str, kinds: set[int]) -> float:
        return min(self.share_per_rate[model][kind] for kind in kinds)

    def _fewest_splits(self, unserved: Rates, kinds: set[int]) -> int:
        """Return the least number of splits: a model that saturates partitions must be on several."""
        splits = 0
        for model, rate in unserved:
            max_rate = max(
                max_throughput_batch(
                    latency_curve(self.problem, model, self.problem.fleet[k].name, cut), self._slos[model]
                )[1]
                for k in kinds
                for cut in self.problem.fleet[k].cuts
            )
            splits += math.ceil(rate / max_rate * (1 - ROUNDING_TOLERANCE)) - 1
        return splits

    def _is_exhausted(self, devices: Devices, unserved: Rates, splits: int) -> bool:
        """Return whether a state needs more than is free, was tried before, or exceeds the steps; count the step."""
        self._steps -= 10
        kinds = {device.kind for device in devices}
        needed = sum(rate * self._least_of_kinds(model, kinds) for model, rate in unserved)
        free = sum(
            WHOLE - sum(share for share, _ in device.cuts) for device in devices if next(self._cuts(device), None)
        )
        if self._steps < 0 or needed > free * (1 + ROUNDING_TOLERANCE):
            return True
        cut: object = sorted(
            (d.kind, sorted(share for share, _ in d.cuts) if self._ignores_contents else d.cuts) for d in devices
        )
        state = repr(cut), unserved, splits
        if state in self._failed:
            return True
        self._failed.add(state)
        return False

    def _split(self, devices: Devices, unserved: Rates, splits: int) -> Devices | None:
        """Search partitions that each serve some models fully and part of another one; then those without (`_pack`)."""
        if splits == 0:
            return self._pack(devices, unserved)
        if self._is_exhausted(devices, unserved, splits):
            return None
        choices = []
        for index, share, whole in self._candidate_partitions(devices):
            for size in range(min(MAX_SPLIT_COLOCATED, len(unserved) - 1) + 1):
                for rates in combinations(unserved, size):
                    for model, rate in unserved if self._steps > 0 else ():
                        if all(model != other for other, _ in rates):
                            partial_rate = self._max_partial_rate(devices[index].kind, share, rates, model)
                            if rate / 100 < partial_rate < rate * (1 - ROUNDING_TOLERANCE):
                                choices.append(
                                    (
                                        self._device_use((*rates, (model, partial_rate))) / whole,
                                        index,
                                        share,
                                        rates,
                                        model,
                                    )
                                )
        for _, index, share, rates, model in sorted(choices, key=lambda choice: -choice[0]):
            partial_rate = self._max_partial_rate(devices[index].kind, share, rates, model)
            grown = self._with_partition(devices, index, share, (*rates, (model, partial_rate)))
            rest = tuple(
                (name, rate - partial_rate if name == model else rate)
                for name, rate in unserved
                if (name, rate) not in rates
            )
            if grown and (filled := self._split(grown, rest, splits - 1)):
                return filled
            if self._steps <= 0:
                break
        return None

    def _pack(self, devices: Devices, unserved: Rates) -> Devices | None:
        """Pack models that are each on one partition."""
        if not unserved:
            return devices
        if self._is_exhausted(devices, unserved, 0):
            return None
        kinds = {device.kind for device in devices}
        partners = {item: sum(self._can_share(kinds, item, other) for other in unserved) for item in unserved}
        order = sorted(unserved, key=lambda item: (partners[item], -self._device_use((item,))))
        pairwise_apart: list[tuple[str, float]] = []
        for item in order:
            if not any(self._can_share(kinds, item, other) for other in pairwise_apart):
                pairwise_apart.append(item)
        if len(pairwise_apart) > sum(self._partitions_left(device) for device in devices):
            return None
        first = order[0]
        others = tuple(item for item in unserved if item != first)
        choices = []
        smaller_share: dict[int, int] = {}
        for index, share, whole in self._candidate_partitions(devices):
            kind = devices[index].kind
            choices += [
                (self._device_use(rates) / whole, index, share, rates)
                for rates in self._maximal_sets(kind, share, first, others)
                if not (
                    self._ignores_contents
                    and index in smaller_share
                    and self._serves_fully(kind, smaller_share[index], rates)
                )
            ]
            smaller_share[index] = share
        choices.sort(key=lambda choice: -choice[0])
        for _, index, share, rates in choices:
            grown = self._with_partition(devices, index, share, rates)
            if grown is None:
                # Memory or interference forbids it: try with fewer models besides the first.
                shorter = [tuple(item for item in rates if item != dropped) for dropped in rates if dropped != first]
                choices.extend(
                    (0.0, index, share, subset) for subset in shorter if (0.0, index, share, subset) not in choices
                )
            elif filled := self._pack(grown, tuple(item for item in unserved if item not in rates)):
                return filled
            if self._steps <= 0:
                break
        return None

    def _candidate_partitions(self, devices: Devices) -> Iterator[tuple[int, int, int]]:
        """Yield the device, share and used part of the device of every possible partition; equivalent ones once."""
        seen = set()
        for index, device in enumerate(devices):
            state = (device.kind, tuple(share for share, _ in device.cuts) if self._ignores_contents else device.cuts)
            if state in seen:
                continue
            seen.add(state)
            for share, whole in self._cuts(device):
                yield index, share, whole

    def _partitions_left(self, device: _Device) -> int:
        """Return how many more partitions a device may have, at most."""
        limit = self.problem.fleet[device.kind].max_partitions or DEFAULT_MAX_PARTITIONS
        return limit - len(device.cuts) if next(self._cuts(device), None) else 0

    def _can_share(self, kinds: set[int], a: tuple[str, float], b: tuple[str, float]) -> bool:
        """Return whether any partition serves both fully."""
        return any(
            self._serves_fully(kind, self.problem.fleet[kind].cuts[-1], (a, b) if a < b else (b, a)) for kind in kinds
        )

    def _cuts(self, device: _Device) -> Iterator[tuple[int, int]]:
        """Yield legal shares and what each uses of the device: the last partition takes all that is left."""
        kind = self.problem.fleet[device.kind]
        limit = kind.max_partitions or DEFAULT_MAX_PARTITIONS
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

    def _with_partition(self, devices: Devices, index: int, share: int, rates: Rates) -> Devices | None:
        """Return the devices with one more partition; None where that is infeasible."""
        device = _Device(devices[index].kind, (*devices[index].cuts, (share, rates)))
        cuts = [PartitionDraft(share, dict(rates)) for share, rates in device.cuts]
        if not self._ignores_contents and not fits_device(self.problem, self.problem.fleet[device.kind], cuts):
            return None
        return (*devices[:index], device, *devices[index + 1 :])

    def _device_use(self, rates: Rates) -> float:
        return sum(rate * min(self.share_per_rate[model]) for model, rate in rates)

    def _round_share(self, kind: int, share: int, model: str, rate: float) -> RoundShare:
        key = kind, share, model
        if key not in self._curves:
            device_kind = self.problem.fleet[kind]
            factor = median_slowdown(self.problem, model, device_kind, share) if self.with_median_slowdown else 1.0
            self._curves[key] = [
                factor * latency for latency in latency_curve(self.problem, model, device_kind.name, share)
            ]
        return RoundShare(self._curves[key], rate, self._slos[model])

    def _serves_fully(self, kind: int, share: int, rates: Rates) -> bool:
        """Return whether a partition serves models fully."""
        key = kind, share, rates
        if key not in self._serves_cache:
            self._serves_cache[key] = (
                smallest_batches([self._round_share(kind, share, *item) for item in rates]) is not None
            )
        return self._serves_cache[key]

    def _max_partial_rate(self, kind: int, share: int, rates: Rates, model: str) -> float:
        """Return the highest requests/s of a model together with others that are served fully."""
        key = kind, share, rates, model
        if not self._serves_fully(kind, share, rates):
            return 0.0
        if key not in self._partial_rate_cache:
            self._steps -= 1
            round_shares = [self._round_share(kind, share, *item) for item in rates]
            self._partial_rate_cache[key] = second_model_rate(round_shares, self._round_share(kind, share, model, 0.0))
        return self._partial_rate_cache[key]

    def _maximal_sets(self, kind: int, share: int, first: tuple[str, float], others: Rates) -> list[Rates]:
        """Return every maximal set of models, including the first, that a partition serves fully."""
        key = kind, share, first[0], (first, *others)
        if key not in self._sets_cache:
            self._sets_cache[key] = self._enumerate_maximal_sets(kind, share, (first,), others)
        return self._sets_cache[key]

    def _enumerate_maximal_sets(self, kind: int, share: int, base: Rates, others: Rates) -> list[Rates]:
        if not self._serves_fully(kind, share, base):
            return []
        others = tuple(item for item in others if self._serves_fully(kind, share, (*base, item)))
        if self._serves_fully(kind, share, (*base, *others)):
            return [(*base, *others)]
        maximal: list[frozenset[tuple[str, float]]] = []
        for size in range(len(others) - 1, -1, -1):
            for subset in combinations(others, size):
                if not any(larger.issuperset(subset) for larger in maximal) and self._serves_fully(
                    kind, share, (*base, *subset)
                ):
                    maximal.append(frozenset(subset))
        return [(*base, *(item for item in others if item in subset)) for subset in maximal]


def second_model_rate(round_shares: Sequence[RoundShare], second: RoundShare) -> float:
    """Return the highest requests/s of a second model on a partition that serves others; its own rate is ignored.

    For each of its batches the others' smallest batches are a least fixed point, as in `smallest_batches`, and only
    grow with it.
    """
    batches = [1] * len(round_shares)
    best = 0.0
    for rows, latency in enumerate(second.curve, 1):
        while True:
            length = latency + sum(
                round_share.curve[batch - 1] for round_share, batch in zip(round_shares, batches, strict=True)
            )
            if length + latency > second.slo:
                return best
            grew = False
            for i, round_share in enumerate(round_shares):
                need = math.ceil(round_share.rate * length * (1 - ROUNDING_TOLERANCE))
                if need > len(round_share.curve) or length + round_share.curve[batches[i] - 1] > round_share.slo:
                    return best
                if need > batches[i]:
                    batches[i], grew = need, True
            if not grew:
                break
        best = max(best, rows / length)
    return best
