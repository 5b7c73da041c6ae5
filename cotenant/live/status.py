"""Describe a server at one moment, as `cotenant status` shows it: models, plan, partitions, workers and rollouts."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from cotenant.control.controller_status import ModelState
from cotenant.control.revision import RolloutDurations, RolloutOutcome
from cotenant.core.identity import LaneId
from cotenant.core.job import JobStatus
from cotenant.core.plan import Plan
from cotenant.core.provenance import Validation
from cotenant.core.units import show_seconds
from cotenant.live.control_driver import WorkerStatus
from cotenant.live.nodes.node_status import NodeStatus
from cotenant.live.oip import IndexEntry
from cotenant.live.partition_labels import PartitionLabel
from cotenant.live.profile_corrections import ProfileCorrection
from cotenant.measure.histogram import Histogram

NOTABLE_LOAD = 0.05  # part of the processors that other programs use, from which on it is worth a word
NOTABLE_SLOWDOWN = 1.1


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a model's requests so far.

    outcomes: requests by outcome. attainment: the fraction within the target of those whose caller stayed; mean:
    latency of the served, in seconds; each None where there was none.
    """

    outcomes: dict[str, int]
    attainment: float | None
    mean: float | None


class DurationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took since the start: count, and the rest in seconds; 0 where there was none."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, durations: Histogram) -> DurationSummary:
        """Summarise a histogram."""
        if not (count := durations.count):
            return cls(count=0, p50=0.0, p99=0.0, max=0.0)
        p50, p99 = durations.quantile(0.5), durations.quantile(0.99)
        return cls(count=count, p50=p50, p99=p99, max=durations.largest)

    def row(self) -> list[str]:
        """Return count, p50, p99 and max as text."""
        return [str(self.count), *map(show_seconds, (self.p50, self.p99, self.max))]


class PastRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that ended. seconds_ago: when. reason: why its revision was made. failure: why it did not complete,
    empty where it did. late: requests that missed their target meanwhile, because of it or not."""

    seconds_ago: float = 0.0
    revision: int
    reason: str
    outcome: RolloutOutcome
    failure: str
    durations: RolloutDurations
    late: int = 0

    @property
    def failed(self) -> bool:
        """Whether something was in its way, rather than another revision."""
        return self.outcome in (RolloutOutcome.ROLLED_BACK, RolloutOutcome.REJECTED)

    @property
    def phases(self) -> str:
        """How long each phase took, in words."""
        spent = msgspec.structs.asdict(self.durations)
        return ", ".join(f"{phase} {show_seconds(seconds)}" for phase, seconds in spent.items() if seconds)

    def row(self) -> list[str]:
        """Return revision, reason, outcome, duration of each phase, late requests, and failure as text."""
        return [str(self.revision), self.reason, self.outcome.value, self.phases, str(self.late), self.failure]


class RevisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """revision: the number of the plan revision in force, 0 where none is; reason: why it was made; validation: of its
    plan. desired: the one that is wanted, and its reason. rolling_out: the one whose rollout is under way, 0 where none
    is, and its phase. last: the rollouts that ended last, the latest first. durations: of the phases that rollouts went
    through since the start, and of "whole" ones. late: requests that missed their target while any was under way,
    because of it or not."""

    revision: int = 0
    reason: str = ""
    validation: Validation | None = None
    desired: int = 0
    desired_reason: str = ""
    rolling_out: int = 0
    phase: str = ""
    last: tuple[PastRollout, ...] = ()
    durations: dict[str, DurationSummary] = {}
    late: int = 0

    def sentence(self) -> str:
        """Say which revision is in force, which is wanted, and how far its rollout is."""
        text = f"revision {self.revision} ({self.reason}) in force" if self.revision else "no revision in force"
        if self.desired != self.revision:
            text += f"; revision {self.desired} ({self.desired_reason}) wanted"
        if self.rolling_out:
            text += f"; rollout of revision {self.rolling_out}: {self.phase}"
        return text


class DecisionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller did or found, why, and how long ago."""

    seconds_ago: float
    action: str
    reason: str

    def row(self) -> list[str]:
        """Return age, action and reason as text."""
        return [f"{self.seconds_ago:.0f} s ago", self.action, self.reason]


class AdaptationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows and does; see `ControllerStatus`. foreign_load: part of the `processors` that other
    programs use, from 0 to 1; None where that is not known. corrections: of profiles, by model. refinement: how far
    that of profiles is, in words; empty where there is none. decisions: the latest first. deciding: from what made it
    plan anew to its answer to the plan."""

    activity: str
    reason: str
    short: str
    foreign_load: float | None
    processors: int
    observed_slowdown: float
    models: dict[str, ModelState]
    decisions: tuple[DecisionStatus, ...]
    corrections: dict[str, ProfileCorrection] = {}
    refinement: str = ""
    deciding: DurationSummary | None = None

    def sentences(self) -> list[str]:
        """Say what it does and why, what is in its way, and what cannot be served."""
        lines = [self.activity + (f": {self.reason}" if self.reason else "")]
        if self.foreign_load is not None and self.foreign_load >= NOTABLE_LOAD:
            lines.append(
                f"other programs use {self.foreign_load * self.processors:.1f} of {self.processors} processors"
            )
        if self.observed_slowdown >= NOTABLE_SLOWDOWN:
            lines.append(f"batches take {self.observed_slowdown:.2g} × as long as predicted")
        if self.short:
            lines.append(self.short)
        for name, known in sorted(self.corrections.items()):
            since = datetime.fromtimestamp(known.since, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
            lines.append(
                f"profile of {name} corrected by × {known.factor:.3g}, from {known.batches} batches, since {since}"
            )
        if self.refinement:
            lines.append(self.refinement)
        return lines

    def rows(self) -> list[list[str]]:
        """Return a row a model, as text: name, offered/s, planned/s, sustained/s, slowdown that its plan counts with,
        observed against that, attainment of late."""
        return [
            [
                name,
                f"{model.offered:.1f}",
                f"{model.planned:.1f}",
                f"{model.sustained:.1f}",
                f"{model.slowdown:.2f}",
                f"{model.observed_slowdown:.2f}",
                "-" if model.attainment is None else f"{model.attainment * 100:.2f} %",
            ]
            for name, model in self.models.items()
        ]


def phase_durations(rollout: RevisionStatus, adaptation: AdaptationStatus | None) -> list[tuple[str, DurationSummary]]:
    """Return how long the steps from a decision to the end of its rollout took, in their order, of those that were
    taken."""
    deciding = None if adaptation is None else adaptation.deciding
    steps = [*([] if deciding is None else [("decision", deciding)]), *rollout.durations.items()]
    return [(step, summary) for step, summary in steps if summary.count]


class BatchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The batches of a model on a lane of the plan in force, since the start. device, partition: as metrics label them;
    what the partition of that number ran under plans before counts, too. profiled, predicted, observed: mean seconds of
    a batch as profiled without co-located models, as planned, and as seen."""

    lane: LaneId
    device: str
    partition: str
    model: str
    batches: int
    profiled: float
    predicted: float
    observed: float

    def row(self) -> list[str]:
        """Return lane, model, batches, the three means, and predicted and observed slowdown as text."""
        means = self.profiled, self.predicted, self.observed
        slowdowns = [f"{mean / self.profiled:.2f}" if self.profiled else "-" for mean in means[1:]]
        return [str(self.lane), self.model, str(self.batches), *map(show_seconds, means), *slowdowns]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is and does at this moment, as its parts tell at once. targets: seconds by model; objectives: the
    fractions that must meet them. planned: requests/s that come from outside, by model. labels, waiting: by lane, its
    partition, and requests in its queues by model. reload_error: why the last reload of the settings was rejected;
    empty where it was not. file_errors: why state, profiles or event log cannot be written. adaptation: None where the
    plan stays as it was made. jobs: best-effort jobs, the oldest first."""

    backend: str
    isolation: str
    accepting: bool
    rollout: RevisionStatus
    targets: dict[str, float]
    objectives: dict[str, float]
    planned: dict[str, float]
    models: list[IndexEntry]
    workers: list[WorkerStatus]
    labels: dict[LaneId, PartitionLabel]
    waiting: dict[LaneId, dict[str, int]]
    reload_error: str
    file_errors: tuple[str, ...] = ()
    adaptation: AdaptationStatus | None
    jobs: tuple[JobStatus, ...] = ()


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """isolation: what keeps workers to their shares, in words. targets: seconds by model. planned: requests/s that
    come from outside, by model. startup: how far the start is, in words; empty once the server has started.
    reload_error: why the last reload of the settings was rejected; empty where it was not. file_errors: why state,
    profiles or event log cannot be written. adaptation: None where the plan stays as it was made. jobs: best-effort
    jobs, the oldest first. nodes: none where devices are of this machine alone. batches: by lane and model, those that
    ran."""

    backend: str
    isolation: str
    ready: bool
    plan: msgspec.Raw
    rollout: RevisionStatus = RevisionStatus()
    targets: dict[str, float]
    planned: dict[str, float]
    models: list[IndexEntry]
    statistics: dict[str, ModelStatus]
    workers: list[WorkerStatus]
    startup: str = ""
    reload_error: str = ""
    file_errors: tuple[str, ...] = ()
    adaptation: AdaptationStatus | None = None
    jobs: tuple[JobStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    batches: tuple[BatchStatus, ...] = ()

    def duration_rows(self) -> list[list[str]]:
        """Return a row for each step of rollouts, as text: name, count, p50, p99, max."""
        return [[step, *summary.row()] for step, summary in phase_durations(self.rollout, self.adaptation)]

    def rows(self, plan: Plan) -> list[list[str]]:
        """Return a row a model, as text: name, state, target, planned/s, served, mean, attainment, what
        there is to say of it: why it is not as wanted, other outcomes."""
        rows = []
        for entry in self.models:
            counts = self.statistics.get(entry.name)
            if counts is None or entry.name not in self.targets:
                rows.append([entry.name, entry.state, *[""] * 5, entry.reason])
                continue
            others = ", ".join(f"{n} {end}" for end, n in counts.outcomes.items() if n and end != "served")
            notes = [entry.reason, others] if entry.state == "READY" else [entry.reason or others]
            rows.append(
                [
                    entry.name,
                    entry.state,
                    show_seconds(self.targets[entry.name]),
                    f"{plan.rate(entry.name) or self.planned.get(entry.name, 0.0):.1f}",
                    str(counts.outcomes["served"]),
                    "-" if counts.mean is None else show_seconds(counts.mean),
                    "-" if counts.attainment is None else f"{counts.attainment * 100:.2f} %",
                    "; ".join(filter(None, notes)),
                ]
            )
        return rows
