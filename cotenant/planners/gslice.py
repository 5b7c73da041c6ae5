"""Plan by GSLICE: shares and batches tuned by feedback from the latency and throughput that are observed.

GSLICE (SoCC 2020), as InSS and gpulet tell it, and as iGniter ran it: devices are shared in space only, one model on
each partition. Two loops run beside each other, and neither predicts interference; it is in what they observe.

- Every period a model's batch is tuned: one less where its latency exceeds half of the target, one more where its
  throughput is below its rate.
- Every epoch, which is many periods, its share is tuned: in proportion to rate over throughput where that is below the
  rate; in proportion to latency over half of the target where it lies below that by more than a tenth.

The environment is the problem's: profiled latency times the slowdown by what is on the device. iGniter's Figure 16 has
what the real GSLICE did to ResNet-50: from 30 % at 110.4 of 150 requests/s to 40.8 %, 30 · 150 / 110.4, while its batch
went back and forth between 1 and 2, which was too slow with 1 and too late with 2.

Where a plan needs more than a loop that never ends, or the texts are silent:

- a model starts on the smallest legal share with a batch of 1, and shares are rounded up to legal ones;
- an epoch lasts until batches no longer change, or come back to what they were: of these, those in time remain;
- a share that was too small is not tried again, so that tuning ends; the real one went from 58.2 to 48.6 to 74.5 %;
- too slow by less than a tenth also takes a larger share, since the rate must be met;
- GSLICE has one GPU. Here a model, tuned alone, goes to the device on which that leaves the least, largest shares
  first, and all models there are tuned again; where one then finds no share, it goes to the next device;
- a rate beyond a whole device is split into equal parts; kinds of devices are tried in order of price; what does not
  fit is unserved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.planners.capacity import (
    ROUNDING_TOLERANCE,
    DeviceDraft,
    PartitionDraft,
    latency_curve,
    partitions_with_batches,
    slowdown,
)
from cotenant.planners.kind_by_kind import plan_kind_by_kind, split_into_instances
from cotenant.predictors import Load

THRESHOLD = 0.1  # of half of the target, by which a latency must lie below it for a smaller share


class Slice(msgspec.Struct, frozen=True):
    """Describe a model on a partition of its own, while it is tuned.

    rate: requests/s; share: ‰; too_small: the largest share that was seen not to suffice.
    """

    model: str
    rate: float
    share: int
    batch: int = 1
    too_small: int = 0


class Observation(msgspec.Struct, frozen=True):
    """Hold what is observed of a model. latency: seconds of a batch; throughput: rows/s of full batches."""

    latency: float
    throughput: float


def plan(problem: Problem) -> Plan:
    """Plan by GSLICE; what no device takes is unserved."""
    return plan_kind_by_kind(problem, "gslice", lambda kind, rates: _place(problem, kind, rates))


def _place(problem: Problem, kind: Kind, rates: Mapping[str, float]) -> list[DeviceDraft]:
    tuner = Tuner(problem, kind)
    slices: list[tuple[Slice, ...]] = []
    for model, rate in rates.items():
        instances = split_into_instances(problem, kind, model, rate, kind.cuts[-1])
        if instances and (alone := tuner.tune((Slice(model, instances[0].rate, kind.cuts[0]),))) is not None:
            slices += [alone] * len(instances)
    devices: list[tuple[Slice, ...]] = []
    for alone in sorted(slices, key=lambda alone: -alone[0].share):
        rejected: set[tuple[Slice, ...]] = set()
        for device in sorted(devices, key=total, reverse=True):
            if device not in rejected and (tuned := tuner.tune(device + alone)) is not None:
                devices[devices.index(device)] = tuned
                break
            rejected.add(device)
        else:
            if kind.count is None or len(devices) < kind.count:
                devices.append(alone)
    return [DeviceDraft(kind, [_draft(each) for each in device]) for device in devices]


class Tuner:
    """Tune the models of one device of a kind by feedback."""

    def __init__(self, problem: Problem, kind: Kind) -> None:
        self._problem = problem
        self._kind = kind
        self._tuned: dict[tuple[Slice, ...], tuple[Slice, ...] | None] = {}

    def tune(self, slices: tuple[Slice, ...]) -> tuple[Slice, ...] | None:
        """Return the models with shares and batches that meet their targets beside each other; None where the device
        has too little."""
        if slices not in self._tuned:
            self._tuned[slices] = self._tune(slices)
        return self._tuned[slices]

    def _tune(self, slices: tuple[Slice, ...]) -> tuple[Slice, ...] | None:
        most = self._kind.max_partitions
        if most is not None and len(slices) > most:
            return None
        while total(slices) <= WHOLE:
            slices, highest = self.tune_batches(slices)
            tuned = self._tune_shares(slices, highest)
            if tuned == slices:
                drafts, batches = [_draft(each) for each in slices], [[each.batch] for each in slices]
                fits = partitions_with_batches(self._problem, self._kind, drafts, batches)
                return None if fits is None else slices
            if tuned is None:
                return None
            slices = tuned
        return None

    def tune_batches(self, slices: tuple[Slice, ...]) -> tuple[tuple[Slice, ...], list[float]]:
        """Tune batches for an epoch. Return the models with batches in time, where any is, and the highest throughput
        of each that was observed, in rows/s."""
        highest = [0.0] * len(slices)
        seen: set[tuple[Slice, ...]] = set()
        while slices not in seen:
            seen.add(slices)
            observed = self.observe(slices)
            highest = [max(most, now.throughput) for most, now in zip(highest, observed, strict=True)]
            slices = tuple(self._with_next_batch(each, now) for each, now in zip(slices, observed, strict=True))
        while (fewer := tuple(map(self._with_fewer_rows, slices, self.observe(slices)))) != slices:
            slices = fewer
        return slices, highest

    def observe(self, slices: Sequence[Slice]) -> list[Observation]:
        """Return what the models of a device reach beside each other."""
        loads = [Load(each.model, self._kind.name, each.batch, each.share) for each in slices]
        observed = []
        for i, load in enumerate(loads):
            alone = latency_curve(self._problem, load.model, load.kind, load.share)[load.batch - 1]
            latency = alone * slowdown(self._problem, load, [[other] for other in loads[:i] + loads[i + 1 :]])
            observed.append(Observation(latency, load.batch / latency))
        return observed

    def _with_next_batch(self, each: Slice, now: Observation) -> Slice:
        if self._late(each, now):
            return self._with_fewer_rows(each, now)
        largest = len(latency_curve(self._problem, each.model, self._kind.name, each.share))
        if _slow(each, now) and each.batch < largest:
            return msgspec.structs.replace(each, batch=each.batch + 1)
        return each

    def _with_fewer_rows(self, each: Slice, now: Observation) -> Slice:
        late = self._late(each, now) and each.batch > 1
        return msgspec.structs.replace(each, batch=each.batch - 1) if late else each

    def _tune_shares(self, slices: tuple[Slice, ...], highest: Sequence[float]) -> tuple[Slice, ...] | None:
        """Return the models with their next shares; None where one needs more than the largest."""
        tuned = []
        for each, now, most in zip(slices, self.observe(slices), highest, strict=True):
            share: int | None = each.share
            half = self._problem.model(each.model).slo / 2
            if self._late(each, now) or _slow(each, now):
                share = self._larger(each, max(now.latency / half, each.rate / most if most else 0.0))
            elif now.latency < (1 - THRESHOLD) * half:
                wanted = each.share * now.latency / half
                share = next(cut for cut in self._kind.cuts if cut >= wanted and cut > each.too_small)
            if share is None:
                return None
            too_small = max(each.too_small, each.share) if share > each.share else each.too_small
            tuned.append(msgspec.structs.replace(each, share=share, too_small=too_small))
        return tuple(tuned)

    def _larger(self, each: Slice, factor: float) -> int | None:
        """Return the legal share that is larger by a factor, or by one step where that is unknown or less; the largest
        where none is as large; None where the share is that already."""
        wanted = each.share if math.isinf(factor) else each.share * factor
        larger = [cut for cut in self._kind.cuts if cut > each.share]
        return next((cut for cut in larger if cut >= wanted), larger[-1] if larger else None)

    def _late(self, each: Slice, now: Observation) -> bool:
        return 2 * now.latency > self._problem.model(each.model).slo


def total(slices: Sequence[Slice]) -> int:
    """Return the share of a device (‰) that is taken."""
    return sum(each.share for each in slices)


def _slow(each: Slice, now: Observation) -> bool:
    return now.throughput < each.rate * (1 - ROUNDING_TOLERANCE)


def _draft(each: Slice) -> PartitionDraft:
    return PartitionDraft(each.share, {each.model: each.rate}, batches={each.model: each.batch})
