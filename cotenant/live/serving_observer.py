"""Count by model and by partition what the driver reports, and collect interference samples."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome
from cotenant.live.deployment import ServableModel
from cotenant.live.interference_observer import InterferenceObserver
from cotenant.live.partition_labels import PartitionLabel, PartitionLabels
from cotenant.live.serving_state import ServingState
from cotenant.live.statistics import ModelCounts
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample
from cotenant.runtime.events import Reply
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
        self._warming_up: set[DeviceId] = set()
        self._lanes: Mapping[LaneId, object] = {}  # that the following is of, with the deployment
        self._deployment: object = None
        self._known: dict[LaneId, _LaneFacts] = {}

    def track(self, models: Iterable[ServableModel]) -> None:
        """Count these models from now on; those that are counted already keep their counts."""
        for model in models:
            name = model.info.name
            if name not in self.models:
                self.models[name] = ModelCounts(name, model.info.version)

    @property
    def late(self) -> int:
        """Requests that ended and did not meet their target, those of callers that left not counted."""
        ledgers = [counts.ledger for counts in self.models.values()]
        return sum(ledger.stayed - ledger.within_target for ledger in ledgers)

    def busy_seconds(self, now: float) -> float:
        """Return the seconds that batches have taken so far, those under way included. now: as of the driver's
        clock."""
        under_way = (since for lane in self._state.lanes if (since := self._busy_since(lane)) is not None)
        return sum(self.busy.values()) + sum(now - since for since in under_way)

    def take_warming_up(self) -> list[LaneId]:
        """Return the lanes of devices on which a worker has warmed up while it served since the last call: that slows
        its own batches, and those of its neighbours."""
        taken, self._warming_up = self._warming_up, set()
        return [lane for lane in self._state.lanes if lane.device in taken]

    def samples(self) -> list[Sample]:
        """Return the co-located batch latencies that were seen often enough to learn from."""
        return self._interference.samples()

    def ended(self, reply: Reply, now: float) -> None:
        self.models[reply.requests[0].model].ended(reply, now)

    def rejected_unread(self, model: str, waited: Sequence[float], reason: str) -> None:
        """Count requests that were rejected before they were read, each so many seconds after it came."""
        self.models[model].rejected_unread(waited, reason)

    def answered_from_cache(self, model: str, began: float, now: float) -> None:
        """Count a request that was answered from the response cache."""
        self.models[model].answered_from_cache(began, now)

    def ended_unsubmitted(self, model: str, began: float, outcome: Outcome) -> None:
        """Count a request that ended before the dispatcher heard of it."""
        self.models[model].ended_unsubmitted(began, time.monotonic(), outcome)

    def missed_in_cache(self, model: str, seconds: float) -> None:
        """Count a request that was looked for in the response cache in vain."""
        self.models[model].cache_miss.add(seconds)

    def ran(self, lane: LaneId, model: str, rows: int, since: float, ended: float, timing: Timing) -> None:
        facts = self._facts(lane)
        partition, seconds = facts.partition, ended - since
        self.busy[partition] += seconds
        self.lent[partition] += timing.lent
        predicted = _latency(facts.predicted, model, rows, seconds)
        alone = _latency(facts.alone, model, rows, predicted)
        self.models[model].ran(lane, partition, rows, predicted, seconds, timing, alone=alone)
        if timing.warming_up:
            self._warming_up.add(lane.device)
        if facts.co_located:
            load = Load(model, lane.device.kind, rows, facts.share)
            others = {name: self._busy_since(name) for name in facts.co_located}
            unlike_planned = timing.lent > 0 or timing.warming_up
            self._interference.ran(
                lane, load, since=since, now=ended, alone=alone, others=others, unlike_planned=unlike_planned
            )

    def _facts(self, lane: LaneId) -> _LaneFacts:
        """Return what the plan in force says of a lane, which is asked with every batch."""
        state = self._state
        if state.lanes is not self._lanes or state.deployment is not self._deployment:
            if state.lanes is not self._lanes:
                self._forget_lanes(state.lanes.keys() | self._lanes.keys())  # those of before may still drain
            self._lanes, self._deployment, self._known = state.lanes, state.deployment, {}
        facts = self._known.get(lane)
        if facts is None:
            facts = self._known[lane] = self._read_facts(lane)
        return facts

    def _forget_lanes(self, kept: Collection[LaneId]) -> None:
        """Forget all lanes but these: every change of plan names some that no later one does."""
        self._interference.forget_lanes(kept)
        for counts in self.models.values():
            counts.forget_lanes(kept)

    def _read_facts(self, lane: LaneId) -> _LaneFacts:
        partition, assignment = self.partitions.of(lane), self._state.lanes.get(lane)
        if assignment is None:
            return _LaneFacts(partition)
        share, profiles = assignment.partition.share, self._state.deployment.problem.profiles
        procs = {placed.model: placed.procs for placed in assignment.placements}
        beside = {name: other for name, other in self._state.lanes.items() if name.device == lane.device}
        # With several workers to a partition, the profile includes the interference between them already.
        alone = all(workers_per_partition(other.partition) == 1 for other in beside.values())
        return _LaneFacts(
            partition,
            share,
            co_located=tuple([name for name in beside if name != lane]) if alone else (),
            predicted={held.model: held.latencies for held in assignment.spec.models},
            alone={
                model: profile.curve(share, procs.get(model, 1))
                for (model, kind), profile in profiles.items()
                if kind == assignment.device.kind and model in procs
            },
        )


class _LaneFacts(msgspec.Struct, frozen=True):
    """What a plan says of a lane. share: in thousandths; 0 for a lane that is in no plan any more. co_located: other
    lanes of its device, if interference between them is observed. predicted, alone: seconds of 1, 2, … rows by model,
    by the plan and as profiled without co-located models."""

    partition: PartitionLabel
    share: int = 0
    co_located: tuple[LaneId, ...] = ()
    predicted: Mapping[str, tuple[float, ...]] = {}
    alone: Mapping[str, tuple[float, ...]] = {}


def _latency(latencies: Mapping[str, tuple[float, ...]], model: str, rows: int, otherwise: float) -> float:
    """Return the seconds of a batch; `otherwise` where they are not known."""
    known = latencies.get(model, ())
    seconds = known[rows - 1] if rows <= len(known) else math.inf
    return seconds if seconds < math.inf else otherwise
