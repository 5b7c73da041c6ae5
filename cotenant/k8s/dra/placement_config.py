"""Read and write the placement that a claim carries as opaque configuration of this driver."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from cotenant.errors import ClaimError
from cotenant.k8s.resource import GROUP, VERSION
from cotenant.k8s.share_environment import Sharing

KIND: Final = "PlacementConfig"
API_VERSION: Final = f"{GROUP}/{VERSION}"


class PlacementConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What Cotenant planned for a claim; each field may be left out.

    sharing: how the device is shared. device: UUID of the GPU. instance: UUID of the MIG instance. share: ‰ of the
    device. memory: bytes. slot: number of the partition on the device. model, slo, rate: what it was decided for, with
    seconds and requests/s.
    """

    sharing: Sharing | None = None
    device: str = ""
    instance: str = ""
    share: int | None = None
    memory: int | None = None
    slot: int | None = None
    model: str = ""
    slo: float | None = None
    rate: float | None = None

    def parameters(self) -> dict[str, Any]:
        """Return what stands under ``opaque.parameters``."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"apiVersion": API_VERSION, "kind": KIND} | fields

    def over(self, base: PlacementConfig) -> PlacementConfig:
        """Return these fields, and those of `base` where one is left out here."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value not in (None, "")}
        return msgspec.structs.replace(base, **given)


class _Parameters(PlacementConfig, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    api_version: Literal["cotenant.dev/v1alpha1"]
    kind: Literal["PlacementConfig"]


def read_parameters(parameters: object, place: str) -> PlacementConfig:
    """Read what stands under ``opaque.parameters``. Raises ClaimError, with the place, for anything else than a
    PlacementConfig of this version."""
    try:
        read = msgspec.convert(parameters, _Parameters)
    except msgspec.ValidationError as error:
        raise ClaimError(f"{place}: {error}; write a {KIND} of {API_VERSION}") from None
    fields = {name: getattr(read, name) for name in PlacementConfig.__struct_fields__}
    for name in ("share", "memory", "slot", "slo", "rate"):
        if fields[name] is not None and not 0 <= fields[name] < float("inf"):
            raise ClaimError(f"{place}: {name}: {fields[name]!r} must be at least 0 and finite")
    return PlacementConfig(**fields)
