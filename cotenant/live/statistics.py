"""What is counted of each model, in one place: `/stats`, gRPC's ModelStatistics and the metrics all read it."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome
from cotenant.runtime.events import Reply
from cotenant.worker.wire import Timing

# Upper bounds of the latency histogram, in seconds.
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Sum:
    """How many, and their seconds together."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds

    def to_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


class _Batches:
    """Batches of one number of rows."""

    __slots__ = ("gather", "infer", "scatter")

    def __init__(self) -> None:
        self.gather = Sum()
        self.infer = Sum()
        self.scatter = Sum()


class ModelStatistics:
    """Counts of one model. epoch: what to add to the driver's clock to get the seconds since 1970.

    Of a batch that was held back to stay within its share, the wait counts as inference.
    """

    def __init__(self, name: str, version: str, epoch: float) -> None:
        self.name = name
        self.version = version
        self.epoch = epoch
        self.last = 0.0
        self.rows = 0
        self.wholes = 0  # requests of an ensemble, which runs no batches itself
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.within = 0  # answers within their target
        self.rejections: dict[tuple[Outcome, str], int] = {}  # refused and expired requests, by reason
        self.success = Sum()
        self.fail = Sum()
        self.queue = Sum()
        self.gather = Sum()
        self.infer = Sum()
        self.scatter = Sum()
        self.latency = [0] * (len(BUCKETS) + 1)
        self.batches: dict[int, _Batches] = {}  # by rows
        self.predicted: dict[str, Sum] = {}  # by lane
        self.observed: dict[str, Sum] = {}
        self.alone: dict[str, Sum] = {}
        self._timings: dict[str, Timing] = {}  # of the last batch of each lane

    def ran(self, lane: LaneId, rows: int, predicted: float, observed: float, timing: Timing, *, alone: float) -> None:
        """A batch is back, predicted and observed to take so many seconds, and profiled to take `alone` without
        neighbours. To be told before its requests end."""
        self._timings[lane] = timing
        self.rows += rows
        batches = self.batches.get(rows)
        if batches is None:
            batches = self.batches[rows] = _Batches()
        batches.gather.add(timing.gather)
        batches.infer.add(timing.infer + timing.pause)
        batches.scatter.add(timing.scatter)
        if lane not in self.observed:
            self.predicted[lane], self.observed[lane], self.alone[lane] = Sum(), Sum(), Sum()
        self.predicted[lane].add(predicted)
        self.observed[lane].add(observed)
        self.alone[lane].add(alone)

    def ended(self, reply: Reply, now: float) -> None:
        """Requests of this model have ended, as that reply says."""
        outcome, count = reply.outcome, len(reply.requests)
        self.outcomes[outcome] += count
        latencies = [now - request.arrived for request in reply.requests]
        total = sum(latencies)
        if outcome is not Outcome.SERVED:
            self.fail.add(total, count)
            if outcome is Outcome.REJECTED or outcome is Outcome.EXPIRED:
                key = outcome, reply.reason
                self.rejections[key] = self.rejections.get(key, 0) + count
            return
        self.last = now
        self.success.add(total, count)
        for latency in latencies:
            self.latency[bisect_left(BUCKETS, latency)] += 1
        self.within += sum([now <= request.deadline for request in reply.requests])
        self.queue.add(total - (now - reply.started) * count, count)
        if not reply.lane:  # an ensemble's: its models' batches are counted as theirs
            self.rows += sum([request.size for request in reply.requests])
            self.wholes += count
            return
        timing = self._timings[reply.lane]
        self.gather.add(timing.gather * count, count)
        self.infer.add((timing.infer + timing.pause) * count, count)
        self.scatter.add(timing.scatter * count, count)

    @property
    def executions(self) -> int:
        return self.wholes + sum(batches.infer.count for batches in self.batches.values())

    @property
    def attainment(self) -> float:
        """The fraction of the requests whose caller stayed that were answered within their target; 1 of none."""
        stayed = sum(self.outcomes.values()) - self.outcomes[Outcome.CANCELLED]
        return self.within / stayed if stayed else 1.0

    def to_json(self) -> dict[str, Any]:
        """One entry of Triton's `model_stats`."""
        none = {"count": 0, "ns": 0}
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": round((self.last + self.epoch) * 1e3) if self.last else 0,
            "inference_count": self.rows,
            "execution_count": self.executions,
            "inference_stats": {
                "success": self.success.to_json(),
                "fail": self.fail.to_json(),
                "queue": self.queue.to_json(),
                "compute_input": self.gather.to_json(),
                "compute_infer": self.infer.to_json(),
                "compute_output": self.scatter.to_json(),
                "cache_hit": none,
                "cache_miss": none,
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
