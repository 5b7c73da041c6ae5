"""What the rollout and the supervisor are told, what they want done, and what they say to each other.

Values only, so that a log of them is the whole story. A worker *incarnation* is one process, or one thread of a shared
process, that serves a lane; its number is never used again, so that late news of an earlier one is recognised.
"""

from __future__ import annotations

import msgspec

from cotenant.control.revision import PlannedLane, PlanRevision, RolloutDurations, RolloutOutcome
from cotenant.core.identity import DeviceId, LaneId
from cotenant.runtime import events as runtime

# From the rollout to the supervisor, or from whoever has no rollout.


class StartLane(msgspec.Struct, frozen=True, tag=True):
    """Start the worker of a lane that has none.

    leaving: lanes that stop once this one has taken over; it may stand where they are. retry: a first start that fails
    is tried again like any other; otherwise it ends in `StartFailed`.
    """

    lane: LaneId
    device: DeviceId
    leaving: tuple[LaneId, ...] = ()
    retry: bool = False


class StopLane(msgspec.Struct, frozen=True, tag=True):
    """Let a lane finish its batch within `grace` seconds, and take it down. Every one is answered by `LaneStopped`."""

    lane: LaneId
    grace: float


# From the supervisor to the rollout.


class LaneReady(msgspec.Struct, frozen=True, tag=True):
    """The lane's worker is up and warm: for the first time, or again."""

    lane: LaneId


class LanesDown(msgspec.Struct, frozen=True, tag=True):
    """The workers of lanes that were ready are gone at one moment, and what they ran is lost. They are started again,
    unless that was `expected`: the lanes are stopping."""

    lanes: tuple[LaneId, ...]
    reason: str
    expected: bool = False


class LaneLost(msgspec.Struct, frozen=True, tag=True):
    """The lane's device is lost; its worker is started again when the device is back."""

    lane: LaneId
    reason: str


class LaneFailed(msgspec.Struct, frozen=True, tag=True):
    """The lane's worker died too often in a row and is not started again, unless by `ReviveLane`."""

    lane: LaneId
    reason: str
    deaths: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """A lane did not get ready for the first time. Nothing of it is left."""

    lane: LaneId
    reason: str


class LaneStopped(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the lane is left."""

    lane: LaneId


LaneNews = LaneReady | LanesDown | LaneLost | LaneFailed | StartFailed | LaneStopped

# To the supervisor, from the workers' transport and from the operator. The transport answers each `SpawnWorker` by
# `WorkerRefused`, or by `WorkersExited` once nothing of the worker is left, with `WorkerReady` before if it got there.


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    lane: LaneId
    incarnation: int


class WorkersExited(msgspec.Struct, frozen=True, tag=True):
    """Workers are gone, expected or not, or could not be set up: one, or all of a process that they shared.

    workers: lane and incarnation of each. reason: that of `KillWorker` where one was killed.
    """

    workers: tuple[tuple[LaneId, int], ...]
    reason: str


class WorkerRefused(msgspec.Struct, frozen=True, tag=True):
    """The system had no resources for one more process, which is no fault of the lane's."""

    lane: LaneId
    incarnation: int
    reason: str


class WorkerBusy(msgspec.Struct, frozen=True, tag=True):
    """A worker has been at work on a batch since then; said now and then. batch: in words."""

    lane: LaneId
    incarnation: int
    since: float
    batch: str


class PartitionClosed(msgspec.Struct, frozen=True, tag=True):
    """What was set up for a lane is taken down, as `ClosePartition` asked."""

    lane: LaneId
    incarnation: int


class DevicesLost(msgspec.Struct, frozen=True, tag=True):
    """Nothing can run on these devices now, for the reason of each: one, or all of a node."""

    devices: dict[DeviceId, str]


class DeviceRestored(msgspec.Struct, frozen=True, tag=True):
    device: DeviceId


class ReviveLane(msgspec.Struct, frozen=True, tag=True):
    """Try a permanently failed lane again, as if it had never failed."""

    lane: LaneId


class Woke(msgspec.Struct, frozen=True, tag=True):
    """The `time` that a `WakeAt` asked for has come. A stale one is harmless, and so is one that comes early."""

    lane: LaneId
    time: float


SupervisorEvent = (
    StartLane
    | StopLane
    | ReviveLane
    | WorkerReady
    | WorkersExited
    | WorkerRefused
    | WorkerBusy
    | PartitionClosed
    | DevicesLost
    | DeviceRestored
    | Woke
)

# From the supervisor to the workers' transport.


class SpawnWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a worker for a lane. fresh: set its partition up first, anew if it was before. leaving: see `StartLane`."""

    lane: LaneId
    incarnation: int
    fresh: bool
    leaving: tuple[LaneId, ...] = ()


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    """End a worker now. abandon: its end is not waited for, and nothing that it says is heard any more."""

    lane: LaneId
    incarnation: int
    reason: str
    abandon: bool = False


class RetireWorker(msgspec.Struct, frozen=True, tag=True):
    """Let a worker finish its batch within `grace` seconds and exit; then kill it."""

    lane: LaneId
    incarnation: int
    grace: float


class ClosePartition(msgspec.Struct, frozen=True, tag=True):
    """Take down what was set up for a lane; no worker is left in it. incarnation: of its last worker."""

    lane: LaneId
    incarnation: int


class WakeAt(msgspec.Struct, frozen=True, tag=True):
    """Say `Woke(lane, time)` at that time."""

    lane: LaneId
    time: float


SupervisorCommand = SpawnWorker | KillWorker | RetireWorker | ClosePartition | WakeAt | LaneNews

# To the rollout, from whoever makes plans and from the dispatcher.


class Requested(msgspec.Struct, frozen=True, tag=True):
    """This revision is wanted from now on."""

    revision: PlanRevision


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """The lanes of a revision, as `Assign` asked. capacity: bytes of memory of each device where that is known.
    applications: as in `runtime.events.Applied`."""

    number: int
    lanes: tuple[PlannedLane, ...]
    capacity: dict[DeviceId, int] = {}
    applications: tuple[runtime.ApplicationSpec, ...] | None = None


class Unassignable(msgspec.Struct, frozen=True, tag=True):
    """A revision has no lanes on the devices that there are."""

    number: int
    reason: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """The dispatcher has been told what `Switch` asked; the new lanes are in force."""

    number: int


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The operator wants a revision no more. One that is in force already stays."""

    number: int
    reason: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop all lanes, each within `grace` seconds; nothing is started any more."""

    reason: str
    grace: float


RolloutEvent = Requested | Assigned | Unassignable | Switched | Aborted | Shutdown | runtime.Drained | LaneNews

# From the rollout.


class Assign(msgspec.Struct, frozen=True, tag=True):
    """Say which lanes a revision has, `Assigned` or `Unassignable`: those of partitions that are in force already keep
    their names, and with them their workers."""

    revision: PlanRevision


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Tell the dispatcher."""

    event: runtime.Applied | runtime.Ready | runtime.Died


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Tell the dispatcher all of this at one moment, then say `Switched`. both: the old lanes and the new, so that what
    waits can move. ready: all new ones. new: the lanes of the new revision alone."""

    number: int
    both: runtime.Applied
    ready: tuple[runtime.Ready, ...]
    new: runtime.Applied


class RolloutEnded(msgspec.Struct, frozen=True, tag=True):
    """A rollout ended, in its revision or back in the one before. reason: for people, empty where it completed."""

    revision: PlanRevision
    outcome: RolloutOutcome
    reason: str
    durations: RolloutDurations


RolloutCommand = Assign | StartLane | StopLane | Dispatch | Switch | RolloutEnded
