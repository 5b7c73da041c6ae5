"""Elastic partitioning: devices are cut as the models need it, and cuts are shared in time where two fit into one.

gpulet paper, section 4.3, Algorithm 1. Models come in ascending order of rate · SLO. A model asks for the smaller of
the share at the knee of its curve and the smallest share that serves what remains of its rate, and gets the best
fit: a piece of a device that is just large enough, cut to size where the device may still be cut. If what it would put
there can share a partition in time with what stands already, the two become one.

The paper leaves open what happens when no piece is as large as asked for: here the model takes the largest that is
left, and at last whatever room the partitions in use still have. A piece that may not be cut and is larger than asked
for is used to the full. A partition that will have a neighbour is reckoned with a slowdown as it is usual here, so that
the neighbour finds room, and every step is checked with the slowdowns that all on that device suffer from it. The order
is a heuristic of the paper's; where it leaves a model unserved, others follow in which those come first that were left.
"""

from __future__ import annotations

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
    build_plan,
    fits_device,
    knee_share,
    latency_curve,
    max_throughput_batch,
    median_slowdown,
    sorted_by_price,
)

# Orders that are tried after the paper's, where that leaves something.
ORDERS = 6


def plan(problem: Problem) -> Plan:
    fleet = _Fleet(problem)
    order = sorted(
        (name for name, rate in problem.rates.items() if rate > 0 and fleet.serves(name)),
        key=lambda name: problem.rates[name] * problem.model(name).slo,
    )
    best = made = fleet.filled(order)
    for _ in range(ORDERS):
        lost = [name for name in order if name in made.unserved]
        if lost == order[: len(lost)]:
            break
        order.sort(key=lambda name: name not in lost)
        made = fleet.filled(order)
        best = min(best, made, key=lambda plan: sum(plan.unserved.values()))
    return best


class _Want(msgspec.Struct, frozen=True):
    """share: the one to ask for (‰); rate: what to put there."""

    share: int
    rate: float


