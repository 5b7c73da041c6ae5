"""Keep instances of models as pods until interrupted: `cotenant instance-controller`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from cotenant.app.access import grpc_tls, read_tokens
from cotenant.cli.options import (
    Json,
    Kubeconfig,
    ServiceCertificate,
    ServiceKey,
    ServiceLogFormat,
    ServiceLogLevel,
    tls_files,
)
from cotenant.cli.output import console, set_up_log, show_json
from cotenant.cli.serve import until_terminated
from cotenant.config.settings import AccessSettings
from cotenant.errors import ConfigError
from cotenant.k8s.client import connected
from cotenant.k8s.scaling.instance_pods import InstancePods
from cotenant.k8s.scaling.service import InstanceService
from cotenant.live.access import Access, Role

GRACE = 5.0  # seconds for calls in flight when it stops


def instance_controller(
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace of the instances and PodTemplates. Default: this pod's."),
    ] = None,
    kubeconfig: Kubeconfig = None,
    host: Annotated[str, typer.Option("--host", help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="gRPC port.")] = 9004,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="COTENANT_TOKEN_FILE",
            help="File of the tokens accepted from callers. Without it, only this machine may call.",
        ),
    ] = None,
    certificate: ServiceCertificate = None,
    key: ServiceKey = None,
    log_level: ServiceLogLevel = "info",
    log_format: ServiceLogFormat = "text",
    json: Json = False,
) -> None:
    """Create, delete and list pods that run instances of models, for a scaling controller, until Ctrl-C."""
    tls = tls_files(certificate, key)
    if token_file is None and not _is_loopback(host):
        raise ConfigError(f"--host {host}: anyone who reaches it could create pods; set --token-file")
    set_up_log(log_level, log_format, access=False)
    access = Access() if token_file is None else Access({Role.CONTROL: read_tokens(token_file)})
    uvloop.run(_serve(namespace, kubeconfig, (host, port), access, tls, json=json))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(
    namespace: str | None,
    kubeconfig: Path | None,
    address: tuple[str, int],
    access: Access,
    tls: AccessSettings,
    *,
    json: bool,
) -> None:
    async with until_terminated() as stopping, connected(namespace, kubeconfig) as client:
        listener = InstanceService(InstancePods(client)).listener(access, grpc_tls(tls))
        host, _ = address
        port = await listener.listen(*address)
        try:
            if json:  # on one line: the parent process that reads it knows that it is complete
                show_json(msgspec.json.encode({"address": f"{host}:{port}"}))
            else:
                console.print(f"instance controller at {host}:{port}, of namespace {client.namespace}")
            await stopping.wait()
        finally:
            await listener.stop(GRACE)
