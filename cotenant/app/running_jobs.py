"""Operate the best-effort jobs of a running server from the program that runs it."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

from cotenant.config.jobs import at_place, parse_deadline, read_job
from cotenant.core.job import Command, JobId, JobRequest, JobStatus, Work
from cotenant.core.units import parse_memory
from cotenant.live.job_service import JobOutput, JobService

LOOK = 0.2  # seconds between two looks at a job that is waited for


class RunningJobs:
    """Submit, list and control jobs, from the event loop of the server. Raises RequestError's children: InvalidError
    with key and value, NotFoundError, UnavailableError where the server takes no jobs."""

    def __init__(self, service: JobService) -> None:
        self._service = service

    async def submit(
        self,
        work: Work | str | Path,
        *,
        name: str = "",
        priority: int = 1,
        memory: int | str | None = None,
        deadline: datetime | str | None = None,
        retries: int = 3,
        grace: float = 10.0,
        threads: int | None = None,
    ) -> JobStatus:
        """Submit a job; returns once it is stored.

        work: `Training`, `BatchInference`, `Command`, or a TOML file of a job, which says all the rest itself. Relative
        paths are relative to the current folder. memory: bytes, or such as "2GiB". deadline: such as "06:00", "2h".
        The rest: as of a `Job`. Raises ConfigError as well, for a file, a memory or a deadline that cannot be read.
        """
        now = datetime.now().astimezone()
        if isinstance(work, str | Path):
            return await self._service.submit(await asyncio.to_thread(read_job, Path(work), now))
        if isinstance(deadline, str):
            until: float | None = parse_deadline(deadline, "deadline", now)
        else:
            until = None if deadline is None else deadline.timestamp()
        request = JobRequest(
            work=work if isinstance(work, Command) and work.directory is None else at_place(work, Path.cwd()),
            name=name,
            priority=priority,
            memory=parse_memory(memory, "memory") if isinstance(memory, str) else memory,
            deadline=until,
            retries=retries,
            grace=grace,
            threads=threads,
        )
        return await self._service.submit(request)

    async def list(self) -> tuple[JobStatus, ...]:
        """Return all jobs, those that ended some time ago apart."""
        return tuple(self._service.jobs().jobs)

    async def status(self, id: JobId) -> JobStatus:
        """Return where a job stands."""
        return self._service.status(id)

    async def pause(self, id: JobId) -> JobStatus:
        """Give a job nothing until it is resumed."""
        return self._service.pause(id)

    async def resume(self, id: JobId) -> JobStatus:
        """Let a paused job go on."""
        return self._service.resume(id)

    async def cancel(self, id: JobId) -> JobStatus:
        """Have a job end: it is told, and killed after its grace. Returns before that; `wait` waits."""
        return self._service.cancel(id)

    async def output(self, id: JobId, start: int = 0) -> JobOutput:
        """Return what a job has written from a byte on; a negative one counts from the end."""
        return await self._service.output(id, start)

    async def wait(self, id: JobId) -> JobStatus:
        """Return where a job stands once it has ended."""
        while not (status := self._service.status(id)).state.ended:
            await asyncio.sleep(LOOK)
        return status
