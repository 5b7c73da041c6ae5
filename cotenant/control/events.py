"""Define the events, commands and messages of the rollout and the supervisor.

Values only, so that a log of them is complete. A worker *incarnation* is one process, or one thread of a shared
process, that serves a lane; its number is never reused, so that late events of an earlier one are recognised.
"""

from __future__ import annotations

import msgspec

from cotenant.control.revision import PlannedLane, PlanRevision, RolloutDurations, RolloutOutcome
from cotenant.core.identity import DeviceId, LaneId
from cotenant.runtime import events as runtime

# From the rollout, or a caller without one, to the supervisor.


class StartLane(msgspec.Struct, frozen=True, tag=True):
    """Start the worker of a lane that has none.

    leaving: lanes that stop once this one has taken over; it may reuse their place. retry: a failed first start is
    retried like any other; otherwise it ends in `StartFailed`.
    """

    lane: LaneId
    device: DeviceId
    leaving: tuple[LaneId, ...] = ()
    retry: bool = False


class StopLane(msgspec.Struct, frozen=True, tag=True):
    """Let a lane finish its batch within `grace` seconds, and take it down. Every one is answered by `LaneStopped`."""

    lane: LaneId
    grace: float


class KeepStandbys(msgspec.Struct, frozen=True, tag=True):
    """Let these lanes have standby workers while they are ready, and no other lane."""

    lanes: frozenset[LaneId]


# From the supervisor to the rollout.


class LaneReady(msgspec.Struct, frozen=True, tag=True):
    """Report that a lane's worker is ready, for the first time or after a restart."""

    lane: LaneId


class LanesDown(msgspec.Struct, frozen=True, tag=True):
    """Report that the workers of ready lanes exited at the same moment, and their batches are lost. They are restarted,
    unless that was `expected`: the lanes are stopping. back: by lane, when it will probably be ready again; now where a
    standby worker takes over."""

    lanes: tuple[LaneId, ...]
    reason: str
    expected: bool = False
    back: dict[LaneId, float] = {}


class LaneRestarts(msgspec.Struct, frozen=True, tag=True):
    """Report that a lane whose worker died will probably be ready again at `time`."""

    lane: LaneId
    time: float


class LaneLost(msgspec.Struct, frozen=True, tag=True):
    """Report that a lane's device is lost; the worker is restarted when the device is back."""

    lane: LaneId
    reason: str


class LaneFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a lane permanently failed: too many deaths in a row. It is not restarted, except by `ReviveLane`."""

    lane: LaneId
    reason: str
    deaths: int


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that a lane did not get ready for the first time. Nothing of it is left."""

    lane: LaneId
    reason: str


class LaneStopped(msgspec.Struct, frozen=True, tag=True):
    """Report that nothing of the lane is left."""

    lane: LaneId


LaneNews = LaneReady | LanesDown | LaneRestarts | LaneLost | LaneFailed | StartFailed | LaneStopped

# To the supervisor, from the workers' transport and from the operator. The transport answers each `SpawnWorker` by
# `WorkerRefused`, or by `WorkersExited` once nothing of the worker is left, with `WorkerReady` before if it got there.


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    lane: LaneId
    incarnation: int


class WorkersExited(msgspec.Struct, frozen=True, tag=True):
    """Report that workers exited, whether expected or not, or could not be set up: one, or all that shared a process.

    workers: lane and incarnation of each. reason: that of `KillWorker` where one was killed.
    """

    workers: tuple[tuple[LaneId, int], ...]
    reason: str


class WorkerRefused(msgspec.Struct, frozen=True, tag=True):
    """Report that the system lacked the resources for one more process, which is no fault of the lane's."""

    lane: LaneId
    incarnation: int
    reason: str


class WorkerBusy(msgspec.Struct, frozen=True, tag=True):
    """Report that a worker has been running a batch since a time; sent periodically. batch: in words. predicted: how
    many seconds it was to take."""

    lane: LaneId
    incarnation: int
    since: float
    batch: str
    predicted: float = 0.0


class PartitionClosed(msgspec.Struct, frozen=True, tag=True):
    """Report that a lane's partition is closed, as `ClosePartition` asked."""

    lane: LaneId
    incarnation: int


