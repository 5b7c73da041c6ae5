"""Plan and serve a model repository until interrupted; SIGHUP reloads the configuration: `cotenant serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import uvloop

from cotenant.app.backend import create_backend
from cotenant.app.lifecycle import running
from cotenant.app.running_server import Addresses
from cotenant.app.settings import reading_again
from cotenant.cli.file_limit import raise_file_limit
from cotenant.cli.interrupt import Interrupted, interruptible
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.loading import load_settings
from cotenant.cli.options import (
    AccessLog,
    Adapt,
    EventLog,
    GrpcPort,
    Host,
    HttpPort,
    Json,
    LoadModel,
    LogFormatOption,
    LogLevelOption,
    MaxQueueDelay,
    MetricsPort,
    ModelControlMode,
    ModelRepository,
    OtlpEndpoint,
    PlannerName,
    SettingsFile,
    StateFileOption,
)
from cotenant.cli.output import aside, console, only_told, print_labelled, profile_progress, set_up_log, show_json
from cotenant.cli.plan import split_table, warn_estimates
from cotenant.config import Settings
from cotenant.config.settings import models_to_load
from cotenant.errors import CotenantError
from cotenant.k8s.serving import on_kubernetes
from cotenant.live.deployment import Deployment
from cotenant.planners.applications import without_applications
from cotenant.render.plan_table import plan_bars, plan_table


def serve(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    model_control_mode: ModelControlMode = None,
    load_model: LoadModel = None,
    planner: PlannerName = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    max_queue_delay: MaxQueueDelay = None,
    adapt: Adapt = None,
    event_log: EventLog = None,
    state: StateFileOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    access_log: AccessLog = None,
    otlp_endpoint: OtlpEndpoint = None,
    json: Json = False,
) -> None:
    """Serve a model repository over HTTP and gRPC until Ctrl-C."""

    def read() -> Any:
        return load_settings(
            settings,
            model_repository,
            planner,
            model_control_mode=model_control_mode,
            load_models=models_to_load(load_model),
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            max_queue_delay=max_queue_delay,
            adapt=adapt,
            event_log=event_log,
            state=state,
            log_level=log_level,
            log_format=log_format,
            access_log=access_log,
            otlp_endpoint=otlp_endpoint,
        )

    uvloop.run(run(reading_again(settings, read), json=json))


async def run(read: Callable[[], Settings], *, json: bool) -> None:
    """Serve until SIGTERM; raises Interrupted on Ctrl-C. read: returns the current settings.

    json: print the addresses and the plan as JSON, once the server is up, instead of a table.
    """
    settings = read()
    set_up_log(settings.log_level, settings.log_format, access=settings.access_log)
    backend = create_backend(settings)
    raise_file_limit()
    async with until_terminated() as stopping, reload_signals(stopping) as reload:

        def on_reload(current: Settings) -> None:
            set_up_log(current.log_level, current.log_format, access=current.access_log)
            with only_told():
                show_reloaded(server.deployment, json=json)

        async with AsyncExitStack() as stack:
            with profile_progress() as progress:
                if settings.model_control_mode == "kubernetes":
                    started = on_kubernetes(settings, backend, progress=progress, read=read, on_reload=on_reload)
                else:
                    started = running(settings, backend, progress=progress, read=read, on_reload=on_reload)
                server = await stack.enter_async_context(started)
            tune_for_latency()
            if json:
                # On one line: the parent process that reads it knows that it is complete.
                plan = msgspec.Raw(server.deployment.plan.to_json())
                up = msgspec.json.encode({"addresses": server.addresses, "plan": plan})
                show_json(msgspec.json.format(up, indent=-1))
            else:
                show_deployment(server.deployment, server.isolation)
                show_addresses(server.addresses)
            while await reload.wait():
                reload.clear()
                with suppress(CotenantError):  # it is logged
                    await server.reload()


@asynccontextmanager
async def until_terminated() -> AsyncIterator[asyncio.Event]:
    """Be `interruptible`, but take SIGTERM for the usual end: it is how whoever runs a server stops it."""
    try:
        async with interruptible() as stopping:
            yield stopping
    except Interrupted as stop:
        if stop.number != signal.SIGTERM:
            raise


@asynccontextmanager
async def reload_signals(stopping: asyncio.Event) -> AsyncIterator[asyncio.Event]:
    """Within, a SIGHUP sets the event; one that says that the terminal is gone becomes SIGTERM, as for any program.
    Once the server is `stopping` neither counts any more, until the end of the process."""
    received, on_terminal = asyncio.Event(), _has_terminal()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            return
        if on_terminal and not _has_terminal():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            received.set()

    loop.add_signal_handler(signal.SIGHUP, on_signal)
    try:
        yield received
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        if stopping.is_set():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def show_reloaded(deployment: Deployment, *, json: bool) -> None:
    if not json:
        console.print(
            plan_table(deployment.plan, without_applications(deployment.problem, deployment.plan.split).models)
        )
    for name, reason in deployment.broken.items():
        print_labelled("not served:", f"{name}: {reason}")
    aside.print("configuration reloaded", highlight=False)


def show_deployment(deployment: Deployment, isolation: str) -> None:
    plan, problem = deployment.plan, deployment.problem
    console.print(plan_table(plan, without_applications(problem, plan.split).models))
    console.print(plan_bars(plan))
    if plan.split:
        console.print("", split_table(plan, problem), "", sep="\n")
    console.print(isolation, highlight=False)
    for name, reason in deployment.broken.items():
        print_labelled("not served:", f"{name}: {reason}")
    warn_estimates(plan, problem)


def show_addresses(addresses: Addresses) -> None:
    console.print(
        f"serving HTTP at http://{addresses.http}, gRPC at {addresses.grpc}, metrics at http://{addresses.metrics}"
        "/metrics; Ctrl-C stops",
        highlight=False,
        soft_wrap=True,
    )
