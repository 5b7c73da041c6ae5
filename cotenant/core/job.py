"""Describe best-effort jobs: work without a target that takes what serving leaves idle.

Times are unix seconds. Share-seconds are processor seconds on a processor, and elsewhere seconds times the share of the
device that a job was granted.
"""

from __future__ import annotations

import math
import re
import shlex
from enum import StrEnum
from pathlib import PurePath

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.errors import ConfigError

JobId = str  # the job's name and its number, such as "digits-7"; never given twice

HEAVIEST = 100  # the highest priority
MOST_RETRIES = 100
LONGEST_GRACE = 3600.0  # seconds
MOST_THREADS = 1024
LARGEST_BATCH = 1 << 20
LONGEST_NAME = 64  # characters
LONGEST_COMMAND = 128 << 10  # bytes of a command with its arguments
LONGEST_LINE = 200  # characters of a command that are shown
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Training(msgspec.Struct, frozen=True, kw_only=True, tag="training", forbid_unknown_fields=True):
    """Train a network in steps.

    source: one of the zoo's (``digits``), or a generator function in a file of Python (``train.py:epochs``), each
    ``yield`` of which ends a step. batch, steps: None: what the source says itself.
    """

    source: str
    batch: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        file, colon, function = self.source.rpartition(":")
        if not self.source or (colon and not (file and function.isidentifier())):
            raise ConfigError(
                f"source: {self.source!r} names nothing to train; write a name of the zoo, such as digits, or"
                " FILE.py:FUNCTION"
            )
        _check_range("batch", self.batch, 1, LARGEST_BATCH)
        _check_range("steps", self.steps, 1, 1 << 53)

    @property
    def file(self) -> tuple[str, str] | None:
        """Return the file of Python and the function in it; None where the zoo's."""
        file, colon, function = self.source.rpartition(":")
        return (file, function) if colon else None


class BatchInference(msgspec.Struct, frozen=True, kw_only=True, tag="inference", forbid_unknown_fields=True):
    """Run a model over a file of inputs and write its outputs to another. batch: None: the largest of the model."""

    model: str
    input: str
    output: str
    batch: int | None = None

    def __post_init__(self) -> None:
        for key, value in (("model", self.model), ("input", self.input), ("output", self.output)):
            if not value or "\0" in value:
                raise ConfigError(f"{key}: {value!r} is not a {'name' if key == 'model' else 'path'}")
        _check_range("batch", self.batch, 1, LARGEST_BATCH)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag="command", forbid_unknown_fields=True):
    """Run a program with arguments, without a shell. directory: where it runs; None: in the job's own folder."""

    argv: tuple[str, ...]
    directory: str | None = None

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise ConfigError("argv: a command needs a program to run")
        if any("\0" in part for part in (*self.argv, self.directory or "")):
            raise ConfigError(f"argv: {' '.join(self.argv)!r} contains a null character")
        length = sum(len(part.encode(errors="surrogateescape")) + 1 for part in self.argv)
        if length > LONGEST_COMMAND:
            raise ConfigError(f"argv: {length} bytes, of at most {LONGEST_COMMAND}; put them into a file")


Work = Training | BatchInference | Command


def reaches_files(work: Work) -> bool:
    """Tell whether work runs code or names files of the submitter's choice, as the user that the server runs as."""
    return not isinstance(work, Training) or work.file is not None


