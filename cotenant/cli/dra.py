"""Account for shares of devices in a cluster by Dynamic Resource Allocation: `cotenant dra`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cotenant.cli.options import Json, Kubeconfig, ServiceLogFormat, ServiceLogLevel, duration_of_at_least
from cotenant.cli.output import console, set_up_log, show_json
from cotenant.cli.serve import until_terminated
from cotenant.errors import ConfigError
from cotenant.k8s.client import connected
from cotenant.k8s.dra.claim_controller import ClaimController
from cotenant.k8s.dra.container_edits import ContainerOptions
from cotenant.k8s.dra.discovery import GpuDiscovery
from cotenant.k8s.dra.node_plugin import CDI, KUBELET, NodeOptions, node_plugin
from cotenant.k8s.dra.publisher import PERIOD

app = typer.Typer(
    help="Allocate shares of devices in a Kubernetes cluster by Dynamic Resource Allocation.", no_args_is_help=True
)

NodeName = Annotated[
    str | None,
    typer.Option("--node", envvar="NODE_NAME", help="Name of this node in Kubernetes."),
]
KubeletFolder = Annotated[Path, typer.Option("--kubelet-directory", metavar="DIR", help="The kubelet's folder.")]
CdiFolder = Annotated[
    Path, typer.Option("--cdi-directory", metavar="DIR", help="Folder where the container runtime reads CDI files.")
]
VendorKind = Annotated[
    str,
    typer.Option(
        "--vendor-cdi",
        metavar="KIND",
        help="Kind of the vendor's CDI devices, which add device nodes and libraries. Empty: add device nodes only.",
    ),
]
MpsPipe = Annotated[
    Path | None,
    typer.Option(
        "--mps-pipe-directory", metavar="DIR", help="The node's folder of MPS pipes, to mount into containers."
    ),
]
MpsSharedMemory = Annotated[
    Path | None,
    typer.Option(
        "--mps-shm-directory", metavar="DIR", help="The node's folder of MPS shared memory, to mount into containers."
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        "--interval", parser=duration_of_at_least(0.1), metavar="DURATION", help="Time between checks of the GPUs."
    ),
]


@app.command("driver")
def driver(
    node: NodeName = None,
    kubeconfig: Kubeconfig = None,
    kubelet_directory: KubeletFolder = KUBELET,
    cdi_directory: CdiFolder = CDI,
    vendor_cdi: VendorKind = "nvidia.com/gpu",
    mps_pipe_directory: MpsPipe = None,
    mps_shm_directory: MpsSharedMemory = None,
    interval: Interval = PERIOD,
    log_level: ServiceLogLevel = "warning",
    log_format: ServiceLogFormat = "text",
    json: Json = False,
) -> None:
    """Publish the GPUs of this node, and prepare claims for its kubelet, until Ctrl-C."""
    set_up_log(log_level, log_format, access=False)
    if not node:
        raise ConfigError("--node: the name of this node is missing; in a pod, set NODE_NAME from spec.nodeName")
    for option, folder in (("--mps-pipe-directory", mps_pipe_directory), ("--mps-shm-directory", mps_shm_directory)):
        if folder is not None and not folder.is_absolute():
            raise ConfigError(f"{option}: {str(folder)!r} is not absolute; containers mount it from the node")
    container = ContainerOptions(vendor=vendor_cdi, mps_pipe=mps_pipe_directory, mps_shm=mps_shm_directory)
    options = NodeOptions(
        node=node,
        kubelet=kubelet_directory.absolute(),
        cdi=cdi_directory.absolute(),
        container=container,
        period=interval,
    )
    asyncio.run(_drive(options, kubeconfig, json=json))


@app.command("claims")
def claims(
    kubeconfig: Kubeconfig = None,
    log_level: ServiceLogLevel = "warning",
    log_format: ServiceLogFormat = "text",
) -> None:
    """Create the ResourceClaims for the shares planned for pods, until Ctrl-C."""
    set_up_log(log_level, log_format, access=False)
    asyncio.run(_claim(kubeconfig))


async def _drive(options: NodeOptions, kubeconfig: Path | None, *, json: bool) -> None:
    discovery = GpuDiscovery()
    try:
        async with (
            until_terminated(),
            connected(kubeconfig=kubeconfig) as client,
            node_plugin(client, options, discovery.look) as running,
        ):
            devices = sorted(running.publisher.devices)
            if json:
                # On one line: the parent process that reads it knows that it is complete.
                up = msgspec.json.encode(
                    {"node": options.node, "devices": devices, "socket": str(running.plugin.socket)}
                )
                show_json(msgspec.json.format(up, indent=-1))
            else:
                console.print(f"driver of {options.node} with {len(devices)} GPUs at {running.plugin.socket}")
            await running.publishing
    finally:
        discovery.close()


async def _claim(kubeconfig: Path | None) -> None:
    async with until_terminated(), connected(kubeconfig=kubeconfig) as client:
        await ClaimController(client).run()
