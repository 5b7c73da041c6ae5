"""From numbers of modes and cuttings to devices: who lies beside whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core.plan import Partition
from cotenant.planners import Problem
from cotenant.planners.capacity import PartitionDraft, footprint, slowdown
from cotenant.planners.geometry.cutting_patterns import CuttingPattern
from cotenant.planners.geometry.modes import Mode, ModeCatalog, PartitionSize
from cotenant.predictors import Load

MAX_DEVICES_TO_SWAP = 64  # devices among which modes change places; more are alike anyway
MAX_DEVICES_TO_COMPARE = 256  # devices of the plan in force that a new one is compared with


class DeviceGroup(msgspec.Struct):
    """Devices that are alike. kind: index in the fleet; modes: one for each partition; ids: their numbers."""

    kind: int
    modes: tuple[Mode, ...]
    ids: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.ids)


class CurrentPartition(msgspec.Struct, frozen=True):
    """A partition of the plan in force. models: ascending; rates and procs: of each."""

    slot: int
    models: tuple[int, ...]
    rates: tuple[float, ...]
    procs: tuple[int, ...]


class CurrentDevice(msgspec.Struct, frozen=True):
    """A device of the plan in force, as far as this problem knows its kind, shares and models."""

    kind: int
    id: int
    places: tuple[CurrentPartition, ...]


def current_devices(problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str]) -> list[CurrentDevice]:
    """The devices of the plan in force; of more devices or partitions than there may be now, the first."""
    kinds = {kind.name: k for k, kind in enumerate(problem.fleet)}
    index = {name: i for i, name in enumerate(names)}
    found: list[CurrentDevice] = []
    used: Counter[int] = Counter()
    for device in problem.current.devices if problem.current else ():
        if device.kind not in kinds:
            continue
        k = kinds[device.kind]
        kind = problem.fleet[k]
        if kind.count is not None and used[k] >= kind.count:
            continue
        used[k] += 1
        places = [
            place
            for partition in device.partitions
            if (place := _place(problem, slots, index, k, partition)) is not None
        ]
        found.append(CurrentDevice(k, device.id, tuple(places[: kind.max_partitions])))
    return found


def _place(
    problem: Problem, slots: Sequence[PartitionSize], index: Mapping[str, int], k: int, partition: Partition
) -> CurrentPartition | None:
    known = sorted((index[p.model], p) for p in partition.placements if p.model in index)
    memory = sum(p.procs * footprint(problem, problem.fleet[k].name, p.model, p.batch) for _, p in known)
    fitting = [
        s for s, slot in enumerate(slots) if (slot.kind, slot.share) == (k, partition.share) and slot.memory >= memory
    ]
    if not known or not fitting:
        return None
    return CurrentPartition(
        min(fitting, key=lambda s: slots[s].memory),
        tuple(i for i, _ in known),
        tuple(max(p.rate, 1e-9) for _, p in known),
        tuple(p.procs for _, p in known),
    )


def assemble_devices(
    modes: Sequence[tuple[Mode, int]],
    patterns: Sequence[tuple[CuttingPattern, int]],
    memory_limits: Sequence[int | None],
    stand: Sequence[CurrentDevice],
) -> list[DeviceGroup]:
    """Devices that hold the modes, in as few groups as they come. What finds no memory is left out.

    Devices that stand keep what they can: first those that may stay as they are, then those that change least.
    """
    pool: dict[int, Counter[Mode]] = {}
    for mode, count in modes:
        pool.setdefault(mode.slot, Counter())[mode] += count
    left = dict(patterns)
    kept = []
    for device in stand:
        if (found := _kept(device, pool, left, memory_limits[device.kind])) is not None:
            _take(pool, found[0], 1)
            kept.append((device, *found))
    groups = []
    for device, chosen, rest in kept:
        room = memory_limits[device.kind]
        more = _compose(rest, pool, None if room is None else room - sum(mode.memory for mode in chosen))
        _take(pool, list(more.elements()), 1)
        groups.append(DeviceGroup(device.kind, (*chosen, *more.elements()), (device.id,)))
    stay = {(device.kind, device.id) for device, _, _ in kept}
    free = [device for device in stand if (device.kind, device.id) not in stay]
    numbers = _Numbers(stand)
    for pattern, count in sorted(left.items(), key=lambda each: each[0].pieces[-1:], reverse=True):
        while count > 0 and (composed := _compose(pattern, pool, memory_limits[pattern.kind])):
            times = min([count, *(pool[mode.slot][mode] // many for mode, many in composed.items())])
            _take(pool, list(composed.elements()), times)
            ids = [numbers.like(pattern.kind, composed, free) for _ in range(times)]
            groups.append(DeviceGroup(pattern.kind, tuple(composed.elements()), tuple(ids)))
            count -= times
    return groups


class _Numbers:
    """Gives new devices numbers."""

    def __init__(self, stand: Sequence[CurrentDevice]) -> None:
        self._taken = {(device.kind, device.id) for device in stand}
        self._next: Counter[int] = Counter()

    def like(self, kind: int, modes: Counter[Mode], free: list[CurrentDevice]) -> int:
        """That of the device among `free` that has most of the same, which is free no more; else a fresh one."""
        own = Counter((mode.slot, mode.models) for mode in modes.elements())

        def common(device: CurrentDevice) -> int:
            return (own & Counter((place.slot, place.models) for place in device.places)).total()

        able = [device for device in free[:MAX_DEVICES_TO_COMPARE] if device.kind == kind]
        if able:
            best = max(able, key=common)
            free.remove(best)
            return best.id
        while (kind, self._next[kind]) in self._taken:
            self._next[kind] += 1
        self._next[kind] += 1
        return self._next[kind] - 1


def _kept(
    device: CurrentDevice, pool: dict[int, Counter[Mode]], left: dict[CuttingPattern, int], room: int | None
) -> tuple[list[Mode], CuttingPattern] | None:
    """The modes of a device that may stay as it is, and the rest of its cutting, of which one fewer is left; None where
    it may not."""
    chosen: Counter[Mode] = Counter()
    for place in device.places:
        able = [
            mode
            for mode, n in pool.get(place.slot, {}).items()
            if n > chosen[mode] and (mode.models, mode.procs) == (place.models, place.procs)
        ]
        if not able:
            return None
        chosen[able[0]] += 1
    if not chosen or (room is not None and sum(mode.memory * n for mode, n in chosen.items()) > room):
        return None
    pieces = Counter(place.slot for place in device.places)
    for pattern, count in left.items():
        whole = Counter(dict(pattern.pieces))
        if count > 0 and pattern.kind == device.kind and pieces <= whole:
            left[pattern] -= 1
            return list(chosen.elements()), CuttingPattern(device.kind, tuple(sorted((whole - pieces).items())))
    return None


def _take(pool: dict[int, Counter[Mode]], modes: Sequence[Mode], times: int) -> None:
    for mode in modes:
        pool[mode.slot][mode] -= times


def _compose(pattern: CuttingPattern, pool: dict[int, Counter[Mode]], room: int | None) -> Counter[Mode]:
    """One device: of each piece what there is most of, as far as memory goes."""
    chosen: Counter[Mode] = Counter()
    for s, many in sorted(pattern.pieces, reverse=True):
        for _ in range(many):
            able = [mode for mode, n in pool.get(s, {}).items() if n > chosen[mode]]
            if room is not None:
                taken = sum(mode.memory * n for mode, n in chosen.items())
                able = [mode for mode in able if taken + mode.memory <= room]
            if able:
                chosen[max(able, key=lambda mode: pool[s][mode] - chosen[mode])] += 1
    return chosen


def reduce_interference(
    problem: Problem, catalog: ModeCatalog, groups: list[DeviceGroup], memory_limits: Sequence[int | None]
) -> list[DeviceGroup]:
    """The same devices, with modes of equal shares changing places as long as slowdowns get less."""
    if not problem.interference.interferes or sum(group.count for group in groups) > MAX_DEVICES_TO_SWAP:
        return groups
    devices = [(group.kind, list(group.modes)) for group in groups for _ in group.ids]
    ids = [number for group in groups for number in group.ids]
    cost = [_slowness(problem, catalog, kind, modes) for kind, modes in devices]
    improved = True
    while improved:
        improved = False
        for a in range(len(devices)):
            for b in range(a + 1, len(devices)):
                (kind, mine), (_, theirs) = devices[a], devices[b]
                room = memory_limits[kind] or math.inf
                for i, one in enumerate(mine):
                    for j, other in enumerate(theirs):
                        if one.slot != other.slot or one == other:
                            continue
                        swapped = [*mine[:i], other, *mine[i + 1 :]], [*theirs[:j], one, *theirs[j + 1 :]]
                        if any(_memory(modes) > room for modes in swapped):
                            continue
                        new = [_slowness(problem, catalog, kind, modes) for modes in swapped]
                        if sum(new) < cost[a] + cost[b] - 1e-9:
                            mine[i], theirs[j] = other, one
                            cost[a], cost[b] = new
                            one, improved = other, True
    return [DeviceGroup(kind, tuple(modes), (number,)) for (kind, modes), number in zip(devices, ids, strict=True)]


def _memory(modes: Sequence[Mode]) -> int:
    return sum(mode.memory for mode in modes)


def _slowness(problem: Problem, catalog: ModeCatalog, kind: int, modes: Sequence[Mode]) -> float:
    """The worst slowdown counts most: it is what breaks a promise."""
    loads = [_loads(catalog, problem.fleet[kind].name, mode) for mode in modes]
    total = 0.0
    for i, own in enumerate(loads):
        beside = loads[:i] + loads[i + 1 :]
        total += sum((slowdown(problem, load, beside) - 1) ** 2 for load in own)
    return total


def _loads(catalog: ModeCatalog, kind: str, mode: Mode) -> list[Load]:
    share = catalog.slots[mode.slot].share
    return [Load(catalog.names[i], kind, batch, share) for i, batch in zip(mode.models, mode.batches, strict=True)]


def partition_drafts(catalog: ModeCatalog, group: DeviceGroup, factors: NDArray[np.float64]) -> list[PartitionDraft]:
    """The partitions of one device, with a factor on the rates of each model."""
    return [
        PartitionDraft(
            catalog.slots[mode.slot].share,
            {catalog.names[i]: rate * float(factors[i]) for i, rate in zip(mode.models, mode.rates, strict=True)},
            {catalog.names[i]: n for i, n in zip(mode.models, mode.procs, strict=True) if n > 1},
        )
        for mode in group.modes
    ]
