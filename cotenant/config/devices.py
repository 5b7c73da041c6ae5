"""Read what plans may make of the devices of a kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from cotenant.config.toml import parse_count, parse_cuts, parse_name
from cotenant.core.model import Kind
from cotenant.core.units import show_share
from cotenant.errors import ConfigError


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limit what plans make of the devices of one kind, on all nodes together.

    count: how many at most; None: all that there are. price: per hour and device; None: as the devices say. cuts: legal
    shares in ‰, of those that the devices have; None: all of them.
    """

    kind: str
    count: int | None = None
    price: float | None = None
    cuts: tuple[int, ...] | None = None


class DeviceEntry(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    count: int | None = None
    price: float | None = None
    cuts: tuple[float, ...] | None = None


def read_devices(entry: DeviceEntry, place: str) -> DeviceSettings:
    """Check the settings of a kind of devices. Raises ConfigError."""
    return DeviceSettings(
        kind=parse_name(entry.kind, f"{place}.kind"),
        count=parse_count(entry.count, f"{place}.count"),
        price=parse_price(entry.price, f"{place}.price"),
        cuts=None if entry.cuts is None else parse_cuts(entry.cuts, f"{place}.cuts"),
    )


def parse_price(price: float | None, place: str) -> float | None:
    """Check a price per hour; None: none. Raises ConfigError."""
    if price is not None and not 0 <= price < float("inf"):
        raise ConfigError(f"{place}: {price:g} must be finite and at least 0")
    return price


def limited(fleet: Collection[Kind], devices: Sequence[DeviceSettings]) -> tuple[Kind, ...]:
    """Return a fleet as settings limit it. A kind of a node is called ``node/kind``, and settings for ``kind`` are for
    those of all nodes; of these the first, by name, are taken.

    Raises ConfigError where none of the cuts that settings allow is legal for the devices.
    """
    known = {each.kind: each for each in devices}
    left = {each.kind: each.count for each in devices}
    kinds: dict[str, Kind] = {}
    for kind in sorted(fleet, key=lambda each: each.name):
        name = kind.name if kind.name in known else kind.name.rpartition("/")[2]
        if (each := known.get(name)) is None:
            kinds[kind.name] = kind
            continue
        count, most = kind.count, left[name]
        if most is not None:
            count = most if count is None else min(count, most)
            left[name] = most - count
        cuts = kind.cuts if each.cuts is None else tuple(cut for cut in kind.cuts if cut in each.cuts)
        if not cuts:
            legal = ", ".join(show_share(cut) for cut in kind.cuts)
            raise ConfigError(f"devices of kind {name!r}: none of the cuts is legal for {kind.name}; it has {legal}")
        price = kind.price if each.price is None else each.price
        kinds[kind.name] = msgspec.structs.replace(kind, count=count, price=price, cuts=cuts)
    return tuple(kinds[kind.name] for kind in fleet)