def describe_work(work: Work) -> str:
    """Say in a few words what a job does, for tables and logs."""
    match work:
        case Training(source=source):
            return f"trains {source}"
        case BatchInference(model=model, input=path):
            return f"{model} over {path}"
        case Command(argv=argv):
            line = shlex.join(argv)
            return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe a best-effort job. Raises ConfigError, with key, value and way out, for values out of range.

    priority: weight of its part of what is idle, from 1 to 100: 2 gets twice the share-seconds of 1.
    memory: bytes that it may have; None: no limit of its own.
    deadline: by when it should be done.
    retries: how often it is started again after it has failed.
    grace: seconds that it has from being told to stop until it is killed.
    threads: how many compute at once; None: one for each core of its device.
    """

    id: JobId
    name: str
    work: Work
    priority: int = 1
    memory: int | None = None
    deadline: float | None = None
    retries: int = 3
    grace: float = 10.0
    threads: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            raise ConfigError(
                f"name: {self.name!r} must begin with a letter or digit, go on with those, '.', '_' or '-', and have at"
                f" most {LONGEST_NAME} characters"
            )
        if not self.id or not _NAME.fullmatch(self.id):
            raise ConfigError(f"id: {self.id!r} is not a job's; ids are a name and a number, such as job-7")
        _check_range("priority", self.priority, 1, HEAVIEST)
        _check_range("memory", self.memory, 1 << 20, 1 << 62)
        _check_range("deadline", self.deadline, 0, 1e11)
        _check_range("retries", self.retries, 0, MOST_RETRIES)
        _check_range("grace", self.grace, 0, LONGEST_GRACE)
        _check_range("threads", self.threads, 1, MOST_THREADS)


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold what is submitted: a `Job` without its id. name: "": what its work suggests."""

    work: Work
    name: str = ""
    priority: int = 1
    memory: int | None = None
    deadline: float | None = None
    retries: int = 3
    grace: float = 10.0
    threads: int | None = None

    def job(self, number: int) -> Job:
        """Return the job of that number. Raises ConfigError, with key and value, for values out of range."""
        name = self.name or _suggested_name(self.work)
        return Job(
            id=f"{name}-{number}",
            name=name,
            work=self.work,
            priority=self.priority,
            memory=self.memory,
            deadline=self.deadline,
            retries=self.retries,
            grace=self.grace,
            threads=self.threads,
        )


class JobState(StrEnum):
    """Say where a job stands: it waits, has a process, was paused by its owner, or ended in one of three ways."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Report how far a job got.

    steps, total: steps done, and of how many; None: unknown. A retry goes on from the job's last checkpoint, so steps
    may fall. share_seconds: taken by all attempts so far. metrics: what the last step reported, such as accuracy.
    throughput: steps a second of late, by the clock.
    """

    steps: int = 0
    total: int | None = None
    share_seconds: float = 0.0
    metrics: dict[str, float] = {}
    throughput: float = 0.0


class JobInterference(msgspec.Struct, frozen=True, kw_only=True):
    """Report how a job and what is served on its device slow each other, as factors of at least 1; None: unknown.

    job: by how much its steps take longer. serving: by how much batches take longer, of the model that is slowed most.
    """

    job_predicted: float | None = None
    job_observed: float | None = None
    serving_predicted: float | None = None
    serving_observed: float | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Report a job as it stands.

    reason: for people: why it waits, is paused, was given nothing, or failed; empty otherwise.
    attempt: how often it was started. device: where it runs, or ran last.
    granted: the share of the device, in ‰, that its next step may use.
    submitted_at, started_at, ended_at: unix seconds; started_at: of the first attempt.
    predicted_end: from share-seconds a step and the idle share of late; None where that is unknown.
    will_miss_deadline: its deadline passed, or is predicted to be missed.
    """

    job: Job
    state: JobState
    reason: str = ""
    attempt: int = 0
    device: DeviceId | None = None
    granted: int = 0
    progress: Progress = Progress()
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    predicted_end: float | None = None
    will_miss_deadline: bool = False
    interference: JobInterference = JobInterference()


def _suggested_name(work: Work) -> str:
    match work:
        case Training(source=source):
            suggested = source if work.file is None else PurePath(work.file[0]).stem
        case BatchInference(model=model):
            suggested = model
        case Command(argv=argv):
            suggested = PurePath(argv[0]).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", suggested).strip("._-")[:LONGEST_NAME] or "job"


def _check_range(key: str, value: float | None, least: float, most: float) -> None:
    """Raise ConfigError for a value that is given and not in range, or not a number."""
    if value is not None and not (math.isfinite(value) and least <= value <= most):
        raise ConfigError(f"{key}: {value:g} must be between {least:g} and {most:g}")
