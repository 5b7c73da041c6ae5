"""Answer callers about best-effort jobs: submit, list, pause, resume, cancel, and what they have written."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from cotenant.config.toml import nearest_hint
from cotenant.control.jobs.events import JobCancelAsked, JobEvent, JobPauseAsked, JobResumeAsked, JobSubmitted
from cotenant.core.job import BatchInference, Command, JobId, JobRequest, JobStatus, Training, Work, reaches_files
from cotenant.errors import ConfigError, ForbiddenError, InvalidError, NotFoundError, UnavailableError
from cotenant.live.job_proof import JobKey

MOST_WAITING = 1000  # jobs that have not ended
MOST_OUTPUT = 1 << 20  # bytes that are read of a job's output at once
OUTPUT = "output.txt"  # in the folder of a job

CommandPolicy = Literal["user", "tokens", "off"]


class JobDriver(Protocol):
    """What runs the jobs: `feed` tells its scheduler of an event at once."""

    def feed(self, event: JobEvent) -> None: ...

    def statuses(self) -> Sequence[JobStatus]: ...


class JobRecords(Protocol):
    """Where jobs are stored. `flush` blocks until all is, and returns whether that is so."""

    def next_number(self) -> int: ...

    def folder_of(self, id: JobId) -> Path: ...

    def flush(self) -> bool: ...


class JobList(msgspec.Struct, frozen=True):
    """List jobs. problem: why none are taken, or would not survive a restart; empty where all is well."""

    jobs: list[JobStatus]
    problem: str = ""


class KeyFile(msgspec.Struct, frozen=True):
    """Say where the key lies that proves who submits (`job_proof`); empty where none is needed or will do."""

    file: str


class JobOutput(msgspec.Struct, frozen=True):
    """Hold a part of what a job has written. next: the byte from which to go on."""

    text: str
    next: int


class JobService:
    """Answer callers. Until a driver is attached, and after it is gone, jobs are unavailable for a reason.

    key: proves who submits. commands: who may submit work that runs code or names files. memory: bytes that a job has
    that names no limit. off: why there are no jobs; empty where there are.
    """

    def __init__(
        self,
        records: JobRecords | None = None,
        *,
        key: JobKey | None = None,
        commands: CommandPolicy = "user",
        memory: int | None = None,
        off: str = "",
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        self._records = records
        self._key = key
        self._commands = commands
        self._memory = memory
        self._off = off
        self._problem = problem
        self._since = datetime.now(UTC).timestamp()
        self._driver: JobDriver | None = None
        self._sources: Collection[str] | None = None

    def attach(self, driver: JobDriver, *, sources: Collection[str] | None = None) -> None:
        """Take jobs from now on. sources: names of the zoo that can be trained; None: unknown."""
        self._driver, self._sources = driver, sources

    def detach(self, reason: str) -> None:
        """Take no jobs any more."""
        self._driver, self._off = None, reason

    def jobs(self) -> JobList:
        """Return all jobs."""
        return JobList([] if self._driver is None else [*self._driver.statuses()], self._off or self._problem())

    def key_file(self) -> KeyFile:
        """Return how to prove who submits."""
        return KeyFile(str(self._key.path.absolute()) if self._key is not None and self._commands == "user" else "")

    def status(self, id: JobId) -> JobStatus:
        """Return where a job stands. Raises NotFoundError, UnavailableError."""
        for status in self._attached().statuses():
            if status.job.id == id:
                return status
        raise NotFoundError(f"no job {id!r}; `cotenant jobs list` shows all")

    async def submit_for_caller(self, body: bytes, path: str, proof: str) -> JobStatus:
        """Submit the job that a request asks for, whose caller may control the server.

        path: of the request. proof: its header, or "". Raises InvalidError, with key and value; ForbiddenError;
        UnavailableError.
        """
        try:
            request = msgspec.json.decode(body, type=JobRequest)
            request.job(1)
        except msgspec.MsgspecError as error:
            raise InvalidError(f"no job: {error}") from None
        except RecursionError:
            raise InvalidError("no job: it is nested too deeply") from None
        except ConfigError as error:
            raise InvalidError(str(error)) from None
        if reaches_files(request.work):
            self._check_user(body, path, proof)
        return await self.submit(request)

    async def submit(self, request: JobRequest) -> JobStatus:
        """Submit a job as the server's own user. Returns once it is stored. Raises InvalidError, with key and value;
        UnavailableError, also for a job that could not be stored, which is then cancelled."""
        self._attached()
        records = self._records
        assert records is not None
        await asyncio.to_thread(check_work, request.work, self._sources)
        driver = self._attached()
        if sum(not status.state.ended for status in driver.statuses()) >= MOST_WAITING:
            raise UnavailableError(f"there are {MOST_WAITING} jobs that have not ended; try again once some have")
        if request.deadline is not None and request.deadline <= datetime.now(UTC).timestamp():
            raise InvalidError(f"deadline: {request.deadline:.0f} has passed; give unix seconds in the future")
        try:
            job = msgspec.structs.replace(request, memory=request.memory or self._memory).job(records.next_number())
        except ConfigError as error:
            raise InvalidError(str(error)) from None
        driver.feed(JobSubmitted(job))
        if not await asyncio.to_thread(records.flush):
            reason = f"it cannot be stored: {self._problem()}"
            if self._driver is driver:
                driver.feed(JobCancelAsked(job.id, f"rejected: {reason}"))
            raise UnavailableError(f"job {job.id!r} is rejected: {reason}")
        return next(status for status in driver.statuses() if status.job.id == job.id)  # even if detached since

    def pause(self, id: JobId) -> JobStatus:
        return self._ask(id, JobPauseAsked(id))

    def resume(self, id: JobId) -> JobStatus:
        return self._ask(id, JobResumeAsked(id))

    def cancel(self, id: JobId) -> JobStatus:
        return self._ask(id, JobCancelAsked(id))

    async def output(self, id: JobId, start: int = 0) -> JobOutput:
        """Return what a job has written from a byte on, as much as is read at once; a negative one counts from the end.
        Raises NotFoundError, UnavailableError."""
        self.status(id)
        assert self._records is not None
        return await asyncio.to_thread(read_output, self._records.folder_of(id) / OUTPUT, start)

    def _ask(self, id: JobId, event: JobEvent) -> JobStatus:
        """Tell the scheduler what is asked of a job. Raises InvalidError for one that ended."""
        if (status := self.status(id)).state.ended:
            raise InvalidError(f"job {id!r} has {status.state}; submit it again to run it once more")
        self._attached().feed(event)
        return self.status(id)

    def _attached(self) -> JobDriver:
        if self._driver is None:
            raise UnavailableError(f"jobs are rejected: {self._off or 'the server is starting'}")
        return self._driver

    def _check_user(self, body: bytes, path: str, proof: str) -> None:
        if self._commands == "off":
            raise ForbiddenError(
                'this server rejects jobs that run code or name files (jobs.commands = "off"); submit training of the'
                " zoo's models, or change the settings"
            )
        if self._commands == "tokens":  # without one, nobody controls a server that has tokens
            return
        if self._key is None:
            raise UnavailableError(f"jobs are rejected: {self._off or 'the server is starting'}")
        self._key.check(proof, path, body, datetime.now(UTC).timestamp(), self._since)


def check_work(work: Work, sources: Collection[str] | None) -> None:
    """Raise InvalidError for work that names what is not there, with key and value. Blocks."""
    match work:
        case Training(source=source) if work.file is None:
            if sources is not None and source not in sources:
                raise InvalidError(f"source: the zoo trains no {source!r}; {nearest_hint(source, sorted(sources))}")
        case Training():
            assert work.file is not None
            _check_path("source", work.file[0], Path.is_file)
        case BatchInference(input=input, output=output):
            _check_path("input", input, Path.is_file)
            _check_path("output", output, lambda path: path.parent.is_dir(), "its folder is not there")
            if os.path.realpath(input) == os.path.realpath(output):
                raise InvalidError(f"output: {output!r} is the input, which it would replace; name another file")
        case Command(directory=directory) if directory is not None:
            _check_path("directory", directory, Path.is_dir)


def _check_path(key: str, text: str, is_there: Callable[[Path], bool], what: str = "") -> None:
    path = Path(text)
    if not path.is_absolute():
        raise InvalidError(f"{key}: {text!r} is relative; write an absolute path")
    try:
        there = is_there(path)
    except (OSError, ValueError):
        there = False
    if not there:
        raise InvalidError(f"{key}: {text!r}: {what or 'there is no such file or folder'}")


def read_output(path: Path, start: int) -> JobOutput:
    """Read a part of a file; nothing of one that is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:  # a job writes its folder: it may have put a pipe or a link there
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return JobOutput("", max(start, 0))
            size = file.seek(0, os.SEEK_END)
            begin = min(max(start if start >= 0 else size + start, 0), size)
            file.seek(begin)
            content = file.read(MOST_OUTPUT)
    except OSError:
        return JobOutput("", max(start, 0))
    text = content.decode("utf-8", "replace")
    if text.endswith("\ufffd") and begin + len(content) < size:
        whole = _whole(content)
        return JobOutput(whole.decode("utf-8", "replace"), begin + len(whole))
    return JobOutput(text, begin + len(content))


def _whole(content: bytes) -> bytes:
    """Cut off a character of UTF-8 at the end that goes on after it."""
    for length in range(1, min(4, len(content)) + 1):
        if content[-length] >= 0xC0:
            return content[:-length]
    return content
