"""Read what a server has counted since its start, so that two readings say what happened between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.request import Outcome
from cotenant.live.partition_labels import PartitionLabel
from cotenant.live.serving_observer import ServingObserver


class RequestTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model. ended: requests in whichever way; stayed: those whose caller did not leave. late: answered after
    their target. reasons: rejected and expired ones by reason. latencies: of answered ones, as `Histogram.counts`."""

    ended: int
    stayed: int
    within_target: int
    refused: int
    failed: int
    reasons: dict[str, int]
    latencies: NDArray[np.int64]


class BatchTotals(NamedTuple):
    """Seconds of batches: as profiled without co-located models, as planned, and as seen had nothing been lent."""

    profiled: float
    predicted: float
    observed: float


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Of a server. time: of the reading, in seconds of its clock. busy: seconds in batches; batches: what they were
    to take; both by partition and model."""

    time: float
    models: Mapping[str, RequestTotals]
    busy: Mapping[tuple[PartitionLabel, str], float]
    batches: Mapping[tuple[PartitionLabel, str], BatchTotals]


def read_totals(observer: ServingObserver, now: float) -> Totals:
    """Read the totals of all models and partitions."""
    models: dict[str, RequestTotals] = {}
    for name, counts in observer.models.items():
        ledger = counts.ledger
        outcomes = ledger.outcomes
        reasons: dict[str, int] = {}
        for (_, reason), count in ledger.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
        models[name] = RequestTotals(
            ended=ledger.arrived,
            stayed=ledger.stayed,
            within_target=ledger.within_target,
            refused=outcomes[Outcome.REJECTED] + outcomes[Outcome.EXPIRED],
            failed=outcomes[Outcome.FAILED],
            reasons=reasons,
            latencies=ledger.latency.counts(),
        )
    partitions = {
        (partition, name): batches
        for name, counts in observer.models.items()
        for partition, batches in counts.partitions.items()
    }
    return Totals(
        time=now,
        models=models,
        busy={key: each.busy for key, each in partitions.items()},
        batches={
            key: BatchTotals(each.alone.seconds, each.predicted.seconds, each.observed.seconds)
            for key, each in partitions.items()
        },
    )
