"""Run a server and its front ends, from the first listening socket to the end of the last worker."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from cotenant.app.access import grpc_tls, http_tls, read_access
from cotenant.app.backend import worker_confinement
from cotenant.app.deployment_builder import DeploymentBuilder, check_serves_something
from cotenant.app.job_store import open_jobs
from cotenant.app.jobs import taking_jobs
from cotenant.app.lease import FrontEndLease
from cotenant.app.nodes import Discovery, clustered, following_nodes, joined, let_go
from cotenant.app.profile_source import Progress, ignore_progress
from cotenant.app.refinement import refining
from cotenant.app.reloader import Reloader
from cotenant.app.repository_poller import RepositoryPoller, polling
from cotenant.app.running_server import Addresses, RunningServer
from cotenant.app.server_state import StateFile, kept, state_key, state_path
from cotenant.app.settings import controller_options
from cotenant.app.solver import BackgroundSolver
from cotenant.app.startup import Prepare, prepare_deployment, telling
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.control.rate_forecast import rate_forecast
from cotenant.control.revision import MemoryPolicy
from cotenant.errors import ConfigError
from cotenant.live.access import Access
from cotenant.live.adaptation import AdaptationOptions
from cotenant.live.adaptation_driver import Solver
from cotenant.live.deployment import nothing_yet
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.http.request_handler import RequestHandler
from cotenant.live.http_processes import HttpProcesses
from cotenant.live.http_processes.messages import TlsFiles
from cotenant.live.http_processes.supervisor import beyond
from cotenant.live.limits import Limits, MemoryBudget, grpc_limits, metrics_limits
from cotenant.live.profile_corrections import ProfileCorrections
from cotenant.live.server import Server
from cotenant.live.tracing import tracing

# Why callers cannot load and unload models, by the mode.
NO_LOADS = {
    "explicit": "",
    "poll": 'models follow the repository (model_control_mode = "poll"); change it, or use "explicit"',
    "kubernetes": 'models are the cluster\'s (model_control_mode = "kubernetes"); change its ServedModel resources',
    "none": 'models are fixed at the start (model_control_mode = "none"); restart the server, or use "explicit"',
}

logger = logging.getLogger(__name__)

WORKER_GRACE = 1.0  # seconds for workers to exit, once no request is in flight or the grace is over


@asynccontextmanager
async def running(
    settings: Settings,
    backend: Backend,
    prepare: Prepare | None = None,
    *,
    progress: Progress = ignore_progress,
    read: Callable[[], Settings] | None = None,
    on_reload: Callable[[Settings], None] | None = None,
    discovery: Discovery | None = None,
) -> AsyncIterator[RunningServer]:
    """Run a server within the block: it is ready when the block begins, and drained and stopped when it ends, also by
    an exception.

    prepare: makes the first deployment; None: all of the repository. progress: receives each point that is profiled.
    read: returns the settings as they are now, for a reload; None: these. on_reload: called with the settings that a
    reload has put in force. discovery: adds nodes, and removes them, while the server runs.

    Sockets come first: a port in use is known before anything is measured, and whoever asks is told how far the server
    is. Raises CotenantError where it does not start.
    """
    check_model_control(settings)
    if settings.model_control_mode == "kubernetes" and prepare is None:
        raise ConfigError('model_control_mode = "kubernetes" is for `cotenant serve`; use "explicit" or "poll" here')
    access, tls = read_access(settings.access), http_tls(settings.access)  # wrong files are known at once, too
    if settings.adapt:
        await asyncio.to_thread(rate_forecast, settings.forecast)  # what it needs may not be installed
    corrections = ProfileCorrections()
    limits = _shared_limits(settings)
    memory = MemoryBudget(limits.memory)  # of both front ends and shared memory together
    async with (
        FrontEndLease(settings.cluster.lease) as lease,
        clustered(settings, backend, discovery) as devices,
        tracing(settings.otlp_endpoint) as tracer,
        _opened(settings.event_log) as log,
        open_jobs(settings) as jobs,
    ):
        server = Server(
            nothing_yet(),
            devices,
            lambda *wanted: builder.build(*wanted),  # which tells the server of its progress
            warm_workers=settings.warm_workers,
            standby_workers=_standby_workers(settings),
            confinement=worker_confinement(settings),
            memory_policy=MemoryPolicy(settings.rollout_memory),
            adaptation=_adaptation(settings, corrections, planner=lambda: builder.settings.planner),
            log=log,
            tracer=tracer,
            no_loads=NO_LOADS[settings.model_control_mode],
            response_cache=settings.response_cache,
            client_memory=(settings.max_body, memory) if settings.allow_client_shm else None,
            beyond=beyond(settings.http_processes, limits) if settings.http_processes > 1 else 0,
        )
        if settings.model_control_mode == "kubernetes":
            server.hold_readiness()  # it starts with no model
        told = telling(server.starting, progress)
        builder = DeploymentBuilder(
            settings,
            devices,
            told,
            corrections=corrections,
            found=server.found,
            say=server.starting,
            unkept=server.profiles_kept,
        )

        def reloaded(current: Settings) -> None:
            jobs.reloaded(current)
            if on_reload is not None:
                on_reload(current)

        reloader = Reloader(server, builder, settings, read, reloaded)
        own = HttpServer(
            server,
            page=server.page,
            status=server.status,
            admission=server.admission,
            startup=server.startup,
            reload=reloader.reload_for_caller,
            jobs=jobs.service,
            limits=limits,
            memory=memory,
            access=access,
            tls=tls,
            log_access=settings.access_log,
        )
        http = own if settings.http_processes == 1 else _http_processes(settings, server, own.handler, limits, access)
        metrics = HttpServer(server, only_metrics=True, limits=metrics_limits(), access=access, tls=tls)
        grpc = GrpcServer(
            server,
            message_size=settings.max_body,
            limits=grpc_limits(limits.memory),
            memory=memory,
            access=access,
            tls=grpc_tls(settings.access),
            log_access=settings.access_log,
        )
        try:
            metrics_host = settings.metrics_host or settings.host
            addresses = Addresses(
                http=await _listen(http, settings.host, settings.http_port),
                grpc=await _listen(grpc, settings.host, settings.grpc_port),
                metrics=await _listen(metrics, metrics_host, settings.metrics_port),
            )
            poller = _repository_poller(server, builder)
            async with (
                lease.held(server.starting, lambda reason: let_go(devices)),
                joined(settings, devices, discovery),
                _started(server, builder, poller, prepare or prepare_deployment),
                _kept(server, builder),
                _following(poller, settings.repository_poll_interval),
                refining(settings, backend, server, builder),
                taking_jobs(settings, server, backend, jobs),
                following_nodes(devices, server, builder, reloader),
            ):
                yield RunningServer(server, reloader, addresses, jobs.service)
        finally:
            await server.drain(settings.grace)
            await asyncio.gather(http.stop(settings.grace), metrics.stop(0.0), grpc.stop(settings.grace))
            await server.stop(WORKER_GRACE)


@asynccontextmanager
async def _started(
    server: Server, builder: DeploymentBuilder, poller: RepositoryPoller | None, prepare: Prepare
) -> AsyncIterator[None]:
    """Put the first deployment into force."""
    if poller is not None:
        await poller.begin()
    prepared = await prepare(builder)
    check_serves_something(prepared.deployment)
    await server.start(prepared.deployment, prepared.learnt)
    yield


def check_ports(settings: Settings) -> None:
    """Raise ConfigError for a port that is in use, before work that takes long; `running` binds them itself."""
    metrics_host = settings.metrics_host or settings.host
    for what, host, port in (
        ("HTTP", settings.host, settings.http_port),
        ("gRPC", settings.host, settings.grpc_port),
        ("metrics", metrics_host, settings.metrics_port),
    ):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"cannot serve {what} on {host}:{port}: {error.strerror}; choose another address or port, or stop "
                    "what holds it"
                ) from None


def _standby_workers(settings: Settings) -> int:
    """Return how many standby workers a device has. Lanes of green contexts share a process, which dies with them."""
    return 0 if settings.backend == "green" else settings.standby_workers


def _adaptation(
    settings: Settings, corrections: ProfileCorrections, planner: Callable[[], str]
) -> AdaptationOptions | None:
    if not settings.adapt:
        return None

    def solver() -> Solver:
        return BackgroundSolver(planner)

    return AdaptationOptions(solver=solver, controller=controller_options(settings), corrections=corrections)


def _kept(server: Server, builder: DeploymentBuilder) -> AbstractAsyncContextManager[None]:
    """Keep what the server learns over a restart."""
    if not builder.settings.adapt:
        return nullcontext()

    file = StateFile(state_path(builder.settings))
    return kept(
        file,
        lambda: state_key(server.deployment, builder.settings),
        server.learnt,
        builder.corrections,
        told=server.stored,
        path=lambda: state_path(builder.settings),
        shared=builder.settings.cluster.lease is not None,  # one that was frozen would keep the next from its state
    )


def _repository_poller(server: Server, builder: DeploymentBuilder) -> RepositoryPoller | None:
    """Return what follows changes of the repository, where the settings ask for it."""
    if builder.settings.model_control_mode != "poll":
        return None
    return RepositoryPoller(builder.repository, server.follow_repository)


def _following(poller: RepositoryPoller | None, interval: float) -> AbstractAsyncContextManager[None]:
    return nullcontext() if poller is None else polling(poller, interval)


def check_model_control(settings: Settings) -> None:
    """Raise ConfigError for models to begin with where all are served."""
    mode = settings.model_control_mode
    if settings.load_models and mode == "kubernetes":
        raise ConfigError('load_models: with model_control_mode = "kubernetes" models are ServedModels; leave it out')
    if settings.load_models is not None and mode not in ("explicit", "kubernetes"):
        raise ConfigError(
            f'load_models: with model_control_mode = "{mode}" all models of the repository are served; leave it out, '
            'or take "explicit"'
        )


def _shared_limits(settings: Settings) -> Limits:
    """Return the limits of each process that callers reach. They share out the memory; each has files of its own."""
    processes = 1 if settings.http_processes == 1 else settings.http_processes + 1
    return Limits(body=settings.max_body, memory=settings.max_memory // processes)


def _http_processes(
    settings: Settings, server: Server, handler: RequestHandler, limits: Limits, access: Access
) -> HttpProcesses:
    """Return HTTP as several processes serve it. handler: answers in this one what is not inference."""
    files = settings.access
    return HttpProcesses(
        server,
        server.arena,
        settings.http_processes,
        "cotenant.app.http_process",
        handler,
        limits=limits,
        access=access,
        tls=None if files.certificate is None else TlsFiles(str(files.certificate), str(files.key)),
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_access=settings.access_log,
    )


async def _listen(front_end: HttpServer | HttpProcesses | GrpcServer, host: str, port: int) -> str:
    bound = await front_end.listen(host, port)
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{shown}:{bound}"


@asynccontextmanager
async def _opened(path: Path | None) -> AsyncIterator[BinaryIO | None]:
    """Begin the event log anew, unless another server writes it. A log that does not fit on its disk any more does not
    stop the server."""
    if path is None:
        yield None
        return
    try:
        log = path.open("ab")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the event log: {error.strerror}") from None
    try:
        if path.is_file():  # which a pipe is not
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the server is killed
            except BlockingIOError:
                raise ConfigError(f"{path}: another server writes this event log; give this one another file") from None
            except OSError as error:  # a file system without locks
                logger.warning("%s: cannot be locked, so another server may write it too: %s", path, error.strerror)
            log.truncate(0)
        yield log
    finally:
        try:
            log.close()
        except OSError as error:
            logger.error("the event log %s is incomplete: %s", path, error.strerror)
