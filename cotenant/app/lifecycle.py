"""A server and its front ends, from the first listening socket to the last worker's end."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.backends import Backend
from cotenant.config import Settings
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError
from cotenant.live.deployment import Deployment
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.page import render_page
from cotenant.live.server import Server

logger = logging.getLogger(__name__)

FILES = 1 << 16  # that a server may have open at once, where the system lets it; 1,024 are usual, for any program


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where to reach a server; ports as they were given out."""

    http: str
    grpc: str
    metrics: str


@asynccontextmanager
async def running_server(
    settings: Settings, backend: Backend, preparation: DeploymentBuilder, site: Deployment
) -> AsyncIterator[tuple[Server, Addresses]]:
    """A server that is up within, and drained and stopped after: no process is left behind, whatever happens.

    Sockets come first, so that a port in use is known before any model is loaded. The second SIGINT or SIGTERM, or one
    that comes while it stops, ends everything at once.
    """
    check_serves_something(site)
    _allow_files()
    with _event_log(settings.event_log) as log:
        server = Server(site, backend, preparation.site, warm_workers=settings.warm_workers, log=log)
        http = HttpServer(server, page=lambda: render_page(server.status()), status=server.status)
        metrics, rpc = HttpServer(server, only_metrics=True), GrpcServer(server)
        try:
            metrics_host = settings.metrics_host or settings.host
            addresses = Addresses(
                http=_address(settings.host, await http.listen(settings.host, settings.http_port)),
                grpc=_address(settings.host, await rpc.listen(settings.host, settings.grpc_port)),
                metrics=_address(metrics_host, await metrics.listen(metrics_host, settings.metrics_port)),
            )
            await server.start()
            yield server, addresses
        finally:
            await server.drain(settings.grace)
            await asyncio.gather(http.stop(settings.grace), metrics.stop(0.0), rpc.stop(settings.grace))
            await server.stop(grace=1.0)


def check_serves_something(site: Deployment) -> None:
    """Raises ConfigError for a plan that serves nothing."""
    if not any(site.plan.placements()):
        wanted = ", ".join(f"{name} within {show_seconds(it.model.slo)}" for name, it in site.offered.items())
        raise ConfigError(f"no model can be served within its target ({wanted}); give them more time with `slo`")


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _event_log(path: Path | None) -> Iterator[BinaryIO | None]:
    """The file to write it to. What does not fit on its disk any more is no reason for a server to fail."""
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


def _address(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{shown}:{port}"
