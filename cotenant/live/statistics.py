"""Count a server's requests and batches by model, for `/stats`, gRPC's ModelStatistics, the metrics and the status."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.live.partition_labels import PartitionLabel
from cotenant.measure.ledger import OutcomeLedger
from cotenant.runtime.events import Reply
from cotenant.worker.wire import Timing


class DurationSum:
    """How many durations there were, and their sum in seconds."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds

    def to_json(self) -> dict[str, int]:
        """Return Triton's `StatisticDuration`."""
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


class BatchPhases:
    """Phases of the batches of one number of rows."""

    __slots__ = ("gather", "infer", "scatter")

    def __init__(self) -> None:
        self.gather = DurationSum()
        self.infer = DurationSum()
        self.scatter = DurationSum()


class PartitionBatches:
    """Latency of a model's batches on one partition: predicted, observed, and profiled without co-located models. Time
    that was lent is counted as observed, so that all three are of the partition's share. busy: seconds that they
    took."""

    __slots__ = ("alone", "busy", "observed", "predicted")

    def __init__(self) -> None:
        self.predicted = DurationSum()
        self.observed = DurationSum()
        self.alone = DurationSum()
        self.busy = 0.0


class ModelCounts:
    """Count what a server sees of one model: the ledger of outcomes, and how long the phases of requests and batches
    took.

    cache_hit, cache_miss: looking for answers in the response cache. queue, gather, infer, scatter: of each served
    request, the phases of its whole batch; fail: of the others, arrival to end. The pause of a batch that was held back
    to stay within its share counts as inference. batches: by rows; partitions: by partition, those that are in no plan
    any more together. last: when a request was last served, in seconds of the driver's clock.
    """

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.ledger = OutcomeLedger()
        self.last = 0.0
        self.fail = DurationSum()
        self.queue = DurationSum()
        self.gather = DurationSum()
        self.infer = DurationSum()
        self.scatter = DurationSum()
        self.cache_hit = DurationSum()
        self.cache_miss = DurationSum()
        self.batches: dict[int, BatchPhases] = {}
        self.partitions: dict[PartitionLabel, PartitionBatches] = {}
        self._timings: dict[LaneId, Timing] = {}  # of the last batch of each lane

    def ran(
        self,
        lane: LaneId,
        partition: PartitionLabel,
        rows: int,
        predicted: float,
        observed: float,
        timing: Timing,
        *,
        alone: float,
    ) -> None:
        """Count a batch that is done, before its requests end. partition: the lane's label. Durations are in seconds;
        alone: as profiled without co-located models."""
        self.ledger.ran(rows, predicted, observed)
        self._timings[lane] = timing
        batches = self.batches.get(rows)
        if batches is None:
            batches = self.batches[rows] = BatchPhases()
        batches.gather.add(timing.gather)
        batches.infer.add(timing.infer + timing.pause)
        batches.scatter.add(timing.scatter)
        if partition not in self.partitions:
            self.partitions[partition] = PartitionBatches()
        times = self.partitions[partition]
        times.predicted.add(predicted)
        times.observed.add(observed + timing.lent)
        times.alone.add(alone)
        times.busy += observed

    def forget_lanes(self, kept: Collection[LaneId]) -> None:
        """Forget the last batches of all lanes but these."""
        self._timings = {lane: timing for lane, timing in self._timings.items() if lane in kept}

    def answered_from_cache(self, began: float, now: float) -> None:
        """Count a request that was answered from the response cache: it is served, and ran in no batch."""
        self.cache_hit.add(now - began)
        self.last = now
        self.ledger.ended((Request(0, self.name, began, now),), Outcome.SERVED, now)

    def rejected_unread(self, waited: Sequence[float], reason: str) -> None:
        """Count requests that were rejected before they were read, each so many seconds after it came."""
        self.fail.add(sum(waited), len(waited))
        self.ledger.rejected(waited, reason)

    def ended_unsubmitted(self, began: float, now: float, outcome: Outcome) -> None:
        """Count a request that ended before the dispatcher heard of it, and was not served."""
        self.fail.add(now - began)
        self.ledger.ended((Request(0, self.name, began, now),), outcome, now)

    def ended(self, reply: Reply, now: float) -> None:
        """Count requests of this model that have ended as that reply says."""
        count = len(reply.requests)
        self.ledger.ended(reply.requests, reply.outcome, now, reply.reason)
        total = sum([now - request.arrived for request in reply.requests])
        if reply.outcome is not Outcome.SERVED:
            self.fail.add(total, count)
            return
        self.last = now
        self.queue.add(total - (now - reply.started) * count, count)
        if not reply.lane:  # an ensemble's, which runs no batches itself: each request is one
            for request in reply.requests:
                self.ledger.ran(request.size, 0.0, 0.0)
            return
        timing = self._timings[reply.lane]
        self.gather.add(timing.gather * count, count)
        self.infer.add((timing.infer + timing.pause) * count, count)
        self.scatter.add(timing.scatter * count, count)

    def to_json(self, epoch: float) -> dict[str, Any]:
        """Return one entry of Triton's `model_stats`. epoch: what the driver's clock calls 0, in seconds since 1970."""
        ledger = self.ledger
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": round((self.last + epoch) * 1e3) if self.last else 0,
            "inference_count": ledger.rows,
            "execution_count": ledger.batches,
            "inference_stats": {
                "success": {"count": ledger.served, "ns": round(ledger.latency.total * 1e9)},
                "fail": self.fail.to_json(),
                "queue": self.queue.to_json(),
                "compute_input": self.gather.to_json(),
                "compute_infer": self.infer.to_json(),
                "compute_output": self.scatter.to_json(),
                "cache_hit": self.cache_hit.to_json(),
                "cache_miss": self.cache_miss.to_json(),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": batches.gather.to_json(),
                    "compute_infer": batches.infer.to_json(),
                    "compute_output": batches.scatter.to_json(),
                }
                for rows, batches in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }
