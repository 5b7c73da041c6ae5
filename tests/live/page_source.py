"""A server that a test writes by hand, for the page: what it has counted, and what it is at."""

from __future__ import annotations

import msgspec
import numpy as np

from cotenant.control.controller_status import ModelState
from cotenant.control.revision import RolloutDurations, RolloutOutcome
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.job import JobStatus
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.provenance import Validation
from cotenant.live.control_driver import WorkerStatus
from cotenant.live.oip import IndexEntry
from cotenant.live.page.totals import BatchTotals, RequestTotals, Totals
from cotenant.live.partition_labels import PartitionLabel
from cotenant.live.status import (
    AdaptationStatus,
    DecisionStatus,
    DurationSummary,
    PastRollout,
    RevisionStatus,
    Snapshot,
)
from cotenant.measure.histogram import Histogram


class Counts:
    """Of one model, to be added to."""

    def __init__(self) -> None:
        self.stayed = self.within = self.refused = 0
        self.latencies = Histogram()
        self.reason = "it would finish after its deadline"

    def add(self, within: int, late: int = 0, refused: int = 0, *, latency: float = 0.02) -> None:
        """Count requests: answered in time, late, or not at all. latency: the median, in seconds, of those answered."""
        self.stayed += within + late + refused
        self.within += within
        self.refused += refused
        self.latencies.extend(latency * (0.8 + 0.4 * i / max(within, 1)) for i in range(within))
        self.latencies.extend([latency * 4] * late)


class WrittenSource:
    """Models with a target of 50 ms each, two to a partition, all partitions of one device."""

    def __init__(self, names: tuple[str, ...], *, start: float = 1000.0, target: float = 0.05) -> None:
        self.now = start
        self.names = names
        self.counts = {name: Counts() for name in names}
        self.target = target
        self.accepting = True
        self.broken: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.foreign = 0.02
        self.slowdown = 1.0
        self.short = ""
        self.reload_error = ""
        self.file_errors: tuple[str, ...] = ()
        self.revision, self.reason = 1, "first plan"
        self.rollouts: list[PastRollout] = []
        self.late = self.solved = 0  # besides those of `rollouts` and `decisions`
        self.decisions: list[tuple[float, str, str]] = []
        self.busy: dict[tuple[PartitionLabel, str], float] = {}
        self.batches: dict[tuple[PartitionLabel, str], BatchTotals] = {}
        self.states: dict[int, str] = {}
        self.jobs: list[JobStatus] = []
        self.shares = [1000 // -(-len(names) // 2)] * -(-len(names) // 2)

    def cuts(self) -> list[tuple[str, ...]]:
        return [self.names[i : i + 2] for i in range(0, len(self.names), 2)]

    def plan(self) -> Plan:
        return self._plan

    def settle(self) -> None:
        """Make the plan that the partitions are of."""
        self._plan = Plan(
            planner="geometry",
            devices=(
                Device(
                    id=DeviceId("cpu"),
                    partitions=tuple(
                        Partition(
                            share=share,
                            placements=tuple(
                                Placement(model=name, batch=4, rate=20.0, duty=0.02, latency=0.01) for name in held
                            ),
                        )
                        for share, held in zip(self.shares, self.cuts(), strict=True)
                    ),
                ),
            ),
        )

    def snapshot(self) -> Snapshot:
        lanes = [LaneId(DeviceId("cpu"), slot) for slot in range(len(self.shares))]
        workers = [
            WorkerStatus(
                lane=lane,
                state=self.states.get(slot, "ready"),
                share=share,
                pid=None,
                used_share=share * 0.6,
                over_share=False,
                restarts=0,
                models=tuple(held),
                reason="killed by SIGKILL" if slot in self.states else "",
            )
            for slot, (lane, share, held) in enumerate(zip(lanes, self.shares, self.cuts(), strict=True))
        ]
        offered = [
            IndexEntry(name=name, version="1", state="READY", reason=self.failures.get(name, "")) for name in self.names
        ]
        prepare = DurationSummary(count=len(self.rollouts), p50=0.8, p99=0.8, max=0.8)
        return Snapshot(
            backend="cpu",
            isolation="CPU limits: self-throttling workers, verified by the server",
            accepting=self.accepting,
            rollout=RevisionStatus(
                revision=self.revision,
                reason=self.reason,
                desired=self.revision,
                validation=Validation(passed=True, seeds=(0, 1), requests=5210, plans=3, runs=4),
                last=tuple(self.rollouts),
                durations={"prepare": prepare, "rollback": msgspec.structs.replace(prepare, count=0)},
                late=3 * len(self.rollouts) + self.late,
            ),
            targets=dict.fromkeys(self.names, self.target),
            objectives=dict.fromkeys(self.names, 0.99),
            planned=dict.fromkeys(self.names, 20.0),
            models=offered
            + [IndexEntry(name=name, state="UNAVAILABLE", reason=why) for name, why in self.broken.items()],
            workers=workers,
            labels={lane: PartitionLabel("cpu-0", str(lane.slot)) for lane in lanes},
            waiting={lane: dict.fromkeys(held, 1) for lane, held in zip(lanes, self.cuts(), strict=True)},
            reload_error=self.reload_error,
            file_errors=self.file_errors,
            jobs=tuple(self.jobs),
            adaptation=AdaptationStatus(
                activity="watching",
                reason="",
                short=self.short,
                foreign_load=self.foreign,
                processors=2,
                observed_slowdown=self.slowdown,
                models={
                    name: ModelState(
                        offered=20, planned=20, sustained=30, slowdown=1, observed_slowdown=1, attainment=None
                    )
                    for name in self.names
                },
                deciding=DurationSummary(count=len(self.decisions) + self.solved, p50=0.25, p99=0.4, max=0.5),
                decisions=tuple(
                    DecisionStatus(seconds_ago=self.now - time, action=action, reason=reason)
                    for time, action, reason in reversed(self.decisions)
                ),
            ),
        )

    def totals(self, now: float) -> Totals:
        return Totals(
            time=now,
            models={
                name: RequestTotals(
                    ended=counts.stayed,
                    stayed=counts.stayed,
                    within_target=counts.within,
                    refused=counts.refused,
                    failed=0,
                    reasons={counts.reason: counts.refused} if counts.refused else {},
                    latencies=counts.latencies.counts(),
                )
                for name, counts in self.counts.items()
            },
            busy=dict(self.busy),
            batches=dict(self.batches),
        )

    def work(self, partition: int, model: str, seconds: float, slowdown: float = 1.0) -> None:
        """Count batches of a model on a partition, which take that many times as long as profiled, and were planned to
        take 1.2 times as long."""
        key = PartitionLabel("cpu-0", str(partition)), model
        self.busy[key] = self.busy.get(key, 0.0) + seconds
        before, profiled = self.batches.get(key, BatchTotals(0.0, 0.0, 0.0)), seconds / slowdown
        more = profiled, 1.2 * profiled, seconds
        self.batches[key] = BatchTotals(*(old + new for old, new in zip(before, more, strict=True)))

    def roll(self, reason: str, outcome: RolloutOutcome, failure: str = "") -> None:
        """Have a rollout end, which puts its revision in force where it is completed."""
        number = self.revision + 1
        if outcome is RolloutOutcome.COMPLETED:
            self.revision, self.reason = number, reason
        durations = RolloutDurations(prepare=0.8, switch=0.01, drain=0.2)
        ended = PastRollout(
            revision=number, reason=reason, outcome=outcome, failure=failure, durations=durations, late=3
        )
        self.rollouts.insert(0, ended)


def running_minutes(source: WrittenSource, steps: int, seed: int = 0) -> list[tuple[float, Totals]]:
    """Let a source serve for so many steps of 5 s; return its totals after each."""
    draw = np.random.default_rng(seed)
    taken = []
    for step in range(steps):
        for number, name in enumerate(source.names):
            rate = (12 + 4 * number) * (1 + 0.35 * np.sin(step / 9 + number)) * draw.uniform(0.85, 1.15)
            count = round(rate * 5)
            source.counts[name].add(count, latency=0.012 + 0.004 * (number % 3) + 0.002 * draw.uniform())
            source.work(number // 2, name, count * 0.006 * draw.uniform(0.8, 1.2))
        source.now += 5.0
        taken.append((source.now, source.totals(source.now)))
    return taken
