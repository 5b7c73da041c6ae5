"""Plan by gpulet's elastic partitioning with what serves more: `elastic-plus`, ours.

Its base is Algorithm 1 of the gpulet paper (`elastic`): models in ascending order of rate · SLO, for each the smaller
of the share at the knee of its throughput curve and the smallest share that serves the rest of its rate, by best fit.
Other than there

- a model first time-shares a partition that is there, which may grow for it, and gets a piece only where none does;
- where no piece is large enough the model takes the largest free one, and last, the capacity that partitions in use
  have left;
- a partition that will be co-located is planned with the median slowdown, to leave room for the other;
- where an order leaves models unserved, up to six others are tried with those first.

`docs/reproduction.md` compares it with `elastic` in figures 5, 6 and 13 to 17.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    RoundShare,
    build_plan,
    fits_device,
    footprint,
    knee_share,
    latency_curve,
    max_throughput_batch,
    median_slowdown,
    smallest_batches,
    sorted_by_price,
)

MAX_ORDERS = 6  # tried after the paper's, where that leaves models unserved


def plan(problem: Problem) -> Plan:
    """Plan by elastic partitioning with extensions; of the orders tried, return the plan that leaves least unserved."""
    fleet = _Fleet(problem)
    order = sorted(
        (name for name, rate in problem.rates.items() if rate > 0 and fleet.serves(name)),
        key=lambda name: problem.rates[name] * problem.model(name).slo,
    )
    best = candidate = fleet.fill_order(order)
    for _ in range(MAX_ORDERS):
        unserved = [name for name in order if name in candidate.unserved]
        if unserved == order[: len(unserved)]:
            break
        order.sort(key=lambda name: name not in unserved)
        candidate = fleet.fill_order(order)
        best = min(best, candidate, key=lambda plan: sum(plan.unserved.values()))
    return best


class _Target(msgspec.Struct, frozen=True):
    """Describe the partition that a model should get next. share: ‰; rate: requests/s to place on it."""

    share: int
    rate: float


class _Fleet:
    """Fill devices with models. devices: those in use; models' throughputs are cached over all orders."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = sorted_by_price(problem.fleet)
        self.devices: list[DeviceDraft] = []
        self._colocated_cache: dict[tuple[str, str], dict[int, float]] = {}
        self._alone_cache: dict[tuple[str, str], dict[int, float]] = {}
        self._memory_cache: dict[tuple[str, int, tuple[tuple[str, float], ...]], float] = {}

    def serves(self, model: str) -> bool:
        """Return whether any share of any kind serves a model within its target."""
        return any(self._max_rates(model, kind) for kind in self.kinds)

    def fill_order(self, order: Sequence[str]) -> Plan:
        """Return the plan with models placed in this order (Algorithm 1, lines 3 to 12)."""
        self.devices = []
        for model in order:
            unserved = self.problem.rates[model]
            while unserved > ROUNDING_TOLERANCE * self.problem.rates[model]:
                placed = self.place(model, unserved)
                if placed == 0:
                    break
                unserved -= placed
        return build_plan(self.problem, "elastic-plus", self.devices)

    def place(self, model: str, rate: float) -> float:
        """Place as much of a model's rate as one step of Algorithm 1 does; return how much, 0 where nothing fits."""
        targets = {kind.name: target for kind in self.kinds if (target := self._target(model, kind, rate))}
        for kind in self.kinds:
            target = targets.get(kind.name)
            if target and (placed := self._merge(model, target, kind) or self._best_fit(model, rate, target, kind)):
                return placed
        return self._fill_leftover_capacity(model, rate)

    def _max_rates(self, model: str, kind: Kind) -> dict[int, float]:
        """Return the requests/s that a model sustains alone on each legal share; omit those of none."""
        key = model, kind.name
        if key not in self._alone_cache:
            slo = self.problem.model(model).slo
            max_rates = {
                cut: max_throughput_batch(latency_curve(self.problem, model, kind.name, cut), slo)[1]
                for cut in kind.cuts
            }
            self._alone_cache[key] = {cut: max_rate for cut, max_rate in max_rates.items() if max_rate > 0}
        return self._alone_cache[key]

    def _max_rates_colocated(self, model: str, kind: Kind) -> dict[int, float]:
        """Return the same at the median slowdown, with another model on the rest of the device."""
        key = model, kind.name
        if key not in self._colocated_cache:
            self._colocated_cache[key] = {}
            for cut, max_rate in self._max_rates(model, kind).items():
                factor = median_slowdown(self.problem, model, kind, cut)
                if factor > 1:
                    alone = latency_curve(self.problem, model, kind.name, cut)
                    _, max_rate = max_throughput_batch(
                        tuple(factor * latency for latency in alone), self.problem.model(model).slo
                    )
                if max_rate > 0:
                    self._colocated_cache[key][cut] = max_rate
        return self._colocated_cache[key]

    def _target(self, model: str, kind: Kind, rate: float) -> _Target | None:
        """Return p_ideal = min(p_eff, p_req) of Algorithm 1, lines 6 to 8."""
        max_rates = self._max_rates_colocated(model, kind)
        if not max_rates:
            return None
        efficient = knee_share(max_rates)
        share = next((cut for cut in max_rates if cut <= efficient and max_rates[cut] >= rate), efficient)
        return _Target(share, min(rate, max_rates[share]))

    def _pieces(self, kind: Kind) -> Iterator[tuple[int, DeviceDraft]]:
        """Yield the devices of a kind that may be cut further, with their free share: those in use and one new."""
        used = 0
        for device in self.devices:
            if device.kind is kind:
                used += 1
                if kind.max_partitions is None or len(device.cuts) < kind.max_partitions:
                    yield device.free, device
        if kind.count is None or used < kind.count:
            fresh = DeviceDraft(kind, [])
            yield fresh.free, fresh

    def _best_fit(self, model: str, unserved: float, target: _Target, kind: Kind) -> float:
        """FindBestFit, lines 14 to 25: place on the smallest piece that is large enough, else on the largest."""
        pieces = sorted(self._pieces(kind), key=lambda piece: (piece[0] < target.share, abs(piece[0] - target.share)))
        for free, device in pieces:
            last = kind.max_partitions is not None and len(device.cuts) + 1 == kind.max_partitions
            legal = [cut for cut in kind.cuts if cut <= free]
            if not legal:
                continue
            share = target.share if target.share <= free and not last else legal[-1]
            rate = min(
                unserved if share > target.share else target.rate,
                self._max_rates_colocated(model, kind).get(share, 0.0),
            )
            left = kind.memory - sum(self._least_memory(kind, cut) for cut in device.cuts)
            # Under the actual interference the share may sustain less: take a larger one, or else place less.
            for fraction in (1.0, 0.5, 0.25, 0.125) if rate else ():
                for size in [cut for cut in legal if cut >= share]:
                    cut = PartitionDraft(size, {model: rate * fraction})
                    if self._least_memory(kind, cut) > left:
                        continue
                    if fits_device(self.problem, kind, [*device.cuts, cut]):
                        if not device.cuts:
                            self.devices.append(device)
                        device.cuts.append(cut)
                        return rate * fraction
        return 0.0

    def _least_memory(self, kind: Kind, cut: PartitionDraft) -> float:
        """Return the bytes that a partition needs whatever is beside it; inf where it keeps no target even alone.

        Where memory is what is short, this spares looking at whole devices, at every share and part of the rate.
        """
        key = kind.name, cut.share, tuple(cut.rates.items())
        if key not in self._memory_cache:
            shares = [
                RoundShare(latency_curve(self.problem, name, kind.name, cut.share), rate, self.problem.model(name).slo)
                for name, rate in cut.rates.items()
            ]
            batches = smallest_batches(shares)
            self._memory_cache[key] = (
                math.inf
                if batches is None
                else sum(
                    footprint(self.problem, kind.name, name, batch)
                    for name, batch in zip(cut.rates, batches, strict=True)
                )
            )
        return self._memory_cache[key]

    def _merge(self, model: str, target: _Target, kind: Kind) -> float:
        """TemporalScheduling, line 22: time-share a partition, grown by less than one of its own would take."""
        choices = [
            (share - cut.share, device, cut, share)
            for device in self.devices
            if device.kind is kind
            for max_growth in (min(device.free, target.share - 1),)
            for cut in device.cuts
            if model not in cut.rates
            for share in kind.cuts[bisect_left(kind.cuts, cut.share) : bisect_right(kind.cuts, cut.share + max_growth)]
            if target.rate <= self._free_rate(device, cut, share, model)
        ]
        for _, device, cut, share in sorted(choices, key=lambda choice: choice[0]):
            grown = PartitionDraft(share, cut.rates | {model: target.rate})
            if self._fits(device, cut, grown):
                device.cuts[device.cuts.index(cut)] = grown
                return target.rate
        return 0.0

    def _fill_leftover_capacity(self, model: str, rate: float) -> float:
        """Add to the one partition in use that can take most of the rate, if that is at least a hundredth of it."""
        best, choice = rate / 100, None
        for device in self.devices:
            for cut in device.cuts:
                share = max(share for share in device.kind.cuts if share <= cut.share + device.free)
                current = cut.rates.get(model, 0.0)
                low, high = best, min(rate, self._free_rate(device, cut, share, model))
                # The first step only tests whether this partition beats the best so far.
                added = low
                while high - low > rate / 1000:
                    grown = PartitionDraft(share, cut.rates | {model: current + added})
                    if self._fits(device, cut, grown):
                        low, best, choice = added, added, (device, cut, grown)
                    elif choice is None or choice[1] is not cut:
                        break
                    else:
                        high = added
                    added = (low + high) / 2
        if choice is None:
            return 0.0
        device, cut, grown = choice
        # No larger than needed: other models follow.
        sizes = (PartitionDraft(share, grown.rates) for share in device.kind.cuts if cut.share <= share < grown.share)
        device.cuts[device.cuts.index(cut)] = next(
            (smaller for smaller in sizes if self._fits(device, cut, smaller)), grown
        )
        return best

    def _free_rate(self, device: DeviceDraft, cut: PartitionDraft, share: int, model: str) -> float:
        """Return an upper bound on the requests/s that can be added to a partition grown to a share.

        A round of length D spends at least r · D / (its highest rate alone) on each model.
        """
        used = sum(rate / self._max_rates(name, device.kind)[share] for name, rate in cut.rates.items())
        return (1 - used) * self._max_rates(model, device.kind).get(share, 0.0) * (1 + ROUNDING_TOLERANCE)

    def _fits(self, device: DeviceDraft, old: PartitionDraft, new: PartitionDraft) -> bool:
        """Return whether the device is feasible with one of its partitions replaced."""
        return fits_device(self.problem, device.kind, [new if cut is old else cut for cut in device.cuts])
