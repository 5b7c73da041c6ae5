"""Count by model and by partition what the driver reports, and collect interference samples."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from cotenant.core.identity import LaneId
from cotenant.live.deployment import ServableModel
from cotenant.live.interference_observer import InterferenceObserver
from cotenant.live.partition_labels import PartitionLabel, PartitionLabels
from cotenant.live.serving_state import ServingState
from cotenant.live.statistics import ModelCounts
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample
from cotenant.runtime.events import Reply
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.runtime.lane_specs import workers_per_partition
from cotenant.worker.wire import Timing

EPOCH = time.time() - time.monotonic()  # noqa: TID251  # what the driver's clock calls 0, in seconds since 1970


class ServingObserver:
    """Count how requests end and how long batches take: the driver's `Observer`.

    models: counts by model. busy: seconds in batches, by partition; lent: seconds that these ended earlier, as others
    left the device idle. partitions: labels lanes. busy_since: tells when the batch began that a lane is at work on;
    None for an idle lane.
    """

    def __init__(self, state: ServingState, busy_since: Callable[[LaneId], float | None]) -> None:
        self.models: dict[str, ModelCounts] = {}
        self.busy: defaultdict[PartitionLabel, float] = defaultdict(float)
        self.lent: defaultdict[PartitionLabel, float] = defaultdict(float)
        self.partitions = PartitionLabels(state)
        self._state = state
        self._busy_since = busy_since
        self._interference = InterferenceObserver()

    def track(self, models: Iterable[ServableModel]) -> None:
        """Count these models from now on; those that are counted already keep their counts."""
        for model in models:
            name = model.info.name
            if name not in self.models:
                self.models[name] = ModelCounts(name, model.info.version)

    def samples(self) -> list[Sample]:
        """Return the co-located batch latencies that were seen often enough to learn from."""
        return self._interference.samples()

    def ended(self, reply: Reply, now: float) -> None:
        self.models[reply.requests[0].model].ended(reply, now)

    def ran(self, lane: LaneId, model: str, rows: int, seconds: float, timing: Timing) -> None:
        partition = self.partitions.of(lane)
        self.busy[partition] += seconds
        self.lent[partition] += timing.lent
        assignment = self._state.lanes.get(lane)
        predicted = _predicted(assignment, model, rows, seconds)
        alone = self._alone(assignment, model, rows, predicted)
        self.models[model].ran(lane, partition, rows, predicted, seconds, timing, alone=alone)
        if assignment is None:
            return
        now = time.monotonic()
        load = Load(model, assignment.device.kind, rows, assignment.partition.share)
        co_located = {name: other for name, other in self._state.lanes.items() if name.device == lane.device}
        if any(workers_per_partition(other.partition) > 1 for other in co_located.values()):
            return  # the profile already includes the interference between workers of one partition
        others = {name: self._busy_since(name) for name in co_located if name != lane}
        since, lent = now - seconds, timing.lent > 0
        self._interference.ran(lane, load, since=since, now=now, alone=alone, others=others, lent=lent)

    def _alone(self, lane: LaneAssignment | None, model: str, rows: int, predicted: float) -> float:
        """Return the profiled seconds of a batch without co-located models; `predicted` where there is no profile."""
        if lane is None:
            return predicted
        profile = self._state.deployment.problem.profiles.get((model, lane.device.kind))
        if profile is None:
            return predicted
        procs = next((placed.procs for placed in lane.placements if placed.model == model), 1)
        seconds = profile.latency(rows, lane.partition.share, procs)
        return seconds if seconds < math.inf else predicted


def _predicted(lane: LaneAssignment | None, model: str, rows: int, observed: float) -> float:
    """Return the seconds that the plan has for a batch; `observed` where it has none."""
    latencies = next((held.latencies for held in lane.spec.models if held.model == model), ()) if lane else ()
    return latencies[rows - 1] if rows <= len(latencies) else observed
