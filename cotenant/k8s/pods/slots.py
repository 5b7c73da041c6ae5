"""Represent a device of the cluster as rules see it: its partitions, and whether new pods may come."""

from __future__ import annotations

from functools import cached_property

import msgspec

from cotenant.planners.capacity import DeviceDraft, PartitionDraft


class DeviceState(msgspec.Struct, frozen=True, cache_hash=True):
    """What a decision depends on, equal for devices that are alike. cuts: share and rates of each partition."""

    kind: str
    memory: int
    fixed: bool
    cuts: tuple[tuple[int, tuple[tuple[str, float], ...]], ...]


class DeviceSlots(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A device with what runs there. draft: its partitions, empty MIG instances among them. open: new pods may come.
    fixed: its partitions are what they are: no more are cut. pods: how many it has."""

    draft: DeviceDraft
    open: bool
    fixed: bool = False
    pods: int = 0

    @cached_property
    def state(self) -> DeviceState:
        """Return what a decision depends on."""
        kind = self.draft.kind
        cuts = tuple([(cut.share, tuple(cut.rates.items())) for cut in self.draft.cuts])
        return DeviceState(kind.name, kind.memory, self.fixed, cuts)

    @cached_property
    def free(self) -> int:
        """The share that is left, in ‰."""
        return self.draft.free

    @property
    def used(self) -> bool:
        """Whether a pod is there."""
        return any(cut.rates for cut in self.draft.cuts)


class Choice(msgspec.Struct, frozen=True):
    """A partition for a pod. device: index of the device. cuts: its partitions with the pod. slot: the pod's among
    them. score: the higher the better, of one rule."""

    device: int
    cuts: list[PartitionDraft]
    slot: int
    score: float
