"""What a user registers, and what a device can be cut into."""

from __future__ import annotations

import msgspec

from cotenant.core.units import WHOLE


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model and its promise.

    slo: latency target in seconds, from arrival to answer.
    attainment: the fraction of requests that must meet it.
    max_batch: no batch is larger, whatever the profile holds; None: as large as was profiled.
    max_queue_delay: how long a free lane may hold back a batch that is not full, in seconds. 0 runs what is there.
    """

    name: str
    slo: float
    attainment: float = 0.99
    max_batch: int | None = None
    max_queue_delay: float = 0.0


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one type.

    count: how many there are at most; None: as many as needed.
    memory: bytes on each.
    price: per hour and device; None where cost is no question.
    cuts: legal shares in ‰, ascending.
    max_partitions: partitions on one device at most; None: any number.
    geometry: how MIG cuts it (a name in core/mig.py): partitions are instances, which have memory of their own and lie
    side by side only in certain ways. None: any cuts whose sum is at most the whole.
    """

    name: str
    count: int | None = 1
    memory: int = 1 << 62
    price: float | None = None
    cuts: tuple[int, ...] = (WHOLE,)
    max_partitions: int | None = None
    geometry: str | None = None
