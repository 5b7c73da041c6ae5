"""Describe models that users register, and kinds of devices."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from cotenant.core.units import WHOLE


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model and its SLO.

    slo: latency target in seconds, from arrival to response.
    attainment: the fraction of requests that must meet it.
    max_batch: the largest batch, whatever the profile contains; None: the largest that was profiled.
    max_queue_delay: how long a free lane may delay a batch that is not full, in seconds; 0: not at all.
    priority: 1 is the highest; where devices do not suffice, models of lower numbers are served first.
    """

    name: str
    slo: float
    attainment: float = 0.99
    max_batch: int | None = None
    max_queue_delay: float = 0.0
    priority: int = 1


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a type of device.

    count: how many at most; None: as many as needed.
    memory: bytes on each.
    price: per hour and device; None where cost does not matter.
    cuts: legal shares in ‰, ascending.
    max_partitions: partitions on one device at most; None: any number.
    geometry: a MIG geometry (a name in core/mig.py): partitions are instances, with memory of their own and legal
    placements. None: any cuts whose sum is at most the whole.
    in_place: ranges of shares within which a worker's share changes without a new worker, by the last share of each,
    ascending; empty: every share needs a worker of its own. batches_grow: a worker takes larger batches than it was
    started for. processors: that models get of such a device, whose shares are of processor time; 0 where it is a GPU.
    """

    name: str
    count: int | None = 1
    memory: int = 1 << 62
    price: float | None = None
    cuts: tuple[int, ...] = (WHOLE,)
    max_partitions: int | None = None
    geometry: str | None = None
    in_place: tuple[int, ...] = ()
    batches_grow: bool = False
    processors: float = 0.0

    def keeps_worker(self, old: int, new: int) -> bool:
        """Tell whether a worker of one share (‰) can go on with another."""
        return old == new or (
            bool(self.in_place) and bisect_left(self.in_place, old) == bisect_left(self.in_place, new)
        )
