"""Plan by elastic partitioning: gpulet paper, section 4.3, Algorithm 1, line by line.

Models come in ascending order of rate · SLO. Each gets one gpulet (partition) after the other: of the ideal share, the
smaller of the one at the knee of its throughput curve and the smallest that serves the rest of its rate, cut from the
smallest remaining piece that is large enough. A new gpulet is merged with one that is there already where the two can
share its time.

Where the paper is silent or speaks of one kind of GPU:

- line 4: a rate that no remaining gpulet takes is left unserved;
- line 7 keeps the batch that the rest of the rate has at the knee, as in the published program;
- line 17: with more than two partitions for each device, a piece that is left over may be cut again; one that is larger
  than the ideal share and may not be cut is taken whole;
- line 20: batches take at most half of the target, since requests wait for the batch before theirs (section 2.2);
- a gpulet whose neighbours would then miss their targets takes rate from them, which is placed again, as in the
  published program; a gpulet that would cost them as many requests/s as it serves is not taken;
- line 22: gpulets are tried in the order in which they were allocated;
- kinds of devices are tried in order of price.

`elastic-plus` is the same idea with what serves more besides.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    batched_partitions,
    build_plan,
    fits_device,
    knee_share,
    latency_curve,
    max_throughput_batch,
    slowdown,
    sorted_by_price,
)
from cotenant.predictors import Load

PASSES = 2  # over the models: the second places what neighbours of later gpulets have lost
HALVINGS = 5  # of the part of their rates that neighbours lose


def plan(problem: Problem) -> Plan:
    """Plan by elastic partitioning; what no gpulet takes is unserved."""
    partitioning = _Partitioning(problem)
    remaining = {name: rate for name, rate in problem.rates.items() if rate > 0}
    order = sorted(remaining, key=lambda name: problem.rates[name] * problem.model(name).slo)  # line 2
    for model in order * PASSES:  # line 3
        while remaining[model] > ROUNDING_TOLERANCE * problem.rates[model]:  # lines 4 and 5
            taken, lost = partitioning.allocate(model, remaining[model])
            if not taken:
                break
            remaining[model] -= taken
            for name, rate in lost.items():
                remaining[name] += rate
    return build_plan(problem, "elastic", partitioning.devices)


class _Gpulet(msgspec.Struct, frozen=True):
    """Describe a gpulet that a model may get: a piece of a device. beside: the device's others, as they will be."""

    device: DeviceDraft
    draft: PartitionDraft
    beside: list[PartitionDraft]


