"""`cotenant serve`: a repository, planned and served until somebody says stop; SIGHUP has the settings read again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import msgspec

from cotenant.app.deployment_builder import DeploymentBuilder, backend_of
from cotenant.app.lifecycle import Addresses, check_serves_something, running_server
from cotenant.cli.interrupt import interruptible
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.output import aside, console, print_labelled, profile_progress, set_log_level, show_json
from cotenant.cli.plan import split_table, warn_extrapolations
from cotenant.config import Settings
from cotenant.errors import ConfigError, CotenantError
from cotenant.live.deployment import Deployment
from cotenant.live.server import Server
from cotenant.measure.plan_drawing import plan_bars, plan_table
from cotenant.planners.applications import without_applications

CHANGEABLE = frozenset(
    {"model_repository", "profiles", "planner", "objective", "interference", "max_queue_delay", "log_level", "models"}
)


async def run(read: Callable[[], Settings], *, json: bool) -> None:
    """read: gives the settings, as they are at that moment.
    json: print the addresses and the plan as JSON, once the server is up, instead of a table."""
    settings = read()
    set_log_level(settings.log_level)
    backend = backend_of(settings)
    async with interruptible():
        with profile_progress() as progress:
            preparation = DeploymentBuilder(settings, backend, progress)
            site = await preparation.site()
        async with running_server(settings, backend, preparation, site) as (server, addresses):
            tune_for_latency()
            if json:
                # In one line: whoever started us reads it, and knows that it has all.
                up = msgspec.json.encode({"addresses": addresses, "plan": msgspec.Raw(site.plan.to_json())})
                show_json(msgspec.json.format(up, indent=-1))
            else:
                show_deployment(site, backend.isolation())
                show_addresses(addresses)
            async for _ in reload_signals():
                try:
                    current = reloaded_settings(settings, read())
                    async with preparation.instead(current) as site:
                        check_serves_something(site)
                        await server.apply(site)
                except CotenantError as error:
                    print_labelled("settings not taken, all stays as it is:", str(error))
                else:
                    set_log_level(current.log_level)
                    tell_change(server, json=json)


async def reload_signals() -> AsyncIterator[None]:
    """Each SIGHUP; but where it says that the terminal is gone, SIGTERM follows from it, as for any program."""
    asked, on_terminal = asyncio.Event(), _has_terminal()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    try:
        while True:
            await asked.wait()
            asked.clear()
            if on_terminal and not _has_terminal():
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True


def reloaded_settings(settings: Settings, now: Settings) -> Settings:
    """Those that are read now. Raises ConfigError where a server would have to be started again for them."""
    names = [name for name in Settings.__struct_fields__ if getattr(settings, name) != getattr(now, name)]
    if fixed := [name for name in names if name not in CHANGEABLE]:
        raise ConfigError(
            f"what the server was started with cannot change: {', '.join(fixed)}; start it again for that"
        )
    return now


def tell_change(server: Server, *, json: bool) -> None:
    if not json:
        console.print(
            plan_table(
                server.deployment.plan,
                without_applications(server.deployment.problem, server.deployment.plan.split).models,
            )
        )
    for name, reason in server.deployment.broken.items():
        print_labelled("not served", f"{name}: {reason}")
    aside.print("serving by the settings as they are now", highlight=False)


def show_deployment(site: Deployment, holds: str) -> None:
    console.print(plan_table(site.plan, without_applications(site.problem, site.plan.split).models))
    console.print(plan_bars(site.plan))
    if site.plan.split:
        console.print("", split_table(site.plan, site.problem), "", sep="\n")
    console.print(f"shares are held by {holds}", highlight=False)
    for name, reason in site.broken.items():
        print_labelled("not served", f"{name}: {reason}")
    warn_extrapolations(site.plan, site.problem)


def show_addresses(addresses: Addresses) -> None:
    console.print(
        f"serving HTTP at http://{addresses.http}, gRPC at {addresses.grpc}, metrics at http://{addresses.metrics}"
        "/metrics; Ctrl-C stops",
        highlight=False,
        soft_wrap=True,
    )
