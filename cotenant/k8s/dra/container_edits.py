"""Say what a container gets for its claim, as a specification of the Container Device Interface (CDI). Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from cotenant.errors import ClaimError
from cotenant.k8s.dra.devices import DRIVER
from cotenant.k8s.dra.preparation import PreparedClaim, PreparedDevice
from cotenant.k8s.share_environment import share_environment

CDI_VERSION: Final = "0.5.0"
CDI_KIND: Final = f"{DRIVER}/claim"
PREFIX: Final = f"{DRIVER}-claim_"  # of our files
PIPE_DIRECTORY: Final = "/tmp/nvidia-mps"  # noqa: S108  # in the container, where CUDA looks by default
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108
CONTROL_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class ContainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """vendor: kind of the CDI devices of the vendor's own specification, which brings device nodes and libraries,
    each named by UUID; "": device nodes alone are given, and no MIG instance. mps_pipe, mps_shm: the folders of the
    node where the control daemon of MPS has its pipes and shared memory; None: not mounted."""

    vendor: str = "nvidia.com/gpu"
    mps_pipe: Path | None = None
    mps_shm: Path | None = None


def file_name(uid: str) -> str:
    """Return the name of the file that specifies a claim."""
    return f"{PREFIX}{uid}.json"


def cdi_device_ids(claim: PreparedClaim, device: PreparedDevice, options: ContainerOptions) -> list[str]:
    """Return the CDI devices that a container with a claim's device gets."""
    vendors = [f"{options.vendor}={device.instance or device.uuid}"] if options.vendor else []
    return [*vendors, f"{CDI_KIND}={_cdi_name(claim, device)}"]


def cdi_specification(claim: PreparedClaim, options: ContainerOptions) -> dict[str, Any]:
    """Return the specification for a claim. Raises ClaimError for a device that cannot be given without the vendor's.

    What is in the environment holds for all devices of a process, so only a claim with one device says it there; of
    several whole devices a container sees those that it has nodes of.
    """
    alone = len(claim.devices) == 1
    if not options.vendor:
        for each in claim.devices:
            _check_nodes(claim, each)
    return {
        "cdiVersion": CDI_VERSION,
        "kind": CDI_KIND,
        "devices": [
            {"name": _cdi_name(claim, each), "containerEdits": _edits(each, options, alone=alone)}
            for each in claim.devices
        ],
    }


def environment_of(device: PreparedDevice) -> dict[str, str]:
    """Return the environment of a container with one device."""
    return share_environment(
        device=device.uuid,
        visible=device.instance or device.uuid,
        share=device.share,
        memory=device.memory,
        sharing=device.sharing,
    )


def _edits(device: PreparedDevice, options: ContainerOptions, *, alone: bool) -> dict[str, Any]:
    edits: dict[str, Any] = {}
    environment = environment_of(device) if alone else {}
    if device.sharing == "mps":
        mounts = []
        if options.mps_pipe is not None:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = PIPE_DIRECTORY
            mounts.append(_mount(options.mps_pipe, PIPE_DIRECTORY))
        if options.mps_shm is not None:
            mounts.append(_mount(options.mps_shm, SHARED_MEMORY))
        if mounts:
            edits["mounts"] = mounts
    if environment:
        edits["env"] = [f"{name}={value}" for name, value in environment.items()]
    if not options.vendor:
        edits["deviceNodes"] = [{"path": path} for path in (f"/dev/nvidia{device.minor}", *CONTROL_NODES)]
    # Without any edit a specification is refused.
    return edits or {"env": [f"COTENANT_DEVICES_{device.uuid.replace('-', '_').upper()}=whole"]}


def _check_nodes(claim: PreparedClaim, device: PreparedDevice) -> None:
    lacks = "a MIG instance" if device.instance else f"device {device.uuid}" if device.minor is None else ""
    if lacks:
        raise ClaimError(
            f"claim {claim.namespace}/{claim.name}: the device nodes of {lacks} are not known; start the driver with "
            "--vendor-cdi nvidia.com/gpu, and have the vendor's toolkit write its CDI file"
        )


def _mount(host: Path, inside: str) -> dict[str, Any]:
    return {"hostPath": str(host), "containerPath": inside, "options": ["rw", "nosuid", "nodev", "bind"]}


def _cdi_name(claim: PreparedClaim, device: PreparedDevice) -> str:
    return f"{claim.uid}-{device.device}"
