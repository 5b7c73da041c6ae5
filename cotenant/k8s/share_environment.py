"""Say which environment holds a program to its share of a GPU, whether a ConfigMap or a claim brings it."""

from __future__ import annotations

from typing import Final, Literal

from cotenant.core.units import WHOLE

Sharing = Literal["whole", "mps", "mig"]

MIB: Final = 1 << 20


def sharing_of(device: str, visible: str, share: int) -> Sharing:
    """Return the way of sharing that a share (‰) takes. device: UUID of the GPU. visible: of what the program sees."""
    return "mig" if visible != device else "whole" if share == WHOLE else "mps"


def share_environment(*, device: str, visible: str, share: int, memory: int, sharing: Sharing) -> dict[str, str]:
    """Return the environment of a program with a share (‰) of one device. memory: bytes; 0: any.

    CUDA numbers the devices that it sees from 0. MPS limits a client to a part of what it sees, which is the instance
    where that is one of MIG: hardware holds instances, and a device that is whole has nobody to be held from, so only a
    share by MPS has its limits.
    """
    percent = f"{100 * share / WHOLE:g}"
    found = {"COTENANT_DEVICE_UUID": device, "COTENANT_SHARE": percent, "CUDA_VISIBLE_DEVICES": visible}
    if sharing == "mps":
        found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percent
        if memory:
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-memory // MIB)}M"
    return found
