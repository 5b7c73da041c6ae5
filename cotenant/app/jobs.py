"""Run best-effort jobs beside a server, from its start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from cotenant.app.job_places import PlaceChooser
from cotenant.app.job_store import OpenJobs
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.control.jobs.events import StoredJob
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.job import JobId, Training
from cotenant.errors import UnavailableError
from cotenant.live.jobs.attempts import Preparation
from cotenant.live.jobs.driver import JobDriver, Place
from cotenant.live.server import Server
from cotenant.zoo.trainers import TRAINERS, trainer


@asynccontextmanager
async def taking_jobs(settings: Settings, server: Server, backend: Backend, jobs: OpenJobs) -> AsyncIterator[None]:
    """Take jobs of callers within the block, and go on with those of the last run, where the settings allow any."""
    if jobs.store is None:
        yield
        return
    store = jobs.store
    try:
        restored = await asyncio.to_thread(store.load)
    except UnavailableError as error:
        jobs.service.detach(str(error))
        yield
        return
    async with running_jobs(
        server,
        backend,
        JobScheduler(),
        store.folder,
        grace=settings.grace,
        environment=settings.worker_environment,
        restored=restored,
        keep=store.keep,
        forget=store.forget,
        place=PlaceChooser(lambda: server.deployment),
    ) as driver:
        jobs.service.attach(driver, sources=TRAINERS)
        try:
            yield
        finally:
            jobs.service.detach("the server stops")


@asynccontextmanager
async def running_jobs(
    server: Server,
    backend: Backend,
    scheduler: JobScheduler,
    folder: Path,
    *,
    grace: float,
    environment: tuple[str, ...] = (),
    restored: Sequence[StoredJob] = (),
    keep: Callable[[StoredJob], None] = lambda stored: None,
    forget: Callable[[JobId], None] = lambda job: None,
    place: Place | None = None,
) -> AsyncIterator[JobDriver]:
    """Run jobs within the block, beside a server that serves.

    folder: of all jobs, each of which has one of its name in it. grace: seconds that jobs have at the end of the block
    to save what they have. environment: variables that they get besides the usual ones. restored: jobs of the last run
    of the server. keep, forget, place: see `JobDriver`.
    """
    view = server.serving_view()
    preparation = Preparation(
        folder=folder.absolute(), function=function_of, model=view.worker_model, environment=environment
    )
    driver = JobDriver(scheduler, view, backend, preparation, keep=keep, forget=forget, place=place)
    server.show_jobs(driver.statuses)
    driver.start(restored)
    try:
        yield driver
    finally:
        await driver.stop(grace)


def function_of(work: Training) -> str:
    """Return the generator function of a training, as ``module:name`` or ``file.py:name``. Raises ConfigError."""
    return trainer(work.source).function if work.file is None else ":".join(work.file)