class DevicesLost(msgspec.Struct, frozen=True, tag=True):
    """Report why nothing can run on these devices now: one device, or all of a node."""

    devices: dict[DeviceId, str]


class DeviceRestored(msgspec.Struct, frozen=True, tag=True):
    device: DeviceId


class ReviveLane(msgspec.Struct, frozen=True, tag=True):
    """Retry a permanently failed lane, or a standby worker that failed as often, as if it had never failed."""

    lane: LaneId


class Woke(msgspec.Struct, frozen=True, tag=True):
    """Report that the `time` of a `WakeAt` has come. A stale one is harmless, and so is an early one."""

    lane: LaneId
    time: float


SupervisorEvent = (
    StartLane
    | StopLane
    | KeepStandbys
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
    """Start a worker for a lane. fresh: open its partition first, again if it was open. leaving: see `StartLane`.
    standby: it gets no batch before `PromoteWorker`; the lane has a worker beside it."""

    lane: LaneId
    incarnation: int
    fresh: bool
    leaving: tuple[LaneId, ...] = ()
    standby: bool = False


class PromoteWorker(msgspec.Struct, frozen=True, tag=True):
    """Make a standby the lane's worker, whose last one exited. It may still be loading its models."""

    lane: LaneId
    incarnation: int


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    """Kill a worker now. abandon: do not wait for its end, and ignore whatever it reports."""

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
    """Close the partition of a lane, which has no worker left. incarnation: of its last worker."""

    lane: LaneId
    incarnation: int


class WakeAt(msgspec.Struct, frozen=True, tag=True):
    """Send `Woke(lane, time)` at that time."""

    lane: LaneId
    time: float


SupervisorCommand = SpawnWorker | PromoteWorker | KillWorker | RetireWorker | ClosePartition | WakeAt | LaneNews

# To the rollout, from the planner and from the dispatcher.


class Requested(msgspec.Struct, frozen=True, tag=True):
    """Request that this revision be in force from now on."""

    revision: PlanRevision


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """Report the lanes of a revision, as `Assign` asked.

    capacity: bytes of memory of each device where that is known. applications: as in `runtime.events.Applied`.
    """

    number: int
    lanes: tuple[PlannedLane, ...]
    capacity: dict[DeviceId, int] = {}
    applications: tuple[runtime.ApplicationSpec, ...] | None = None


class Unassignable(msgspec.Struct, frozen=True, tag=True):
    """Report that a revision has no lanes on the present devices."""

    number: int
    reason: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """Report that the dispatcher was told as `Switch` asked; the new lanes are in force."""

    number: int


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Abort a revision on behalf of the operator. One that is in force already stays."""

    number: int
    reason: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Shut down: stop all lanes, each within `grace` seconds; nothing is started any more."""

    reason: str
    grace: float


RolloutEvent = Requested | Assigned | Unassignable | Switched | Aborted | Shutdown | runtime.Drained | LaneNews

# From the rollout.


class Assign(msgspec.Struct, frozen=True, tag=True):
    """Ask for the lanes of a revision; the answer is `Assigned` or `Unassignable`. Lanes of partitions that are in
    force already keep their names, and with them their workers."""

    revision: PlanRevision


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Tell the dispatcher."""

    event: runtime.Applied | runtime.Ready | runtime.Died | runtime.Restarting


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Tell the dispatcher all of this at one moment, then send `Switched`. both: the old lanes and the new, so that
    waiting requests can move. ready: all new ones. new: the lanes of the new revision alone."""

    number: int
    both: runtime.Applied
    ready: tuple[runtime.Ready, ...]
    new: runtime.Applied


class ResizeLanes(msgspec.Struct, frozen=True, tag=True):
    """Let the workers of these lanes go on with the shares and largest batches of the revision that is about to take
    over, from their next batch on. Said at one moment with `Switch`, just before it."""

    lanes: tuple[LaneId, ...]


class RolloutEnded(msgspec.Struct, frozen=True, tag=True):
    """Report how a rollout ended: in its revision, or back in the one before. reason: for people, empty where it
    completed."""

    revision: PlanRevision
    outcome: RolloutOutcome
    reason: str
    durations: RolloutDurations


RolloutCommand = Assign | StartLane | StopLane | Dispatch | ResizeLanes | Switch | RolloutEnded
