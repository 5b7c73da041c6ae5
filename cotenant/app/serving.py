"""Serve from a Python program: in its event loop, or in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvloop
from numpy.typing import ArrayLike

from cotenant.app.arrays import Arrays
from cotenant.app.backend import create_backend
from cotenant.app.lifecycle import running
from cotenant.app.profile_source import Progress, ignore_progress
from cotenant.app.python_repository import PythonModels, check_not_loading, python_repository
from cotenant.app.running_jobs import RunningJobs
from cotenant.app.running_server import Addresses, RunningServer
from cotenant.app.settings import Source, reading_again, settings_from
from cotenant.app.startup import preparing
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.core.job import JobId, JobStatus, Work
from cotenant.errors import UnavailableError
from cotenant.live.deployment import Deployment
from cotenant.live.job_service import JobOutput
from cotenant.live.status import Status

T = TypeVar("T")

STOPPED = "the server has stopped: its `with` block is over"
STOP_CHECK = 1.0  # seconds between two checks whether the server still runs


@asynccontextmanager
async def serving(
    source: Source | PythonModels = None,
    *,
    models: Collection[str] | None = None,
    backend: Backend | None = None,
    progress: Progress = ignore_progress,
) -> AsyncIterator[RunningServer]:
    """Serve models within the block, from the running event loop.

    source: settings, a settings file, or a model repository, which is served with the default settings on free ports;
    functions or classes that `@cotenant.model` marks, which are served likewise; None: the default settings. models:
    those to serve; None: all of the repository. backend: in place of the one that the settings name. progress: receives
    each point that is profiled.

    Raises CotenantError where the server does not start. At the end of the block, also after an exception, it accepts
    no further requests, answers those in flight within the settings' grace, and stops its workers.
    """
    check_not_loading()
    with _repository_of(source) as place:
        settings = settings_from(place)
        used = backend or create_backend(settings)
        try:
            prepare = preparing(models)
            read = reading_again(place, lambda: settings_from(place))
            async with running(settings, used, prepare, progress=progress, read=read) as server:
                yield server
        finally:
            if backend is None:
                await asyncio.to_thread(used.stop)


def _repository_of(source: Source | PythonModels) -> AbstractContextManager[Source]:
    """Return the source of settings, or the repository of functions and classes that are to be served."""
    if source is None or isinstance(source, str | Path | Settings):
        return nullcontext(source)
    return python_repository(source)


@contextmanager
def serve(
    source: Source | PythonModels = None,
    *,
    models: Collection[str] | None = None,
    backend: Backend | None = None,
    progress: Progress = ignore_progress,
) -> Iterator[BackgroundServer]:
    """Serve models within the block, from a thread with an event loop of its own. Arguments and errors are those of
    `serving`."""
    check_not_loading()  # in this thread, which is the one that would be loading
    thread = _ServerThread(serving(source, models=models, backend=backend, progress=progress))
    thread.start()
    try:
        yield thread.server()
    finally:
        thread.stop()


class BackgroundServer:
    """Operate a server that runs in another thread. Every method blocks until it is done; see `RunningServer`."""

    def __init__(self, server: RunningServer) -> None:
        self.addresses: Addresses = server.addresses
        self.jobs = BackgroundJobs(server.jobs, self._call)
        self._server = server
        self._loop = asyncio.get_running_loop()

    @property
    def deployment(self) -> Deployment:
        return self._server.deployment

    def status(self) -> Status:
        return self._call(self._server.status())

    def infer(self, model: str, inputs: Mapping[str, ArrayLike], *, timeout: float | None = None) -> Arrays:
        return self._call(self._server.infer(model, inputs, timeout=timeout))

    def load(self, model: str) -> None:
        self._call(self._server.load(model))

    def unload(self, model: str) -> None:
        self._call(self._server.unload(model))

    def reload(self, source: Source = None) -> None:
        self._call(self._server.reload(None if source is None else settings_from(source)))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise UnavailableError(STOPPED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([future], timeout=STOP_CHECK).done:
                if self._loop.is_closed():  # it stopped before it had a look at this
                    raise UnavailableError(STOPPED)
            return future.result()
        except CancelledError:
            raise UnavailableError(STOPPED) from None
        finally:
            future.cancel()  # where the caller was interrupted


class _Blocking(Protocol):
    def __call__(self, work: Coroutine[Any, Any, T]) -> T: ...


class BackgroundJobs:
    """Operate the best-effort jobs of a server that runs in another thread. Every method blocks until it is done; see
    `RunningJobs`."""

    def __init__(self, jobs: RunningJobs, call: _Blocking) -> None:
        self._jobs = jobs
        self._call = call

    def submit(self, work: Work | str | Path, **options: Any) -> JobStatus:
        """Submit a job; returns once it is stored. options: as of `RunningJobs.submit`."""
        return self._call(self._jobs.submit(work, **options))

    def list(self) -> tuple[JobStatus, ...]:
        return self._call(self._jobs.list())

    def status(self, id: JobId) -> JobStatus:
        return self._call(self._jobs.status(id))

    def pause(self, id: JobId) -> JobStatus:
        return self._call(self._jobs.pause(id))

    def resume(self, id: JobId) -> JobStatus:
        return self._call(self._jobs.resume(id))

    def cancel(self, id: JobId) -> JobStatus:
        return self._call(self._jobs.cancel(id))

    def output(self, id: JobId, start: int = 0) -> JobOutput:
        return self._call(self._jobs.output(id, start))

    def wait(self, id: JobId) -> JobStatus:
        return self._call(self._jobs.wait(id))


class _ServerThread:
    """Enter a server's context in a thread, stay until told to stop, and leave it there."""

    def __init__(self, context: AbstractAsyncContextManager[RunningServer]) -> None:
        self._started: Future[BackgroundServer] = Future()
        self._ended: Future[None] = Future()
        self._loop = uvloop.new_event_loop()
        self._serving = self._loop.create_task(self._serve(context))
        # As a daemon: a program that ends within the block is not kept from it, and workers end with their server.
        self._thread = threading.Thread(target=self._run, name="cotenant-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def server(self) -> BackgroundServer:
        """Wait until the server is up. Raises the error that kept it from starting."""
        return self._started.result()

    def stop(self) -> None:
        """Leave the context, which drains a server that is up, and wait for the end. Raises the error of that."""
        with suppress(RuntimeError):  # the loop is closed: it has ended by itself
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._ended.result()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._wait())
        error = None if self._serving.cancelled() else self._serving.exception()
        if error is None:
            self._ended.set_result(None)
        elif self._started.done():
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
            self._started.set_exception(error)

    async def _wait(self) -> None:
        await asyncio.wait([self._serving])

    async def _serve(self, context: AbstractAsyncContextManager[RunningServer]) -> None:
        async with context as server:
            self._started.set_result(BackgroundServer(server))
            await asyncio.Event().wait()
