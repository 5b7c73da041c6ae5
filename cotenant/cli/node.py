"""Offer the devices of this machine to a server elsewhere until interrupted: `cotenant node`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from cotenant.app.backend import create_backend
from cotenant.app.nodes import running_node
from cotenant.cli.file_limit import raise_file_limit
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.loading import load_settings
from cotenant.cli.options import Json, LogFormatOption, LogLevelOption, SettingsFile
from cotenant.cli.output import console, set_up_log, show_json
from cotenant.cli.serve import until_terminated
from cotenant.config import Settings
from cotenant.config.settings import check_port


def node(
    settings: SettingsFile = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="HOST", envvar="COTENANT_NODE_HOST", help="Address to bind to. Default: 127.0.0.1."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            envvar="COTENANT_NODE_PORT",
            help="Port to bind to; 0 for any free port. Default: 8010.",
        ),
    ] = None,
    token: Annotated[
        Path | None,
        typer.Option(
            "--token-file", envvar="COTENANT_NODE_TOKEN_FILE", help="File of the token shared with the server."
        ),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    json: Json = False,
) -> None:
    """Offer this machine's devices to one server at a time, over the network, until Ctrl-C."""
    read: Settings = load_settings(settings, log_level=log_level, log_format=log_format)
    place = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    read = msgspec.structs.replace(read, node=msgspec.structs.replace(read.node, **place))
    check_port(read.node.port, "--port")
    if token is not None:
        read = msgspec.structs.replace(read, cluster=msgspec.structs.replace(read.cluster, token=token))
    uvloop.run(_run(read, json=json))


async def _run(settings: Settings, *, json: bool) -> None:
    set_up_log(settings.log_level, settings.log_format, access=False)
    backend = create_backend(settings)
    raise_file_limit()
    try:
        async with until_terminated(), running_node(settings, backend) as running:
            tune_for_latency()
            if json:
                shown = {"address": running.address, "kinds": running.kinds}
                show_json(msgspec.json.format(msgspec.json.encode(shown), indent=-1))
            else:
                devices = ", ".join(f"{kind.count} × {kind.name}" for kind in running.kinds)
                console.print(f"offering {devices} at {running.address}; Ctrl-C stops", highlight=False)
            await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(backend.stop)
