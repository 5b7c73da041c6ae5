"""Hold what the pool knows of each lane: its setup, its worker, the batch in flight there."""

from __future__ import annotations

import msgspec

from cotenant.backends import Launch
from cotenant.core.identity import LaneId
from cotenant.live.process import WorkerConnection, WorkerProcess
from cotenant.live.share_audit import ShareAudit
from cotenant.worker.arena import Block
from cotenant.worker.wire import WorkerModel


class LaneSetup(msgspec.Struct, frozen=True):
    """Describe what a lane is started with. share: ‰ of its device."""

    share: int
    models: tuple[WorkerModel, ...]


class Flight(msgspec.Struct):
    """Hold a batch in flight.

    kept: what must stay in memory meanwhile. room: arena memory for its large outputs. requests: their number.
    """

    batch: int
    model: str
    rows: int
    since: float
    kept: list[object]
    room: Block | None
    requests: int


class LaneWorker:
    """Track one incarnation of a lane's worker. standby: it waits until the lane's worker dies."""

    def __init__(self, lane: WorkerLane, incarnation: int, *, standby: bool = False) -> None:
        self.lane = lane
        self.incarnation = incarnation
        self.standby = standby
        self.line: WorkerConnection | None = None
        self.ready = False
        self.killed = ""  # the reason, once it was killed
        self.retiring = False
        self.over = False  # its end was reported
        self.resize_due = False  # report another share to it before its next batch
        self.sample_due = False  # sample CPU time when its batch ends: amid a batch it has used more than it has earned


class WorkerLane:
    """Hold a partition, its latest worker and its standby worker."""

    def __init__(self, name: LaneId, setup: LaneSetup) -> None:
        self.name = name
        self.share = setup.share
        self.models = {model.name: model for model in setup.models}
        self.launch = Launch()  # until the backend opens it
        self.opened = False
        self.worker: LaneWorker | None = None
        self.standby: LaneWorker | None = None
        self.audit: ShareAudit | None = None

    @property
    def process(self) -> WorkerProcess | None:
        """Return the process of its worker; None unless that is ready."""
        worker = self.worker
        return worker.line.process if worker is not None and worker.ready and not worker.over and worker.line else None


def new_audit(lane: WorkerLane) -> ShareAudit | None:
    """Return the audit of a lane whose worker just started; None where its share is not of CPU time."""
    launch = lane.launch
    return None if launch.budget is None else ShareAudit(lane.name, lane.share, launch.budget, lent=launch.lend)


def why_not(lane: WorkerLane | None, model: str) -> str:
    """Return why a lane cannot take a batch of a model."""
    if lane is None:
        return "there is no such lane"
    if lane.worker is None or not lane.worker.ready:
        return "its worker is not ready"
    return "it runs another" if model in lane.models else f"it has no model {model!r}, only {', '.join(lane.models)}"
