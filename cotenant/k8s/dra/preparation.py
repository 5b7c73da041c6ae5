"""Decide what a claim gets on this node, or why it cannot have it. Pure.

The scheduler has counted shares and memory before. They are counted again here, over what is prepared: a device may
have shrunk, been cut anew, or have claims that another scheduler has allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from cotenant.core.units import WHOLE, show_memory, show_share
from cotenant.errors import ClaimError
from cotenant.k8s.dra.allocation import AllocatedClaim, AllocatedDevice
from cotenant.k8s.dra.devices import Instance, NodeDevice
from cotenant.k8s.share_environment import Sharing


class PreparedDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device, or a share of it, that a claim has. pool, device: as in the ResourceSlice. uuid: of the GPU. instance:
    UUID of the MIG instance; "": none. share: ‰. memory: bytes that it may take; 0: any. minor: of the device node."""

    request: str
    pool: str
    device: str
    uuid: str
    sharing: Sharing
    share: int
    memory: int
    instance: str = ""
    minor: int | None = None


class PreparedClaim(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    namespace: str
    name: str
    devices: tuple[PreparedDevice, ...]


def prepare(
    claim: AllocatedClaim, node: str, devices: Mapping[str, NodeDevice], prepared: Collection[PreparedClaim]
) -> PreparedClaim:
    """Return what a claim gets. devices: of the node, by name. prepared: the other claims that have something here.

    Raises ClaimError, which names the claims that have what it asks for.
    """
    others = [each for each in prepared if each.uid != claim.uid]
    place = f"claim {claim.key}"
    found = tuple(_prepare(place, each, node, devices, others) for each in claim.devices)
    if len(found) > 1 and any(each.sharing != "whole" for each in found):
        raise ClaimError(
            f"{place}: it has {len(found)} devices, and not all of them whole; the limits of a share hold for all "
            "devices of a process, so ask for each share in a claim of its own"
        )
    if len({each.uuid for each in found}) < len(found):
        raise ClaimError(f"{place}: it has the same device twice")
    return PreparedClaim(uid=claim.uid, namespace=claim.key.namespace, name=claim.key.name, devices=found)


def _prepare(
    claim: str,
    asked: AllocatedDevice,
    node: str,
    devices: Mapping[str, NodeDevice],
    others: Collection[PreparedClaim],
) -> PreparedDevice:
    place = f"{claim}: request {asked.request}"
    if asked.pool != node:
        raise ClaimError(f"{place}: its device is of pool {asked.pool!r}, and this is {node!r}")
    device = devices.get(asked.device)
    if device is None:
        there = ", ".join(sorted(devices)) or "none"
        raise ClaimError(f"{place}: device {asked.device} is lost, or was never here; available: {there}")
    share, memory = _quantities(place, asked, device)
    sharing = asked.config.sharing or ("mig" if device.mig else "whole" if share == WHOLE else "mps")
    held = [(claim, each) for claim in others for each in claim.devices if each.uuid == device.uuid]
    instance: Instance | None = None
    if sharing == "mig":
        instance = _choose_instance(place, asked, device, share, memory, held)
    else:
        _check_sharing(place, asked, device, sharing, share)
    _check_room(place, device, sharing, share, memory, held)
    return PreparedDevice(
        request=asked.request,
        pool=asked.pool,
        device=asked.device,
        uuid=device.uuid,
        sharing=sharing,
        share=share,
        memory=memory,
        instance="" if instance is None else instance.uuid,
        minor=device.minor,
    )


def _quantities(place: str, asked: AllocatedDevice, device: NodeDevice) -> tuple[int, int]:
    """Return share and memory, as the scheduler has counted them. The placement may repeat both, and nothing else."""
    config = asked.config
    if config.device not in ("", device.uuid):
        raise ClaimError(
            f"{place}: it was planned on device {config.device}, and allocated on {device.uuid}; select the device by "
            "its attribute uuid"
        )
    share = WHOLE if asked.share is None else asked.share
    if not 0 < share <= WHOLE:
        raise ClaimError(f"{place}: a share of {share} ‰ must be above 0 and at most {WHOLE} ‰")
    if config.share not in (None, share):
        raise ClaimError(f"{place}: it was planned with {config.share} ‰ of the device, and allocated {share} ‰")
    memory = device.memory if asked.memory is None else asked.memory
    if config.memory not in (None, memory):
        raise ClaimError(
            f"{place}: it was planned with {config.memory} bytes of the device's memory, and allocated {memory}"
        )
    if memory > device.memory:
        raise ClaimError(
            f"{place}: {show_memory(memory)} are more than the {show_memory(device.memory)} of device {device.uuid}"
        )
    return share, memory


def _check_sharing(place: str, asked: AllocatedDevice, device: NodeDevice, sharing: Sharing, share: int) -> None:
    if asked.config.instance:
        raise ClaimError(f"{place}: it names MIG instance {asked.config.instance}, and is shared as {sharing!r}")
    if device.mig:
        raise ClaimError(f"{place}: MIG is on for device {device.uuid}, so it cannot be shared as {sharing!r}")
    if sharing == "whole" and share < WHOLE:
        raise ClaimError(f'{place}: {show_share(share)} of a device are not the whole; share it as "mps"')
    if sharing == "mps" and "mps" not in device.modes:
        ways = ", ".join(device.modes) or "none"
        raise ClaimError(f"{place}: device {device.uuid} cannot be shared by MPS here; ways that work: {ways}")


def _choose_instance(
    place: str,
    asked: AllocatedDevice,
    device: NodeDevice,
    share: int,
    memory: int,
    held: Collection[tuple[PreparedClaim, PreparedDevice]],
) -> Instance:
    """Return the MIG instance that was planned, else the smallest free one that suffices."""
    if not device.mig:
        raise ClaimError(f"{place}: MIG is off for device {device.uuid}")
    taken = {each.instance: claim for claim, each in held if each.instance}
    enough = [each for each in device.instances if each.share >= share and (each.memory >= memory or not asked.memory)]
    if planned := asked.config.instance:
        there = next((each for each in device.instances if each.uuid == planned), None)
        if there is None:
            raise ClaimError(
                f"{place}: device {device.uuid} has no MIG instance {planned} now; it may have been cut anew"
            )
        if there not in enough:
            raise ClaimError(
                f"{place}: MIG instance {planned} has {there.share} ‰ and {show_memory(there.memory)}, less than the "
                f"{share} ‰ and {show_memory(memory)} that are allocated"
            )
        if planned in taken:
            raise ClaimError(
                f"{place}: MIG instance {planned} is that of {_name(taken[planned])}", (taken[planned].uid,)
            )
        enough = [there]
    free = [each for each in enough if each.uuid not in taken]
    if not free:
        who = sorted({taken[each.uuid].uid for each in enough})
        names = ", ".join(sorted({_name(taken[each.uuid]) for each in enough}))
        raise ClaimError(
            f"{place}: no free MIG instance of device {device.uuid} has {share} ‰"
            + (f" and {show_memory(memory)}" if asked.memory else "")
            + (f"; claims that have one: {names}" if names else "; none is that large"),
            tuple(who),
        )
    return min(free, key=lambda each: (each.share, each.memory, each.uuid))


def _check_room(
    place: str,
    device: NodeDevice,
    sharing: Sharing,
    share: int,
    memory: int,
    held: Collection[tuple[PreparedClaim, PreparedDevice]],
) -> None:
    names = ", ".join(_name(claim) for claim, _ in held)
    uids = tuple(claim.uid for claim, _ in held)
    left = WHOLE - sum(each.share for _, each in held)
    if share > left:
        raise ClaimError(
            f"{place}: {show_share(share)} of device {device.uuid} are more than the {show_share(max(left, 0))} that "
            f"are left beside {names}",
            uids,
        )
    memory_left = device.memory - sum(each.memory for _, each in held)
    if sharing == "mps" and memory > memory_left:
        raise ClaimError(
            f"{place}: {show_memory(memory)} of device {device.uuid} are more than the "
            f"{show_memory(max(memory_left, 0))} that are left beside {names}",
            uids,
        )


def _name(claim: PreparedClaim) -> str:
    return f"{claim.namespace}/{claim.name}"
