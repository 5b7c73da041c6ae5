"""Run a server and its front ends, from the first listening socket to the end of the last worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cotenant.app.access import grpc_tls, http_tls, read_access
from cotenant.app.deployment_builder import DeploymentBuilder, check_serves_something
from cotenant.app.profile_source import Progress, ignore_progress
from cotenant.app.reloader import Reloader
from cotenant.app.running_server import Addresses, RunningServer
from cotenant.app.server_state import StateFile, kept, restored, state_key, state_path
from cotenant.app.solver import BackgroundSolver
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.rate_forecast import HoltWintersForecast
from cotenant.control.revision import MemoryPolicy
from cotenant.errors import ConfigError
from cotenant.live.adaptation import AdaptationOptions, Learnt
from cotenant.live.adaptation_driver import Solver
from cotenant.live.confinement import Confinement
from cotenant.live.deployment import Deployment
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.limits import Limits, grpc_limits, metrics_limits
from cotenant.live.server import Server
from cotenant.live.tracing import tracing

logger = logging.getLogger(__name__)

WORKER_GRACE = 1.0  # seconds for workers to exit, once no request is in flight or the grace is over


class Assembly(NamedTuple):
    """Hold everything that a server is started from."""

    settings: Settings
    backend: Backend
    builder: DeploymentBuilder
    deployment: Deployment
    learnt: Learnt | None = None  # in an earlier run, by the same plan


async def assemble(
    settings: Settings,
    backend: Backend,
    *,
    models: Collection[str] | None = None,
    progress: Progress = ignore_progress,
) -> Assembly:
    """Build the deployment that settings ask for: profile the models where needed, and plan.

    models: those to serve; None: all of the repository. Raises CotenantError.
    """
    read_access(settings.access), http_tls(settings.access)  # a file that is wrong is known before anything is measured
    builder = DeploymentBuilder(settings, backend, progress)
    if not settings.adapt:
        return Assembly(settings, backend, builder, await builder.build(models))
    if settings.forecast is not None:
        await asyncio.to_thread(HoltWintersForecast, settings.forecast)  # what it needs may not be installed
    described = await builder.describe(models)
    file = StateFile(state_path(settings))
    learnt = await asyncio.to_thread(file.load, state_key(described, settings))
    builder.corrections.known |= await asyncio.to_thread(file.corrections)
    before = None if learnt is None else restored(described, learnt)
    if before is not None:
        return Assembly(settings, backend, builder, before, learnt)
    return Assembly(settings, backend, builder, await builder.planned(described))


@asynccontextmanager
async def running(
    assembly: Assembly,
    read: Callable[[], Settings] | None = None,
    on_reload: Callable[[Settings], None] | None = None,
) -> AsyncIterator[RunningServer]:
    """Run a server within the block: it is ready when the block begins, and drained and stopped when it ends, also by
    an exception.

    read: returns the settings as they are now, for a reload; None: those of the assembly. on_reload: called with the
    settings that a reload has put in force.

    Sockets come first, so that a port in use is known before any model is loaded. Raises ConfigError, WorkerError,
    DeviceError where it does not start.
    """
    settings, backend, builder, deployment, learnt = assembly
    check_serves_something(deployment)
    async with tracing(settings.otlp_endpoint) as tracer, _opened(settings.event_log) as log:
        server = Server(
            deployment,
            backend,
            builder.build,
            warm_workers=settings.warm_workers,
            confinement=Confinement(memory=settings.worker_memory, environment=settings.worker_environment),
            memory_policy=MemoryPolicy(settings.rollout_memory),
            adaptation=_adaptation(settings, learnt, builder),
            log=log,
            tracer=tracer,
        )
        reloader = Reloader(server, builder, settings, read, on_reload)
        limits = Limits(body=settings.max_body, memory=settings.max_memory)
        access, tls = read_access(settings.access), http_tls(settings.access)
        http = HttpServer(
            server,
            page=server.page,
            status=server.status,
            reload=reloader.reload_for_caller,
            limits=limits,
            access=access,
            tls=tls,
            log_access=settings.access_log,
        )
        metrics = HttpServer(server, only_metrics=True, limits=metrics_limits(), access=access, tls=tls)
        grpc = GrpcServer(
            server,
            message_size=settings.max_body,
            limits=grpc_limits(settings.max_memory),
            access=access,
            tls=grpc_tls(settings.access),
        )
        try:
            metrics_host = settings.metrics_host or settings.host
            addresses = Addresses(
                http=await _listen(http, settings.host, settings.http_port),
                grpc=await _listen(grpc, settings.host, settings.grpc_port),
                metrics=await _listen(metrics, metrics_host, settings.metrics_port),
            )
            await server.start()
            async with _kept(server, builder):
                yield RunningServer(server, reloader, addresses)
        finally:
            await server.drain(settings.grace)
            await asyncio.gather(http.stop(settings.grace), metrics.stop(0.0), grpc.stop(settings.grace))
            await server.stop(WORKER_GRACE)


def _adaptation(settings: Settings, learnt: Learnt | None, builder: DeploymentBuilder) -> AdaptationOptions | None:
    if not settings.adapt:
        return None

    def solver() -> Solver:
        return BackgroundSolver(settings.planner)

    return AdaptationOptions(
        solver=solver,
        controller=ControllerOptions(forecast=settings.forecast),
        rates=None if learnt is None else learnt.rates,
        corrections=builder.corrections,
    )


def _kept(server: Server, builder: DeploymentBuilder) -> AbstractAsyncContextManager[None]:
    """Keep what the server learns over a restart."""
    if not builder.settings.adapt:
        return nullcontext()

    file = StateFile(state_path(builder.settings))
    return kept(file, lambda: state_key(server.deployment, builder.settings), server.learnt, builder.corrections)


async def _listen(front_end: HttpServer | GrpcServer, host: str, port: int) -> str:
    bound = await front_end.listen(host, port)
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{shown}:{bound}"


@asynccontextmanager
async def _opened(path: Path | None) -> AsyncIterator[BinaryIO | None]:
    """Open the event log. A log that does not fit on its disk any more does not stop the server."""
    if path is None:
        yield None
        return
    try:
        log = path.open("wb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the event log: {error.strerror}") from None
    try:
        yield log
    finally:
        try:
            log.close()
        except OSError as error:
            logger.error("the event log %s is incomplete: %s", path, error.strerror)
