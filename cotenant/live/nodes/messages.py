"""Define the protocol between a front end and a node: what is said over one TCP connection, in which order.

The front end dials. It sends `Hello`; the node answers `Challenge`, the front end `Proof`, and the node `Welcome`:
the session begins. Instead of any of these either side may send `Goodbye`, with the reason, and close. Within a session
the front end opens pools and commands their workers as it does those of its own machine (`live.pool`); the node tells
what comes of it. Every lane and device has the name that it has on the node. Times are durations: nothing depends on
what a clock shows. With its connection a session ends, and all that runs for it; nothing of it counts later.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.worker.wire import TensorPart, Timing, WorkerModel

PROTOCOL = 2  # changes with anything in this file, and with what it refers to


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


# Beginning and end


class Hello(_Message, frozen=True):
    """Begin. version: of the program, for people. front_end: one random text for each process. host: where it runs, for
    people. nonce: random. node: what it calls the node.

    What is added to this and to `Challenge` comes last and has a default: the other end reads it before it knows that
    the versions differ, which it then says.
    """

    protocol: int
    version: str
    front_end: str
    host: str
    nonce: bytes
    node: str = ""


class Challenge(_Message, frozen=True):
    """Ask for proof of the token. nonce: random. asks: whether the node has a token."""

    protocol: int
    version: str
    nonce: bytes
    asks: bool


class Proof(_Message, frozen=True):
    """Prove to know the token, without sending it (`access.prove`). code: empty where the front end has none."""

    code: bytes


class Welcome(_Message, frozen=True):
    """Begin a session. code: proves that the node knows the token, too; empty where it has none.

    kinds: its devices. hardware_ids, divides, isolation, capacity: as of a `Backend`. machine, isolation_of_profiles:
    what describes its processors, and isolates what is profiled there, for the key of profiles.
    """

    session: str
    code: bytes
    backend: str
    kinds: tuple[Kind, ...]
    hardware_ids: tuple[str, ...]
    divides: bool
    isolation: str
    isolation_of_profiles: str
    capacity: str
    machine: str


class Goodbye(_Message, frozen=True):
    """End the connection. busy: another front end has the node, or what ran for it is still ending; try again."""

    reason: str
    busy: bool = False


class Ping(_Message, frozen=True):
    number: int


class Pong(_Message, frozen=True):
    number: int


# Models


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    """Describe a file of a model. path: within the model's folder, with slashes. digest: SHA-256."""

    path: str
    size: int
    digest: bytes


class OfferModel(_Message, frozen=True):
    """Ask whether the node has a model's files. digest: of the list of files (`model_files.digest_of`). name: of its
    folder in a repository that both may see."""

    digest: bytes
    name: str
    files: tuple[ModelFile, ...]


class SendFile(_Message, frozen=True):
    """Send a part of a file, which is the frame's body; `ModelState` answers each. file: its number in the offer."""

    digest: bytes
    file: int
    offset: int


class ModelState(_Message, frozen=True):
    """Answer an offer or a part. wanted: the node lacks the model, and takes the next part. reason: why it cannot take
    it; empty where it can."""

    digest: bytes
    wanted: bool
    reason: str = ""


# Pools and workers: the methods and events of `live.pool`, whose words these are.


class OpenPool(_Message, frozen=True):
    """Open a pool. ceilings: for measurements, so shares are ceilings."""

    pool: int
    ceilings: bool


class ClosePool(_Message, frozen=True):
    pool: int


class NodeModel(msgspec.Struct, frozen=True, array_like=True):
    """Describe a model of a lane. model: its path is of the file, within the model's folder. digest: of the offer that
    the node has accepted; empty for a model without files."""

    model: WorkerModel
    digest: bytes


class Spawn(_Message, frozen=True):
    pool: int
    lane: LaneId
    incarnation: int
    share: int
    models: tuple[NodeModel, ...]
    fresh: bool
    leaving: tuple[LaneId, ...]
    standby: bool


class Promote(_Message, frozen=True):
    pool: int
    lane: LaneId
    incarnation: int


class Kill(_Message, frozen=True):
    pool: int
    lane: LaneId
    incarnation: int
    reason: str
    abandon: bool


class Retire(_Message, frozen=True):
    pool: int
    lane: LaneId
    incarnation: int
    grace: float


class ResizedLane(msgspec.Struct, frozen=True, array_like=True):
    lane: LaneId
    share: int
    models: tuple[NodeModel, ...]


class ResizeLanes(_Message, frozen=True):
    pool: int
    lanes: tuple[ResizedLane, ...]


class ClosePartition(_Message, frozen=True):
    pool: int
    lane: LaneId
    incarnation: int


class Ready(_Message, frozen=True):
    """memory: bytes that its process has of its own. shared: the process may serve other lanes."""

    pool: int
    lane: LaneId
    incarnation: int
    memory: int
    shared: bool


class Exited(_Message, frozen=True):
    pool: int
    workers: tuple[tuple[LaneId, int], ...]
    reason: str


class NotStarted(_Message, frozen=True):
    """The system lacks the resources for one more process."""

    pool: int
    lane: LaneId
    incarnation: int
    reason: str


class Closed(_Message, frozen=True):
    pool: int
    lane: LaneId
    incarnation: int


# Batches. Large tensors are in the frame's body, where `TensorPart.start` says.


class Batch(msgspec.Struct, tag=True, array_like=True, gc=False):
    pool: int
    lane: LaneId
    batch: int
    model: str
    requests: list[list[TensorPart]]


class Answers(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Return the outputs of each request in order, or why the model failed on it. timing: `started` is the node's own
    affair. lasted: seconds that the node had the batch."""

    pool: int
    lane: LaneId
    batch: int
    requests: list[list[TensorPart] | str]
    timing: Timing
    lasted: float


class BatchFailed(_Message, frozen=True):
    pool: int
    lane: LaneId
    batch: int
    reason: str


# Observation


class LaneReading(msgspec.Struct, frozen=True, array_like=True):
    """used_share, over_share: as of a `ShareAudit`. memory: bytes that its process has of its own."""

    lane: LaneId
    used_share: float | None
    over_share: bool
    memory: int


class Observed(_Message, frozen=True):
    """Tell twice a second how things are. lost: why nothing can run on a device now. warm: pre-started processes."""

    pool: int
    lanes: tuple[LaneReading, ...]
    warm: int
    lost: dict[DeviceId, str]


ToNode = (
    Hello
    | Proof
    | Goodbye
    | Ping
    | Pong
    | OfferModel
    | SendFile
    | OpenPool
    | ClosePool
    | Spawn
    | Promote
    | Kill
    | Retire
    | ResizeLanes
    | ClosePartition
    | Batch
)
FromNode = (
    Challenge
    | Welcome
    | Goodbye
    | Ping
    | Pong
    | ModelState
    | Ready
    | Exited
    | NotStarted
    | Closed
    | Answers
    | BatchFailed
    | Observed
)
Message = Any  # one of these
