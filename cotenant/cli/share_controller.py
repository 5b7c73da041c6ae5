"""Assign shares of devices to other pods until interrupted: `cotenant share-controller`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant.app.access import read_tokens
from cotenant.cli.loading import read_bytes
from cotenant.cli.options import CaFile, Kubeconfig, ServiceLogFormat, ServiceLogLevel, TokenFile
from cotenant.cli.output import set_up_log
from cotenant.cli.serve import until_terminated
from cotenant.config.kubernetes import KubernetesEntry, KubernetesSettings, read_kubernetes
from cotenant.config.problem import read_problem
from cotenant.core.model import Kind
from cotenant.errors import ConfigError
from cotenant.k8s.client import ApiClient, connected
from cotenant.k8s.elector import Elector
from cotenant.k8s.pods.catalogue import Catalogue
from cotenant.k8s.pods.controller import ShareController
from cotenant.k8s.pods.extender import SchedulerExtender
from cotenant.k8s.pods.placer import Placer
from cotenant.k8s.pods.rules import choose_rule
from cotenant.k8s.recommender.client import Recommendation, RecommenderClient
from cotenant.live.access import is_local

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

Follow = Callable[[], Coroutine[Any, Any, None]]


def share_controller(
    problem: Annotated[
        Path,
        typer.Argument(
            metavar="PROBLEM",
            help="Problem file (TOML) with the kinds of devices, profiles and interference. Its models are those that "
            "pods may ask for.",
        ),
    ],
    planner: Annotated[
        str,
        typer.Option(
            "--planner",
            "-p",
            help="Planner: score, hetsev, min, max, roundrobin or colocate, which place one pod at a time; or any.",
        ),
    ] = "score",
    extender: Annotated[
        str | None,
        typer.Option(
            "--extender",
            metavar="HOST:PORT",
            help="Serve as a scheduler extender at this address, for clusters without scheduling gates.",
        ),
    ] = None,
    recommender: Annotated[
        str | None,
        typer.Option(
            "--recommender",
            metavar="HOST:PORT",
            help="Recommender to take profiles and interference from, instead of PROBLEM's, which gives the devices.",
        ),
    ] = None,
    ca_file: CaFile = None,
    token_file: TokenFile = None,
    lease: Annotated[str, typer.Option("--lease", help="Lease by which one of several controllers is active.")] = (
        "cotenant-shares"
    ),
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace of the lease. Default: this pod's."),
    ] = None,
    kubeconfig: Kubeconfig = None,
    log_level: ServiceLogLevel = "info",
    log_format: ServiceLogFormat = "text",
) -> None:
    """Assign shares of devices to pods that request them by annotations, with any planner, until Ctrl-C."""
    set_up_log(log_level, log_format, access=False)
    options = read_kubernetes(KubernetesEntry(namespace=namespace, lease=lease), "--lease, --namespace")
    known = read_problem(problem)
    fleet, placer = known.fleet, Placer(Catalogue.of(known), choose_rule(planner))
    address = None if extender is None else _address(extender)
    follow = None if recommender is None else _following(recommender, ca_file, token_file, fleet, placer)
    asyncio.run(_run(options, placer, address, kubeconfig, follow))


def _following(
    address: str, ca_file: Path | None, token_file: Path | None, fleet: Sequence[Kind], placer: Placer
) -> Follow:
    """Return what keeps a placer informed of what a recommender knows. Raises ConfigError."""
    authority = None if ca_file is None else read_bytes(ca_file)
    token = "" if token_file is None else read_tokens(token_file)[0]
    if token and authority is None and not is_local(address):
        raise ConfigError(
            f"--recommender: {address!r}: a token is not sent unencrypted over a network; name who signed its "
            "certificate with --ca-file"
        )

    def learn(found: Recommendation) -> None:
        placer.learn(Catalogue(fleet, found.profiles, found.interference))

    async def follow() -> None:
        client = RecommenderClient(address, authority, token)
        try:
            await client.follow(learn)
        finally:
            await client.close()

    return follow


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"--extender: {text!r} is not an address; write HOST:PORT, such as 0.0.0.0:8888")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _run(
    options: KubernetesSettings,
    placer: Placer,
    address: tuple[str, int] | None,
    kubeconfig: Path | None,
    follow: Follow | None,
) -> None:
    async with until_terminated() as stopping, connected(options.namespace, kubeconfig) as client:
        controller = ShareController(client, placer, lambda changed: _elector(client, options, changed))
        async with AsyncExitStack() as stack:
            if address is not None:
                await _serve(stack, SchedulerExtender(client, controller).application(), *address)
            tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(controller.run()),
                asyncio.create_task(stopping.wait()),
            ]
            if follow is not None:
                tasks.append(asyncio.create_task(follow()))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


def _elector(client: ApiClient, options: KubernetesSettings, changed: Callable[[], None]) -> Elector:
    return Elector(client, options.lease, options.own_identity, options.lease_duration, changed)


async def _serve(stack: AsyncExitStack, application: web.Application, host: str, port: int) -> None:
    from aiohttp import web

    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"cannot serve the extender on {host}:{port}: {error.strerror}; choose another address"
        ) from None
    logger.info("scheduler extender at http://%s:%s", *runner.addresses[0][:2])
