"""Tell Envoy which replica takes a request until interrupted: `cotenant endpoint-picker`."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
import uvloop
from prometheus_client import start_http_server

from cotenant.app.access import grpc_tls
from cotenant.cli.client import ServerEndpoint, endpoint
from cotenant.cli.file_limit import raise_file_limit
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.options import (
    CaFile,
    Json,
    ServiceCertificate,
    ServiceKey,
    ServiceLogFormat,
    ServiceLogLevel,
    TokenFile,
    duration_of_at_least,
    tls_files,
)
from cotenant.cli.output import console, set_up_log, show_json
from cotenant.cli.serve import until_terminated
from cotenant.config.settings import AccessSettings
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError
from cotenant.k8s.background import beside
from cotenant.k8s.picker.metrics import PickerMetrics
from cotenant.k8s.picker.picker import MAX_AGE, EndpointPicker
from cotenant.k8s.picker.poller import INTERVAL, ReplicaPoller
from cotenant.k8s.picker.service import PickerService

GRACE = 5.0  # seconds for requests in flight when it stops

Replicas = Annotated[
    list[str],
    typer.Argument(
        metavar="HOST:PORT",
        help="HTTP ports of the servers. A name with several addresses, such as that of a headless Service, stands for"
        " all of them.",
    ),
]
DestinationPort = Annotated[
    int | None,
    typer.Option(
        "--destination-port",
        min=1,
        max=65535,
        help="Port that Envoy sends requests to, such as 8001 for gRPC. Default: PORT of HOST:PORT.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        "--interval", parser=duration_of_at_least(0.01), metavar="DURATION", help="Time between polls of each server."
    ),
]


def endpoint_picker(
    replicas: Replicas,
    host: Annotated[str, typer.Option("--host", help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="gRPC port.")] = 9002,
    metrics_port: Annotated[
        int,
        typer.Option("--metrics-port", min=0, max=65535, help="Port of the Prometheus metrics; 0 for any free port."),
    ] = 9090,
    destination_port: DestinationPort = None,
    interval: Interval = INTERVAL,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    certificate: ServiceCertificate = None,
    key: ServiceKey = None,
    log_level: ServiceLogLevel = "warning",
    log_format: ServiceLogFormat = "text",
    json: Json = False,
) -> None:
    """Pick servers for Envoy's requests, by the endpoint-picker protocol of the Gateway API, until Ctrl-C."""
    access = tls_files(certificate, key)
    if interval > MAX_AGE / 2:  # else a server would take no requests from one look to the next
        raise ConfigError(f"--interval {show_seconds(interval)}: must be at most {show_seconds(MAX_AGE / 2)}")
    set_up_log(log_level, log_format, access=False)
    schemes = {replica.partition("://")[0] for replica in replicas if "://" in replica}
    if schemes - {"http", "https"} or (schemes and len({"https://" in replica for replica in replicas}) > 1):
        raise ConfigError("replicas are HOST:PORT, or all of them https://HOST:PORT")
    asked = endpoint(replicas[0], token_file, ca_file)
    names = [_host_port(replica) for replica in replicas]
    uvloop.run(_serve(asked, names, (host, port), metrics_port, destination_port, interval, access, json=json))


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition("://")[2].rstrip("/").rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{text!r} is not a replica; write HOST:PORT, such as cotenant:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _serve(
    asked: ServerEndpoint,
    names: list[tuple[str, int]],
    address: tuple[str, int],
    metrics_port: int,
    destination_port: int | None,
    interval: float,
    access: AccessSettings,
    *,
    json: bool,
) -> None:
    clock, picker = time.monotonic, EndpointPicker()
    metrics = PickerMetrics(lambda: picker.ready(clock()))
    poller = ReplicaPoller(
        picker,
        names,
        headers=asked.headers(),
        tls=asked.tls(),
        clock=clock,
        destination_port=destination_port,
        interval=interval,
    )
    listener = PickerService(picker, clock, metrics).listener(grpc_tls(access))
    raise_file_limit()
    host, port = address
    async with until_terminated() as stopping:
        port = await listener.listen(host, port)
        try:
            exporter, _ = start_http_server(metrics_port, host, metrics.registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{metrics_port}: {error.strerror}; choose another --metrics-port"
            ) from None
        try:
            async with beside(poller.run()):
                tune_for_latency()
                if json:
                    # On one line: the parent process that reads it knows that it is complete.
                    up = msgspec.json.encode({"address": f"{host}:{port}", "metrics": f"{host}:{exporter.server_port}"})
                    show_json(msgspec.json.format(up, indent=-1))
                else:
                    console.print(f"endpoint picker at {host}:{port}, metrics at {host}:{exporter.server_port}/metrics")
                await stopping.wait()
        finally:
            await listener.stop(GRACE)
            exporter.shutdown()
            exporter.server_close()
