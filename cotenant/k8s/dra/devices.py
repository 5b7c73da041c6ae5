"""Describe the devices of a node as the driver publishes and prepares them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from cotenant.errors import DeviceError

DRIVER: Final = "cotenant.dev"
SHARE: Final = "share"  # the capacity of a device in thousandths
MEMORY: Final = "memory"  # the capacity of a device in bytes

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance. share: ‰ of its GPU. memory: bytes. profile: such as ``3g.40gb``."""

    uuid: str
    profile: str
    share: int
    memory: int


class NodeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of the node. kind, index: what it is called here, as ``kind-index``. product: its vendor's name for it.
    memory: bytes. modes: the ways to share it that work on the node. mig: MIG is on, so that it is used by its
    instances alone. minor: number of its device node; None where that is not known."""

    uuid: str
    kind: str
    index: int
    product: str
    memory: int
    modes: tuple[str, ...] = ()
    mig: bool = False
    instances: tuple[Instance, ...] = ()
    minor: int | None = None

    @property
    def name(self) -> str:
        """Return its name in the pool: made of its UUID, since an index becomes another GPU's when one is lost."""
        return device_name(self.uuid)


def device_name(uuid: str) -> str:
    """Return the name in its pool of the device with a UUID. Raises DeviceError for one that makes no name."""
    name = uuid.lower()
    if not _LABEL.fullmatch(name):
        raise DeviceError(f"device {uuid!r}: its UUID makes no name for a ResourceSlice (letters, digits and hyphens)")
    return name
