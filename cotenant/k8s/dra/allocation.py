"""Read from a ResourceClaim what the scheduler has allocated of this driver's devices, and the placement that it
carries. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from cotenant.errors import ClaimError
from cotenant.k8s.dra.devices import DRIVER, MEMORY, SHARE
from cotenant.k8s.dra.placement_config import PlacementConfig, read_parameters
from cotenant.k8s.dra.quantities import read_quantity
from cotenant.k8s.resource import KubeObject, ObjectKey, key_of

_SOURCES = ("FromClass", "FromClaim")  # the second goes before the first


class AllocatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What one request has got of a device. share, memory: consumed of its capacity, in ‰ and bytes; None where the
    claim has the device alone."""

    request: str
    pool: str
    device: str
    share: int | None = None
    memory: int | None = None
    config: PlacementConfig = PlacementConfig()


class AllocatedClaim(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    key: ObjectKey
    devices: tuple[AllocatedDevice, ...]


class _Result(msgspec.Struct, frozen=True, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    consumed_capacity: dict[str, Any] | None = None
    admin_access: bool | None = None


class _Opaque(msgspec.Struct, frozen=True):
    driver: str
    parameters: Any = None


class _Config(msgspec.Struct, frozen=True):
    source: str
    requests: list[str] | None = None
    opaque: _Opaque | None = None


class _Devices(msgspec.Struct, frozen=True):
    results: tuple[_Result, ...] = ()
    config: tuple[_Config, ...] = ()


class _Allocation(msgspec.Struct, frozen=True):
    devices: _Devices = _Devices()


def is_allocated(claim: KubeObject) -> bool:
    """Return whether anything is allocated to a claim now."""
    return bool((claim.get("status") or {}).get("allocation"))


def read_allocation(claim: KubeObject, uid: str) -> AllocatedClaim:
    """Read a claim. uid: of the one that is meant. Raises ClaimError for another of its name, for one that nothing of
    this driver is allocated to, and for a placement that cannot be read or contradicts another."""
    key, metadata = key_of(claim), claim["metadata"]
    if metadata.get("uid") != uid:
        raise ClaimError(f"claim {key} with uid {uid} is gone; another has its name ({metadata.get('uid')})")
    if not is_allocated(claim):
        raise ClaimError(f"claim {key} is not allocated")
    try:
        devices = msgspec.convert(claim["status"]["allocation"], _Allocation).devices
    except msgspec.ValidationError as error:
        raise ClaimError(f"claim {key}: status.allocation: {error}") from None
    results = [each for each in devices.results if each.driver == DRIVER]
    if not results:
        raise ClaimError(f"claim {key}: no device of {DRIVER} is allocated to it")
    configs = [each for each in devices.config if each.opaque is not None and each.opaque.driver == DRIVER]
    return AllocatedClaim(
        uid=uid, key=key, devices=tuple(_device(f"claim {key}", result, configs) for result in results)
    )


def _device(claim: str, result: _Result, configs: list[_Config]) -> AllocatedDevice:
    place = f"{claim}: request {result.request}"
    if result.admin_access:
        raise ClaimError(f"{place}: access for administrators is not offered by {DRIVER}; leave adminAccess out")
    consumed = {name.removeprefix(f"{DRIVER}/"): each for name, each in (result.consumed_capacity or {}).items()}
    quantities = {
        name: read_quantity(consumed[name], f"{place}: {name}") if name in consumed else None
        for name in (SHARE, MEMORY)
    }
    return AllocatedDevice(
        request=result.request,
        pool=result.pool,
        device=result.device,
        share=quantities[SHARE],
        memory=quantities[MEMORY],
        config=_config(place, result.request, configs),
    )


def _config(place: str, request: str, configs: list[_Config]) -> PlacementConfig:
    """Return what configures a request: the fields that the claim gives, over those of its class."""
    merged = PlacementConfig()
    for source in _SOURCES:
        found: PlacementConfig | None = None
        for each in configs:
            if each.source != source or not _applies(each, request) or each.opaque is None:
                continue
            read = read_parameters(each.opaque.parameters, place)
            if found is not None and found != read:
                what = "claim" if source == "FromClaim" else "class"
                raise ClaimError(f"{place}: its {what} has two placements for it that differ; leave one")
            found = read
        merged = merged if found is None else found.over(merged)
    return merged


def _applies(config: _Config, request: str) -> bool:
    """Return whether a configuration is for a request: for all, for that one, or for all alternatives of it."""
    return not config.requests or request in config.requests or request.partition("/")[0] in config.requests
