"""Define the events that the dispatcher takes and the commands that it returns.

A *lane* is a worker of a partition at run time; see `core.identity` for how it is named.
"""

from __future__ import annotations

import msgspec

from cotenant.core.application import Fanout
from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request


class LaneModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a placement as the dispatcher needs it.

    latencies: predicted seconds of 1, 2, … rows; its length is the largest batch. max_queue_delay: see `Model`. rate:
    planned requests per second.
    """

    model: str
    latencies: tuple[float, ...]
    max_queue_delay: float = 0.0
    rate: float = 0.0


class LaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a lane and the models that it serves."""

    id: LaneId
    models: tuple[LaneModel, ...]


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a stage of an application at run time.

    after: indices of the stages that it follows. downstream: seconds of the target kept for the stages behind it.
    counted: see `core.application.Stage`.
    """

    name: str
    model: str
    after: tuple[int, ...] = ()
    downstream: float = 0.0
    fanout: Fanout
    counted: bool = False


class ApplicationSpec(msgspec.Struct, frozen=True):
    """Describe an application at run time. slo: end-to-end target in seconds. stages: in topological order."""

    name: str
    slo: float
    stages: tuple[StageSpec, ...]


# Events.


class Arrived(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that a request has arrived. others: those that arrived with it: an idle lane takes all that fit, rather
    than the first alone."""

    request: Request
    others: tuple[Request, ...] = ()


class Cancelled(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that the caller of a request left."""

    request: int


class Finished(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that a batch is done. failed: those of its requests, by id, on which the model failed, with its reason.

    made: (request, stage, count) where the answer to a request of an application tells how many requests of a later
    stage there are. lent: seconds by which the batch ended earlier than its lane's share alone would have let it; plans
    and admission do not count on them.
    """

    lane: LaneId
    batch: int
    failed: tuple[tuple[int, str], ...] = ()
    made: tuple[tuple[int, int, int], ...] = ()
    lent: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that the model raised an error on a whole batch; its worker lives."""

    lane: LaneId
    batch: int
    reason: str


class Died(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that a lane's worker died, and its batch is lost. others: lanes whose workers died at the same moment,
    such as those of the same process or device: a batch is not retried on any of them before it has a new worker. back:
    when that is expected, by lane, as in `Restarting`; at once where a standby worker takes over."""

    lane: LaneId
    reason: str
    others: tuple[LaneId, ...] = ()
    back: dict[LaneId, float] = {}


class Ready(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that a lane's worker is ready."""

    lane: LaneId


class Restarting(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that the worker of a lane that died is expected to be ready again at `time`, as far as earlier starts
    tell. Requests that can be answered in time afterwards are taken until then."""

    lane: LaneId
    time: float


class Woke(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that the `time` of a `WakeAt` has come. A stale one is harmless, and so is an early one."""

    lane: LaneId
    time: float


class Applied(msgspec.Struct, frozen=True, tag=True):
    """Replace the lanes. A lane that is missing drains: it finishes its batch, and its waiting requests go to other
    lanes. A new lane is down until it is `Ready`. applications: from now on; None: unchanged."""

    lanes: tuple[LaneSpec, ...]
    applications: tuple[ApplicationSpec, ...] | None = None


Event = Arrived | Cancelled | Finished | Failed | Died | Restarting | Ready | Woke | Applied

# Commands.


class Run(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Run these requests of one model as one batch on a lane."""

    lane: LaneId
    batch: int
    model: str
    requests: tuple[Request, ...]


class Split(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Run the rows of a request, or of such a part of one, in these parts, in order. No `Reply` is about a part."""

    request: int
    parts: tuple[Request, ...]


class Reply(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that these requests, all of one model, have ended. reason: for people, empty where served.

    retry_after: seconds after which a rejected caller may retry. lane, batch, started: where and in which batch a
    served request ran, and since when.
    """

    requests: tuple[Request, ...]
    outcome: Outcome
    reason: str = ""
    retry_after: float = 0.0
    lane: LaneId | None = None
    batch: int = -1
    started: float = 0.0


class WakeAt(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Send `Woke(lane, time)` at that time."""

    lane: LaneId
    time: float


class Drained(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Report that a removed lane holds nothing any more; its worker may stop."""

    lane: LaneId


class Spawn(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Create a request of a stage for a request of an application; its inputs come from the stages before it. item: its
    index among those created at once."""

    whole: int
    stage: int
    request: Request
    item: int = 0


Command = Run | Reply | WakeAt | Drained | Spawn | Split