class _Fleet:
    """Devices as they fill. bins: those in use; what models carry is kept from one order to the next."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = sorted_by_price(problem.fleet)
        self.bins: list[DeviceDraft] = []
        self._usual: dict[tuple[str, str], dict[int, float]] = {}
        self._most: dict[tuple[str, str], dict[int, float]] = {}

    def serves(self, model: str) -> bool:
        """Whether any share of any kind serves it in time."""
        return any(self._rates(model, kind) for kind in self.kinds)

    def filled(self, order: Sequence[str]) -> Plan:
        """The plan for models that come in this order (Algorithm 1, lines 3 to 12)."""
        self.bins = []
        for model in order:
            left = self.problem.rates[model]
            while left > ROUNDING_TOLERANCE * self.problem.rates[model]:
                placed = self.place(model, left)
                if placed == 0:
                    break
                left -= placed
        return build_plan(self.problem, "elastic", self.bins)

    def place(self, model: str, rate: float) -> float:
        """Put as much of the rate as one step of Algorithm 1 does. Answers how much, 0 where nothing more goes."""
        wants = {kind.name: want for kind in self.kinds if (want := self._want(model, kind, rate))}
        for kind in self.kinds:
            want = wants.get(kind.name)
            if want and (placed := self._merge(model, want, kind) or self._best_fit(model, rate, want, kind)):
                return placed
        return self._squeeze(model, rate)

    def _rates(self, model: str, kind: Kind) -> dict[int, float]:
        """Requests/s that the model reaches alone on each legal share, where it reaches any."""
        key = model, kind.name
        if key not in self._most:
            slo = self.problem.model(model).slo
            most = {
                cut: max_throughput_batch(latency_curve(self.problem, model, kind.name, cut), slo)[1]
                for cut in kind.cuts
            }
            self._most[key] = {cut: reached for cut, reached in most.items() if reached > 0}
        return self._most[key]

    def _beside(self, model: str, kind: Kind) -> dict[int, float]:
        """The same with a neighbour of the usual kind in the rest of the device."""
        key = model, kind.name
        if key not in self._usual:
            self._usual[key] = {}
            for cut, most in self._rates(model, kind).items():
                factor = median_slowdown(self.problem, model, kind, cut)
                if factor > 1:
                    alone = latency_curve(self.problem, model, kind.name, cut)
                    _, most = max_throughput_batch(
                        tuple(factor * latency for latency in alone), self.problem.model(model).slo
                    )
                if most > 0:
                    self._usual[key][cut] = most
        return self._usual[key]

    def _want(self, model: str, kind: Kind, rate: float) -> _Want | None:
        """p_ideal = min(p_eff, p_req) of Algorithm 1, lines 6 to 8."""
        most = self._beside(model, kind)
        if not most:
            return None
        efficient = knee_share(most)
        share = next((cut for cut in most if cut <= efficient and most[cut] >= rate), efficient)
        return _Want(share, min(rate, most[share]))

    def _pieces(self, kind: Kind) -> Iterator[tuple[int, DeviceDraft]]:
        """What is left to be cut from devices of a kind, and its size: those in use, and a fresh one where there is."""
        used = 0
        for bin_ in self.bins:
            if bin_.kind is kind:
                used += 1
                if kind.max_partitions is None or len(bin_.cuts) < kind.max_partitions:
                    yield bin_.free, bin_
        if kind.count is None or used < kind.count:
            fresh = DeviceDraft(kind, [])
            yield fresh.free, fresh

    def _best_fit(self, model: str, left: float, want: _Want, kind: Kind) -> float:
        """FindBestFit, lines 14 to 25: the smallest piece that is large enough; failing that, the largest there is."""
        pieces = sorted(self._pieces(kind), key=lambda piece: (piece[0] < want.share, abs(piece[0] - want.share)))
        for free, bin_ in pieces:
            last = kind.max_partitions is not None and len(bin_.cuts) + 1 == kind.max_partitions
            legal = [cut for cut in kind.cuts if cut <= free]
            if not legal:
                continue
            share = want.share if want.share <= free and not last else legal[-1]
            rate = min(left if share > want.share else want.rate, self._beside(model, kind).get(share, 0.0))
            # Beside neighbours a share carries less than alone: take more of it, or else put less there.
            for part in (1.0, 0.5, 0.25, 0.125) if rate else ():
                for size in [cut for cut in legal if cut >= share]:
                    cut = PartitionDraft(size, {model: rate * part})
                    if fits_device(self.problem, kind, [*bin_.cuts, cut]):
                        if not bin_.cuts:
                            self.bins.append(bin_)
                        bin_.cuts.append(cut)
                        return rate * part
        return 0.0

    def _merge(self, model: str, want: _Want, kind: Kind) -> float:
        """TemporalScheduling, line 22: share a partition in time that needs no growth, or less than a piece of its own
        would take."""
        choices = [
            (size - cut.share, bin_, cut, size)
            for bin_ in self.bins
            if bin_.kind is kind
            for growth in (min(bin_.free, want.share - 1),)
            for cut in bin_.cuts
            if model not in cut.rates
            for size in kind.cuts[bisect_left(kind.cuts, cut.share) : bisect_right(kind.cuts, cut.share + growth)]
            if want.rate <= self._room(bin_, cut, size, model)
        ]
        for _, bin_, cut, size in sorted(choices, key=lambda choice: choice[0]):
            grown = PartitionDraft(size, cut.rates | {model: want.rate})
            if self._fits(bin_, cut, grown):
                bin_.cuts[bin_.cuts.index(cut)] = grown
                return want.rate
        return 0.0

    def _squeeze(self, model: str, rate: float) -> float:
        """Give the model the most that any one partition in use can take beside what it has, if it is worth while."""
        best, choice = rate / 100, None
        for bin_ in self.bins:
            for cut in bin_.cuts:
                size = max(size for size in bin_.kind.cuts if size <= cut.share + bin_.free)
                before = cut.rates.get(model, 0.0)
                low, high = best, min(rate, self._room(bin_, cut, size, model))
                # The first try asks only whether this one beats the best so far.
                added = low
                while high - low > rate / 1000:
                    grown = PartitionDraft(size, cut.rates | {model: before + added})
                    if self._fits(bin_, cut, grown):
                        low, best, choice = added, added, (bin_, cut, grown)
                    elif choice is None or choice[1] is not cut:
                        break
                    else:
                        high = added
                    added = (low + high) / 2
        if choice is None:
            return 0.0
        bin_, cut, grown = choice
        # No larger than it must be: others come after.
        sizes = (PartitionDraft(size, grown.rates) for size in bin_.kind.cuts if cut.share <= size < grown.share)
        bin_.cuts[bin_.cuts.index(cut)] = next((smaller for smaller in sizes if self._fits(bin_, cut, smaller)), grown)
        return best

    def _room(self, bin_: DeviceDraft, cut: PartitionDraft, size: int, model: str) -> float:
        """No more requests/s than this can be added to a cut that is grown to `size`.

        A round spends at least r · D / (the most requests/s alone) of its length D on each model.
        """
        taken = sum(rate / self._rates(name, bin_.kind)[size] for name, rate in cut.rates.items())
        return (1 - taken) * self._rates(model, bin_.kind).get(size, 0.0) * (1 + ROUNDING_TOLERANCE)

    def _fits(self, bin_: DeviceDraft, old: PartitionDraft, new: PartitionDraft) -> bool:
        """Whether the device holds with one of its cuts replaced."""
        return fits_device(self.problem, bin_.kind, [new if cut is old else cut for cut in bin_.cuts])
