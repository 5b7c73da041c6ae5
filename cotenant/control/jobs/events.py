"""Define the events and commands of the scheduler of best-effort jobs.

Values only, so that a log of them is complete and replays. An *attempt* is one process group that runs a job, numbered
from 1; its number is never given again to the job, so that late events of an earlier one are recognised.
"""

from __future__ import annotations

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.job import Job, JobId, JobInterference, JobStatus
from cotenant.core.units import WHOLE

CANCELLED = "cancelled by its owner"


class StoredJob(msgspec.Struct, frozen=True):
    """Hold what outlives the server. failures: attempts that count against the job's retries. cancelled: its owner has
    asked for its end, which has not come yet."""

    status: JobStatus
    failures: int = 0
    cancelled: bool = False


class DeviceIdle(msgspec.Struct, frozen=True):
    """Report what serving leaves of a device.

    idle: the share, in ‰, that neither serving nor foreign programs use now; what jobs use counts as idle.
    memory: bytes that all jobs on it together may have; None: unknown, and not limited.
    capacity: share-seconds that the whole device gives in a second: processors of a machine, 1 of a GPU.
    """

    idle: int
    memory: int | None = None
    capacity: float = 1.0

    def share_of(self, processors: float) -> int:
        """Return the largest share, in ‰, that so many processors are; the whole where it is a GPU."""
        return WHOLE if self.capacity <= 1 else min(WHOLE, round(WHOLE * processors / self.capacity))


# From owners, through the front end.


class JobSubmitted(msgspec.Struct, frozen=True, tag=True):
    """Ask for a job to run. Its id has not been given before."""

    job: Job


class JobPauseAsked(msgspec.Struct, frozen=True, tag=True):
    """Ask for a job to get nothing until it is resumed; its process stays while there is memory for it."""

    id: JobId


class JobResumeAsked(msgspec.Struct, frozen=True, tag=True):
    id: JobId


class JobCancelAsked(msgspec.Struct, frozen=True, tag=True):
    """Ask for a job to end: it is told, and killed after its grace. reason: for people."""

    id: JobId
    reason: str = CANCELLED


# From the driver of job processes. It answers each `StartJob` by exactly one `JobRefused`, or by `JobExited` once
# nothing of the attempt is left, also where a process could not be made ready.


class JobProgressed(msgspec.Struct, frozen=True, tag=True):
    """Report how far an attempt got, some times a second while it runs.

    steps, total: of the job, those before this attempt's checkpoint included; total: None where unknown.
    share_seconds: taken by this attempt so far. metrics: what the last step reported.
    """

    id: JobId
    attempt: int
    steps: int = 0
    total: int | None = None
    share_seconds: float = 0.0
    metrics: dict[str, float] = {}


class JobExited(msgspec.Struct, frozen=True, tag=True):
    """Report that nothing of an attempt is left.

    completed: its work is done. reason: otherwise, why it ended, for people. hopeless: to try again would end the same
    way, as where a file is gone. share_seconds: taken by this attempt in all.
    """

    id: JobId
    attempt: int
    completed: bool
    reason: str = ""
    hopeless: bool = False
    share_seconds: float = 0.0


class JobRefused(msgspec.Struct, frozen=True, tag=True):
    """Report that the system lacked the resources for one more process, which is no fault of the job's."""

    id: JobId
    attempt: int
    reason: str


class JobInterfered(msgspec.Struct, frozen=True, tag=True):
    """Report how a job and what is served slow each other, as predicted and as observed."""

    id: JobId
    interference: JobInterference


# From what observes serving.


class DevicesObserved(msgspec.Struct, frozen=True, tag=True):
    """Report the devices that may have jobs, all of them, some times a second."""

    devices: dict[DeviceId, DeviceIdle]


class PressureSeen(msgspec.Struct, frozen=True, tag=True):
    """Report why serving needs devices now, in words: a queue grows, a rate steps up, attainment is in danger, a
    rollout is in progress. Said as soon as it is seen, and again as long as it lasts."""

    devices: dict[DeviceId, str]


class ModelsChanged(msgspec.Struct, frozen=True, tag=True):
    """Report the models that batch inference can run now."""

    models: frozenset[str]


# From the placement of jobs, and from the server.


class JobPlaced(msgspec.Struct, frozen=True, tag=True):
    """Answer `PlaceJob`. device: None where no device will do now; reason says why, for people."""

    id: JobId
    device: DeviceId | None
    reason: str = ""


class JobsRestored(msgspec.Struct, frozen=True, tag=True):
    """Report the jobs of the last run of the server, before any other event."""

    jobs: tuple[StoredJob, ...]


class JobsShutdown(msgspec.Struct, frozen=True, tag=True):
    """Tell all jobs to stop, within `grace` seconds at most; none is started any more. They go on after a restart."""

    grace: float


class JobsWoke(msgspec.Struct, frozen=True, tag=True):
    """Report that the time of `WakeJobsAt` has come. A stale one is harmless, and so is an early one."""


JobEvent = (
    JobSubmitted
    | JobPauseAsked
    | JobResumeAsked
    | JobCancelAsked
    | JobProgressed
    | JobExited
    | JobRefused
    | JobInterfered
    | DevicesObserved
    | PressureSeen
    | ModelsChanged
    | JobPlaced
    | JobsRestored
    | JobsShutdown
    | JobsWoke
)


class PlaceJob(msgspec.Struct, frozen=True, tag=True):
    """Ask on which device a job should run; the answer is `JobPlaced`.

    devices: those with idle share and memory for it, never none, with the jobs that run there.
    """

    job: Job
    devices: dict[DeviceId, tuple[Job, ...]]


class StartJob(msgspec.Struct, frozen=True, tag=True):
    """Start an attempt, with a share of 0 until `GrantShare`. The job has no other."""

    job: Job
    device: DeviceId
    attempt: int


class GrantShare(msgspec.Struct, frozen=True, tag=True):
    """Let an attempt use this share of its device, in ‰, from its next step on; 0: none."""

    id: JobId
    attempt: int
    share: int


class TellStop(msgspec.Struct, frozen=True, tag=True):
    """Tell an attempt to save its checkpoint and exit, which it may do without regard to its share, and while it has
    none. It is killed where it takes longer than its grace."""

    id: JobId
    attempt: int
    reason: str


class KillJob(msgspec.Struct, frozen=True, tag=True):
    """Kill all processes of an attempt now."""

    id: JobId
    attempt: int
    reason: str


class KeepJob(msgspec.Struct, frozen=True, tag=True):
    """Store a job in place of what was stored of it."""

    stored: StoredJob


class ForgetJob(msgspec.Struct, frozen=True, tag=True):
    """Remove what is stored of a job that ended, its folder included: too many have ended since."""

    id: JobId


class DeadlineMissed(msgspec.Struct, frozen=True, tag=True):
    """Warn that a job will miss its deadline, or has. Said once, and again if that had changed meanwhile.

    end: unix seconds at which it is predicted to end; None where that is unknown.
    """

    id: JobId
    deadline: float
    end: float | None


class WakeJobsAt(msgspec.Struct, frozen=True, tag=True):
    """Send `JobsWoke` at that time, in place of any earlier wish."""

    time: float


JobCommand = PlaceJob | StartJob | GrantShare | TellStop | KillJob | KeepJob | ForgetJob | DeadlineMissed | WakeJobsAt
