"""Export what this node's GPUs are, who uses them and how much, until interrupted: `cotenant device-exporter`."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from prometheus_client import start_http_server

from cotenant.backends.mig import cut_gpu
from cotenant.cli.options import Json, Kubeconfig, ServiceLogFormat, ServiceLogLevel, duration_of_at_least
from cotenant.cli.output import set_up_log, show_json
from cotenant.cli.serve import until_terminated
from cotenant.errors import ConfigError
from cotenant.k8s.background import beside
from cotenant.k8s.client import connected
from cotenant.k8s.exporter.agent import INTERVAL, DeviceAgent
from cotenant.k8s.exporter.metrics import DeviceCollector
from cotenant.k8s.exporter.readings import read_devices

logger = logging.getLogger(__name__)


def device_exporter(
    node: Annotated[
        str | None,
        typer.Option("--node", envvar="COTENANT_NODE", help="Name of this node in Kubernetes. Default: the host name."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the Prometheus metrics; 0 for any free port.")
    ] = 9401,
    interval: Annotated[
        float,
        typer.Option("--interval", parser=duration_of_at_least(0.1), metavar="DURATION", help="Time between readings."),
    ] = INTERVAL,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes/--no-kubernetes", help="Publish the devices in an annotation of the node.")
    ] = True,
    recut: Annotated[
        bool, typer.Option("--recut", help="Repartition idle MIG GPUs when the share controller asks for it.")
    ] = False,
    kubeconfig: Kubeconfig = None,
    log_level: ServiceLogLevel = "info",
    log_format: ServiceLogFormat = "text",
    json: Json = False,
) -> None:
    """Export metrics of this node's GPUs: partitions, users and utilisation, until Ctrl-C."""
    set_up_log(log_level, log_format, access=False)
    if recut and not kubernetes:
        raise ConfigError("--recut takes the layout from Kubernetes; leave out --no-kubernetes")
    asyncio.run(_run(node or socket.gethostname(), (host, port), interval, kubernetes, recut, kubeconfig, json=json))


async def _run(
    node: str,
    address: tuple[str, int],
    interval: float,
    kubernetes: bool,
    recut: bool,
    kubeconfig: Path | None,
    *,
    json: bool,
) -> None:
    read = partial(read_devices, recut=recut)
    await asyncio.to_thread(read)  # without a driver there is nothing to export
    async with until_terminated() as stopping, AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(None, kubeconfig)) if kubernetes else None
        agent = DeviceAgent(node, read, client, cut_gpu if recut else None, interval=interval)
        collector = DeviceCollector(node, lambda: agent.readings, agent.users)
        host, port = address
        try:
            exporter, _ = start_http_server(port, host, collector.registry())
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --port"
            ) from None
        stack.callback(exporter.server_close)
        stack.callback(exporter.shutdown)
        if json:  # on one line: the parent process that reads it knows that it is complete
            show_json(msgspec.json.encode({"metrics": f"{host}:{exporter.server_port}"}))
        logger.info("metrics at http://%s:%s/metrics", host, exporter.server_port)
        async with beside(agent.run()):
            await stopping.wait()
