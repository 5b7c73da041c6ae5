"""Describe a server for the page: what changes every second, and what changes with its plan. Values, as JSON has
them."""

from __future__ import annotations

import msgspec


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the last minute. slo: seconds; objective: the fraction that must meet it; planned: requests/s. The
    rest is a `ModelActivity`'s. health: "good", "warn" (it misses its SLO), "bad" (by more than five times the misses
    that it allows), "idle" (no requests), "off" (not served)."""

    name: str
    version: str
    state: str
    reason: str
    health: str
    slo: float | None = None
    objective: float | None = None
    planned: float = 0.0
    rate: float = 0.0
    goodput: float = 0.0
    refused: float = 0.0
    failed: float = 0.0
    attainment: float | None = None
    p50: float | None = None
    p99: float | None = None
    why: str = ""
    queue: int = 0


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of the plan in force, or one of its workers. share, used: parts of the device. busy: by model, part
    of the last minute in which its batches ran. slowdown, predicted_slowdown: of these batches, against what they are
    profiled to take without co-located models; None where none ran. memory: bytes, 0 where not known."""

    device: str
    partition: str
    lane: str
    models: tuple[str, ...]
    state: str
    reason: str
    share: float
    used: float | None
    over_share: bool
    busy: dict[str, float]
    queue: int
    restarts: int
    memory: int
    standby: str = ""
    slowdown: float | None = None
    predicted_slowdown: float | None = None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A best-effort job. work: what it does, in words. health: "good" (it runs), "idle" (it waits, was paused, or is
    granted nothing now), "bad" (it failed), "off" (it ended otherwise). granted: part of the device that its next step
    may use. total, throughput, predicted_end: None where not known; the latter and deadline in seconds since 1970.
    late: it is expected to miss its deadline. slowed, slows: observed slowdown of its steps, and of what is served
    beside it."""

    job: str
    work: str
    state: str
    health: str
    reason: str
    device: str
    granted: float
    steps: int
    total: int | None
    throughput: float | None
    share_seconds: float
    metrics: dict[str, float]
    attempt: int
    deadline: float | None
    predicted_end: float | None
    late: bool
    slowed: float | None
    slows: float | None


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. foreign: processors that other programs use, of `processors`; None where nothing tells. slowdown: of
    batches against what is predicted. server: processors that the server's own process uses."""

    foreign: float | None = None
    processors: int = 0
    slowdown: float | None = None
    server: float | None = None


class Alarm(msgspec.Struct, frozen=True):
    """What somebody should look at. level: "bad" or "warn". about: what it is about, the same while it lasts; where the
    page shows that, its id there."""

    level: str
    about: str
    text: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """What changes every second. state: "starting", "serving" or "stopping". points: of the charts since the start.
    jobs: those that have not ended, and the last of those that have."""

    time: float
    state: str
    points: int
    models: list[ModelView]
    partitions: list[PartitionView]
    machine: MachineView
    alarms: list[Alarm]
    jobs: list[JobView] = []


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    batch: int
    rate: float
    procs: int


class CutView(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as planned. share: part of the device."""

    share: float
    placements: list[PlacementView]


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    cuts: list[CutView]


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that ended. time: when, in seconds since 1970. seconds: how long it took; phases: each of its phases,
    in words. late: requests that missed their target meanwhile, because of it or not."""

    time: float
    revision: int
    reason: str
    outcome: str
    failed: bool
    failure: str
    seconds: float
    phases: str
    late: int


class DurationView(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step from a decision to the end of its rollout took since the start: how often it was taken, and
    seconds."""

    step: str
    count: int
    p50: float
    p99: float
    max: float


class DecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller did or found. time: when, in seconds since 1970."""

    time: float
    action: str
    reason: str


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What changes with the plan. rollout: what is under way, "" where nothing is. validation: how the plan
    was validated, in words. activity: what the controller does and why; "" where there is none. refinement: how far
    that of profiles is. durations: of the steps of rollouts. late: requests that missed their target while a rollout
    was under way, because of it or not."""

    version: str
    backend: str
    isolation: str
    planner: str
    revision: int
    reason: str
    rollout: str
    validation: str
    activity: str
    refinement: str
    unserved: dict[str, float]
    devices: list[DeviceView]
    rollouts: list[RolloutView]
    decisions: list[DecisionView]
    durations: list[DurationView]
    late: int


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    rate: list[float | None]
    goodput: list[float | None]
    p50: list[float | None]
    p99: list[float | None]


class BusyView(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    partition: str
    busy: list[float | None]


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """The points of all charts, or the last one. points: how many there have been since the start, these included."""

    points: int
    times: list[float]
    models: dict[str, SeriesView]
    partitions: list[BusyView]