class _Partitioning:
    """Hold the devices that have gpulets, and allocate more."""

    def __init__(self, problem: Problem) -> None:
        self.devices: list[DeviceDraft] = []
        self._problem = problem
        self._kinds = sorted_by_price(problem.fleet)

    def allocate(self, model: str, rate: float) -> tuple[float, dict[str, float]]:
        """Give a model its next gpulet (lines 6 to 10); return the requests/s that it serves, 0 where there is none,
        and those that models beside it lose, by model."""
        for kind in self._kinds:
            ideal = self._ideal_share(model, kind, rate)
            gpulet = None if ideal is None else self._best_fit(model, rate, ideal, kind)
            if gpulet is not None:
                before = self._rates()
                if not self._merge(gpulet):
                    self._apply(gpulet)
                after = self._rates()
                taken = gpulet.draft.rates[model]
                after[model] -= taken
                return taken, {name: lost for name, had in before.items() if (lost := had - after[name]) > 0}
        return 0.0, {}

    def _rates(self) -> dict[str, float]:
        rates = dict.fromkeys(self._problem.rates, 0.0)
        for device in self.devices:
            for cut in device.cuts:
                rates = _added(rates, cut.rates)
        return rates

    def _ideal_share(self, model: str, kind: Kind, rate: float) -> int | None:
        """Return the smaller of the share at the knee and the smallest one for the rate (lines 6 to 8); None where no
        share meets the target."""
        slo = self._problem.model(model).slo
        curves = {share: latency_curve(self._problem, model, kind.name, share) for share in kind.cuts}
        throughputs = {share: max_throughput_batch(curve, slo)[1] for share, curve in curves.items()}
        throughputs = {share: most for share, most in throughputs.items() if most > 0}
        if not throughputs:
            return None
        knee = knee_share(throughputs)
        if rate > throughputs[knee]:
            return knee
        batch = max((b for b, seconds in enumerate(curves[knee], 1) if seconds + b / rate <= slo), default=1)

        def serves(share: int) -> bool:
            seconds = curves[share][batch - 1] if curves[share] else slo
            # Where a second request comes too late for the first, the first waits for no other.
            return seconds <= min(batch / rate, slo - seconds)

        return next(share for share in kind.cuts if share == knee or serves(share))

    def _best_fit(self, model: str, rate: float, ideal: int, kind: Kind) -> _Gpulet | None:
        """FINDBESTFIT, lines 14 to 21: the smallest remaining piece that is large enough and meets all targets."""
        for size, device in sorted(self._remaining(kind), key=lambda piece: piece[0]):
            if size < ideal:
                continue
            share = ideal if _may_be_split(device) else size
            most = self._throughput(model, device, share)
            draft = PartitionDraft(share, {model: min(rate, most)})
            beside = self._beside(device, draft) if most else None
            if beside is not None and _total(device.cuts) - _total(beside) < draft.rates[model]:
                return _Gpulet(device, draft, beside)
        return None

    def _beside(self, device: DeviceDraft, draft: PartitionDraft) -> list[PartitionDraft] | None:
        """Return what is on a device already at the largest multiple of its rates that meets all targets beside a new
        partition; None where none does."""
        best, low, step = None, 0.0, 1.0
        for _ in range(1 + HALVINGS):
            cuts = [
                PartitionDraft(cut.share, {m: (low + step) * r for m, r in cut.rates.items()}) for cut in device.cuts
            ]
            if fits_device(self._problem, device.kind, [*cuts, draft]):
                best, low = cuts, low + step
                if low == 1.0:
                    break
            step /= 2
        return best

    def _remaining(self, kind: Kind) -> Iterator[tuple[int, DeviceDraft]]:
        """Yield the remaining gpulets of a kind: what is left of devices in use, and a whole one."""
        used = [device for device in self.devices if device.kind is kind]
        for device in used:
            if kind.max_partitions is None or len(device.cuts) < kind.max_partitions:
                size = max((share for share in kind.cuts if share <= device.free), default=0)
                if size:
                    yield size, device
        if kind.count is None or len(used) < kind.count:
            yield kind.cuts[-1], DeviceDraft(kind, [])

    def _throughput(self, model: str, device: DeviceDraft, share: int) -> float:
        """Return the requests/s that a model sustains on a share beside what is on the device already (line 20)."""
        kind = device.kind
        curve = latency_curve(self._problem, model, kind.name, share)
        there = batched_partitions(self._problem, kind, device.cuts) if device.cuts else ()
        assert there is not None, "what was allocated meets its targets"
        others = [[Load(p.model, kind.name, p.batch, part.share) for p in part.placements] for part in there]
        slowed = [
            seconds * slowdown(self._problem, Load(model, kind.name, batch, share), others)
            for batch, seconds in enumerate(curve, 1)
        ]
        return max_throughput_batch(tuple(slowed), self._problem.model(model).slo)[1]

    def _apply(self, gpulet: _Gpulet) -> None:
        if not gpulet.device.cuts:
            self.devices.append(gpulet.device)
        gpulet.device.cuts = [*gpulet.beside, gpulet.draft]

    def _merge(self, new: _Gpulet) -> bool:
        """TEMPORALSCHEDULING, line 22: put a gpulet and one that is there into the larger of the two, where that meets
        all targets; return whether it did."""
        kind = new.device.kind
        for device in self.devices:
            for index, old in enumerate(device.cuts if device.kind is kind else ()):
                merged = PartitionDraft(max(old.share, new.draft.share), _added(old.rates, new.draft.rates))
                others = [*device.cuts[:index], *device.cuts[index + 1 :]]
                stays = old.share >= new.draft.share
                if device is new.device and not stays:
                    beside = [*new.beside[:index], *new.beside[index + 1 :]]
                else:
                    beside = others if stays else new.beside
                if not fits_device(self._problem, kind, [*beside, merged]):
                    continue
                if stays:
                    device.cuts[index] = merged
                else:
                    device.cuts = others  # empty: the device is whole again
                    self.devices = [each for each in self.devices if each.cuts]
                    self._apply(_Gpulet(new.device, merged, beside))
                return True
        return False


def _may_be_split(device: DeviceDraft) -> bool:
    """Return whether what remains of a device may be cut in two (line 17)."""
    most = device.kind.max_partitions
    return most is None or len(device.cuts) + 1 < most


def _added(rates: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {name: rates.get(name, 0.0) + more.get(name, 0.0) for name in rates | more}


def _total(cuts: list[PartitionDraft]) -> float:
    return sum(sum(cut.rates.values()) for cut in cuts)
