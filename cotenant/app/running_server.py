"""Operate a running server from the program that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from numpy.typing import ArrayLike

from cotenant.app.arrays import Arrays, to_arrays, to_tensors
from cotenant.app.reloader import Reloader
from cotenant.app.running_jobs import RunningJobs
from cotenant.config import Settings
from cotenant.errors import RequestError
from cotenant.live.deployment import Deployment
from cotenant.live.job_service import JobService
from cotenant.live.oip import InferRequest, InferResponse, check_request
from cotenant.live.server import Server
from cotenant.live.status import Status
from cotenant.measure.report import Report


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the addresses of a server, as ``host:port``, with the ports that it was given."""

    http: str
    grpc: str
    metrics: str


class RunningServer:
    """Operate a server from the event loop that it runs in. jobs: operates its best-effort jobs."""

    def __init__(self, server: Server, reloader: Reloader, addresses: Addresses, jobs: JobService) -> None:
        self.addresses = addresses
        self.jobs = RunningJobs(jobs)
        self._server = server
        self._reloader = reloader

    @property
    def deployment(self) -> Deployment:
        """Return the models that are offered and the plan in force."""
        return self._server.deployment

    @property
    def isolation(self) -> str:
        """Return what isolates partitions, in a few words for people."""
        return self._server.isolation()

    async def status(self) -> Status:
        """Return what `cotenant status` shows."""
        return await self._server.status()

    async def infer(self, model: str, inputs: Mapping[str, ArrayLike], *, timeout: float | None = None) -> Arrays:
        """Return the outputs of one request by name. The first dimension is the batch where the model has one.

        timeout: seconds; None for the model's target. Raises RequestError's children: InvalidError, NotFoundError,
        UnavailableError for a request that is rejected or expires, FailedError.
        """
        info = self._server.model(model)
        tensors = to_tensors(info, inputs)
        check_request(info, tensors, ())
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()

        def done(result: InferResponse | RequestError) -> None:
            if answer.done():  # the caller has left
                return
            if isinstance(result, RequestError):
                answer.set_exception(result)
            else:
                answer.set_result(to_arrays(result.outputs))

        request = InferRequest(model=info.name, version=info.version, inputs=tensors, timeout=timeout)
        handle = self._server.infer(request, done)
        try:
            return await answer
        except asyncio.CancelledError:
            self._server.cancel(handle)
            raise

    async def load(self, model: str) -> None:
        """Serve one more model of the repository. Raises FailedError, with nothing changed, where no capacity is left
        for it."""
        await self._server.load(model, {})

    async def unload(self, model: str) -> None:
        """Take a model out of its partitions. Harmless where it is not served."""
        await self._server.unload(model, {})

    async def reload(self, settings: Settings | None = None) -> None:
        """Plan for other settings and roll out that plan; None: read the settings again.

        Raises CotenantError, with nothing changed: ConfigError for settings that need a restart.
        """
        await self._reloader.reload(settings)

    def release_readiness(self) -> None:
        """Tell probes that the server is ready, as soon as it can serve: its first models are there."""
        self._server.hold_readiness(False)

    def with_batch_means(self, report: Report) -> Report:
        """Return a report of what callers saw with what is known here of batches, as means since the start."""
        return self._server.with_batch_means(report)
