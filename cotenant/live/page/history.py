"""Keep ten minutes of a server's counts, and say what its last minute was like."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.live.page.totals import BatchTotals, RequestTotals, Totals
from cotenant.live.partition_labels import PartitionLabel
from cotenant.measure.histogram import quantiles

STEP = 5.0  # seconds between two points of a chart
POINTS = 120  # of a chart: ten minutes
RECENT = 12  # steps that "the last minute" has


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a model's requests in some seconds. rate, goodput, refused, failed: requests/s that ended, that
    met their target, that were rejected or expired, that failed. attainment: of those whose caller stayed. p50, p99:
    seconds. Each None where nothing tells. stayed: how many there were. why: the most frequent reason of refusals."""

    rate: float
    goodput: float
    refused: float
    failed: float
    stayed: int
    attainment: float | None
    p50: float | None
    p99: float | None
    why: str


NOTHING = RequestTotals(
    ended=0, stayed=0, within_target=0, refused=0, failed=0, reasons={}, latencies=np.zeros(0, dtype=np.int64)
)

NO_BATCHES = BatchTotals(0.0, 0.0, 0.0)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The points of one chart of each kind, oldest first; None where there was nothing to tell."""

    rate: deque[float | None]
    goodput: deque[float | None]
    p50: deque[float | None]
    p99: deque[float | None]


class History:
    """Collect totals every `STEP` seconds. times: of the points, as told; models: charts by model; busy: the part of
    the time in which each partition ran batches, from 0 to 1."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=POINTS)
        self.models: dict[str, Series] = {}
        self.busy: dict[PartitionLabel, deque[float | None]] = {}
        self._totals: deque[Totals] = deque(maxlen=RECENT)  # at the ends of the last steps

    def add(self, totals: Totals, time: float, models: Iterable[str], partitions: Iterable[PartitionLabel]) -> None:
        """Add a point for these models and partitions, and forget others. time: what the charts say, in seconds since
        1970."""
        before = self._totals[-1] if self._totals else None
        self._totals.append(totals)
        if before is None:
            return
        self.times.append(time)
        old_models, old_busy = self.models, self.busy
        self.models = {name: old_models.get(name) or self._series() for name in models if name in totals.models}
        self.busy = {label: old_busy.get(label) or self._blank() for label in partitions}
        for name, series in self.models.items():
            activity = model_activity(name, before, totals)
            series.rate.append(round(activity.rate, 3))
            series.goodput.append(round(activity.goodput, 3))
            series.p50.append(activity.p50)
            series.p99.append(activity.p99)
        parts = busy_parts(before, totals)
        for label, values in self.busy.items():
            values.append(round(min(sum(parts.get(label, {}).values()), 1.0), 4))

    def last_minute(self, totals: Totals) -> Totals:
        """Return the reading to compare with, of about a minute before `totals`."""
        return self._totals[0] if self._totals else totals

    def _blank(self) -> deque[float | None]:
        return deque([None] * (len(self.times) - 1), maxlen=POINTS)

    def _series(self) -> Series:
        return Series(rate=self._blank(), goodput=self._blank(), p50=self._blank(), p99=self._blank())


def model_activity(name: str, before: Totals, after: Totals) -> ModelActivity:
    """Return what became of a model's requests between two readings. A model that the first has not counts from 0."""
    seconds = max(after.time - before.time, 1e-9)
    now, then = after.models[name], before.models.get(name, NOTHING)
    stayed, within = now.stayed - then.stayed, now.within_target - then.within_target
    p50, p99 = _latencies(now, then, (0.5, 0.99))
    reasons = {reason: count - then.reasons.get(reason, 0) for reason, count in now.reasons.items()}
    why, count = max(reasons.items(), key=lambda each: each[1], default=("", 0))
    return ModelActivity(
        rate=(now.ended - then.ended) / seconds,
        goodput=within / seconds,
        refused=(now.refused - then.refused) / seconds,
        failed=(now.failed - then.failed) / seconds,
        stayed=stayed,
        attainment=within / stayed if stayed else None,
        p50=p50,
        p99=p99,
        why=why if count else "",
    )


def busy_parts(before: Totals, after: Totals) -> dict[PartitionLabel, dict[str, float]]:
    """Return by partition the part of the time between two readings that each model's batches took."""
    seconds = max(after.time - before.time, 1e-9)
    parts: dict[PartitionLabel, dict[str, float]] = {}
    for (label, model), busy in after.busy.items():
        if (spent := busy - before.busy.get((label, model), 0.0)) > 0:
            parts.setdefault(label, {})[model] = spent / seconds
    return parts


def slowdowns_by_partition(before: Totals, after: Totals) -> dict[PartitionLabel, tuple[float, float]]:
    """Return by partition how many times as long as profiled the batches between two readings were predicted to take,
    and took; of those that ran any."""
    sums: dict[PartitionLabel, list[float]] = {}
    for (label, model), now in after.batches.items():
        then = before.batches.get((label, model), NO_BATCHES)
        taken = sums.setdefault(label, [0.0, 0.0, 0.0])
        for index, (seconds, earlier) in enumerate(zip(now, then, strict=True)):
            taken[index] += seconds - earlier
    return {
        label: (predicted / profiled, observed / profiled)
        for label, (profiled, predicted, observed) in sums.items()
        if profiled > 0
    }


def _latencies(now: RequestTotals, then: RequestTotals, at: Sequence[float]) -> list[float | None]:
    counts: NDArray[np.int64] = now.latencies - then.latencies if then.latencies.size else now.latencies
    return [None if math.isnan(seconds) else seconds for seconds in quantiles(counts, at)]
