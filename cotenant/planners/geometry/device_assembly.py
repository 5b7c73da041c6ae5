"""Assemble devices from numbers of modes and patterns: decide which partitions are co-located."""

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

MAX_DEVICES_TO_SWAP = 64  # larger fleets are not improved by swaps: their devices are mostly alike
MAX_DEVICES_TO_COMPARE = 256  # devices of the current plan that a new one is compared with


class DeviceGroup(msgspec.Struct):
    """Group identical devices. kind: index in the fleet; modes: one for each partition; ids: device numbers."""

    kind: int
    modes: tuple[Mode, ...]
    ids: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.ids)


class CurrentPartition(msgspec.Struct, frozen=True):
    """Describe a partition of the current plan. slot: index of its size; models: ascending indices; rates, procs: of
    each."""

    slot: int
    models: tuple[int, ...]
    rates: tuple[float, ...]
    procs: tuple[int, ...]


class CurrentDevice(msgspec.Struct, frozen=True):
    """Describe a device of the current plan, without partitions whose share or models this problem lacks."""

    kind: int
    id: int
    partitions: tuple[CurrentPartition, ...]


def current_devices(problem: Problem, slots: Sequence[PartitionSize], names: Sequence[str]) -> list[CurrentDevice]:
    """Return the devices of the current plan; where it exceeds the problem's limits, the first ones."""
    kinds = {kind.name: k for k, kind in enumerate(problem.fleet)}
    index = {name: i for i, name in enumerate(names)}
    devices: list[CurrentDevice] = []
    used: Counter[int] = Counter()
    for device in problem.current.devices if problem.current else ():
        if device.kind not in kinds:
            continue
        k = kinds[device.kind]
        kind = problem.fleet[k]
        if kind.count is not None and used[k] >= kind.count:
            continue
        used[k] += 1
        partitions = [
            kept
            for partition in device.partitions
            if (kept := _current_partition(problem, slots, index, k, partition)) is not None
        ]
        devices.append(CurrentDevice(k, device.id.index, tuple(partitions[: kind.max_partitions])))
    return devices


def _current_partition(
    problem: Problem, slots: Sequence[PartitionSize], index: Mapping[str, int], k: int, partition: Partition
) -> CurrentPartition | None:
    placements = sorted((index[p.model], p) for p in partition.placements if p.model in index)
    memory = sum(p.procs * footprint(problem, problem.fleet[k].name, p.model, p.batch) for _, p in placements)
    slots_that_fit = [
        s for s, slot in enumerate(slots) if (slot.kind, slot.share) == (k, partition.share) and slot.memory >= memory
    ]
    if not placements or not slots_that_fit:
        return None
    return CurrentPartition(
        min(slots_that_fit, key=lambda s: slots[s].memory),
        tuple(i for i, _ in placements),
        tuple(max(p.rate, 1e-9) for _, p in placements),
        tuple(p.procs for _, p in placements),
    )


def assemble_devices(
    modes: Sequence[tuple[Mode, int]],
    patterns: Sequence[tuple[CuttingPattern, int]],
    memory_limits: Sequence[int | None],
    current: Sequence[CurrentDevice],
) -> list[DeviceGroup]:
    """Assemble devices that run the modes, in groups of identical ones; modes that exceed the memory are left out.

    modes, patterns: with how many of each. current: devices to keep as they are where possible, else to change least.
    """
    pool: dict[int, Counter[Mode]] = {}
    for mode, count in modes:
        pool.setdefault(mode.slot, Counter())[mode] += count
    patterns_left = dict(patterns)
    kept = []
    for device in current:
        if (keepable := _keep_device(device, pool, patterns_left, memory_limits[device.kind])) is not None:
            _remove(pool, keepable[0], 1)
            kept.append((device, *keepable))
    groups = []
    for device, chosen, rest in kept:
        memory_limit = memory_limits[device.kind]
        extra = _compose_device(
            rest, pool, None if memory_limit is None else memory_limit - sum(mode.memory for mode in chosen)
        )
        _remove(pool, list(extra.elements()), 1)
        groups.append(DeviceGroup(device.kind, (*chosen, *extra.elements()), (device.id,)))
    stay = {(device.kind, device.id) for device, _, _ in kept}
    free = [device for device in current if (device.kind, device.id) not in stay]
    numbers = _DeviceNumbers(current)
    for pattern, count in sorted(patterns_left.items(), key=lambda each: each[0].pieces[-1:], reverse=True):
        while count > 0 and (composed := _compose_device(pattern, pool, memory_limits[pattern.kind])):
            repeats = min([count, *(pool[mode.slot][mode] // many for mode, many in composed.items())])
            _remove(pool, list(composed.elements()), repeats)
            ids = [numbers.closest(pattern.kind, composed, free) for _ in range(repeats)]
            groups.append(DeviceGroup(pattern.kind, tuple(composed.elements()), tuple(ids)))
            count -= repeats
    return groups


def pack_devices(
    modes: Sequence[tuple[Mode, int]],
    patterns: Sequence[tuple[CuttingPattern, int]],
    memory_limits: Sequence[int | None],
) -> list[tuple[int, tuple[Mode, ...]]]:
    """Return devices, as kind and modes, that run the modes; those that fit the memory of none are left out.

    Where partitions share memory, the modes that need most of it are placed first, each on the device where least is
    left over (best fit decreasing).
    """
    limited = [each for each in patterns if memory_limits[each[0].kind] is not None]
    slots = {s for pattern, _ in limited for s, _ in pattern.pieces}
    free = [(each, Counter(dict(each.pieces))) for each, count in limited for _ in range(count)]
    left = [float(memory_limits[pattern.kind] or 0) for pattern, _ in free]
    placed: list[list[Mode]] = [[] for _ in free]
    for mode in sorted(
        (mode for mode, count in modes if mode.slot in slots for _ in range(count)), key=lambda mode: -mode.memory
    ):
        fitting = [n for n, (_, pieces) in enumerate(free) if pieces[mode.slot] and left[n] >= mode.memory]
        if fitting:
            n = min(fitting, key=left.__getitem__)
            free[n][1][mode.slot] -= 1
            left[n] -= mode.memory
            placed[n].append(mode)
    devices = [(pattern.kind, tuple(own)) for (pattern, _), own in zip(free, placed, strict=True) if own]
    others = [(mode, count) for mode, count in modes if mode.slot not in slots]
    rest = [each for each in patterns if memory_limits[each[0].kind] is None]
    groups = assemble_devices(others, rest, memory_limits, [])
    return devices + [(group.kind, group.modes) for group in groups for _ in group.ids]


def number_devices(
    devices: Sequence[tuple[int, int | None, Sequence[Mode]]], current: Sequence[CurrentDevice]
) -> list[int]:
    """Return the number of each device of (kind, number or None, modes): new ones get that of the current device with
    most partitions in common, of those that are not kept, else a new number."""
    kept = {(kind, number) for kind, number, _ in devices if number is not None}
    free = [device for device in current if (device.kind, device.id) not in kept]
    numbers = _DeviceNumbers(current)
    return [
        numbers.closest(kind, Counter(modes), free) if number is None else number for kind, number, modes in devices
    ]


class _DeviceNumbers:
    """Choose the numbers of assembled devices."""

    def __init__(self, current: Sequence[CurrentDevice]) -> None:
        self._taken = {(device.kind, device.id) for device in current}
        self._next: Counter[int] = Counter()

    def closest(self, kind: int, modes: Counter[Mode], free: list[CurrentDevice]) -> int:
        """Return the number of the `free` device with most partitions in common, and remove it; else a new number."""
        own = Counter((mode.slot, mode.models) for mode in modes.elements())

        def common(device: CurrentDevice) -> int:
            return (own & Counter((partition.slot, partition.models) for partition in device.partitions)).total()

        same_kind = [device for device in free[:MAX_DEVICES_TO_COMPARE] if device.kind == kind]
        if same_kind:
            best = max(same_kind, key=common)
            free.remove(best)
            return best.id
        while (kind, self._next[kind]) in self._taken:
            self._next[kind] += 1
        self._next[kind] += 1
        return self._next[kind] - 1


def _keep_device(
    device: CurrentDevice,
    pool: dict[int, Counter[Mode]],
    patterns_left: dict[CuttingPattern, int],
    memory_limit: int | None,
) -> tuple[list[Mode], CuttingPattern] | None:
    """Return the modes of a device that can stay as it is and the unused pieces of a pattern, taken from those left.

    None where the pool lacks one of its modes, or no pattern has its pieces.
    """
    chosen: Counter[Mode] = Counter()
    for partition in device.partitions:
        matching = [
            mode
            for mode, n in pool.get(partition.slot, {}).items()
            if n > chosen[mode] and (mode.models, mode.procs) == (partition.models, partition.procs)
        ]
        if not matching:
            return None
        chosen[matching[0]] += 1
    if not chosen or (memory_limit is not None and sum(mode.memory * n for mode, n in chosen.items()) > memory_limit):
        return None
    pieces = Counter(partition.slot for partition in device.partitions)
    for pattern, count in patterns_left.items():
        whole = Counter(dict(pattern.pieces))
        if count > 0 and pattern.kind == device.kind and pieces <= whole:
            patterns_left[pattern] -= 1
            return list(chosen.elements()), CuttingPattern(device.kind, tuple(sorted((whole - pieces).items())))
    return None


def _remove(pool: dict[int, Counter[Mode]], modes: Sequence[Mode], count: int) -> None:
    for mode in modes:
        pool[mode.slot][mode] -= count


def _compose_device(pattern: CuttingPattern, pool: dict[int, Counter[Mode]], memory_limit: int | None) -> Counter[Mode]:
    """Compose one device: on each piece the mode with most left in the pool, as far as memory allows."""
    chosen: Counter[Mode] = Counter()
    for s, many in sorted(pattern.pieces, reverse=True):
        for _ in range(many):
            fitting = [mode for mode, n in pool.get(s, {}).items() if n > chosen[mode]]
            if memory_limit is not None:
                used = sum(mode.memory * n for mode, n in chosen.items())
                fitting = [mode for mode in fitting if used + mode.memory <= memory_limit]
            if fitting:
                chosen[max(fitting, key=lambda mode: pool[s][mode] - chosen[mode])] += 1
    return chosen


def reduce_interference(
    problem: Problem, catalog: ModeCatalog, groups: list[DeviceGroup], memory_limits: Sequence[int | None]
) -> list[DeviceGroup]:
    """Swap modes of equal slots between devices as long as that reduces slowdowns."""
    if not problem.interference.interferes or sum(group.count for group in groups) > MAX_DEVICES_TO_SWAP:
        return groups
    devices = [(group.kind, list(group.modes)) for group in groups for _ in group.ids]
    ids = [number for group in groups for number in group.ids]
    cost = [_slowdown_cost(problem, catalog, kind, modes) for kind, modes in devices]
    improved = True
    while improved:
        improved = False
        for a in range(len(devices)):
            for b in range(a + 1, len(devices)):
                (kind, modes_a), (_, modes_b) = devices[a], devices[b]
                memory_limit = memory_limits[kind] or math.inf
                for i, first in enumerate(modes_a):
                    for j, second in enumerate(modes_b):
                        if first.slot != second.slot or first == second:
                            continue
                        swapped = [*modes_a[:i], second, *modes_a[i + 1 :]], [*modes_b[:j], first, *modes_b[j + 1 :]]
                        if any(_memory(modes) > memory_limit for modes in swapped):
                            continue
                        new = [_slowdown_cost(problem, catalog, kind, modes) for modes in swapped]
                        if sum(new) < cost[a] + cost[b] - 1e-9:
                            modes_a[i], modes_b[j] = second, first
                            cost[a], cost[b] = new
                            first, improved = second, True
    return [DeviceGroup(kind, tuple(modes), (number,)) for (kind, modes), number in zip(devices, ids, strict=True)]


def _memory(modes: Sequence[Mode]) -> int:
    return sum(mode.memory for mode in modes)


def _slowdown_cost(problem: Problem, catalog: ModeCatalog, kind: int, modes: Sequence[Mode]) -> float:
    # Squares: the worst slowdown counts most, since it is the one that violates an SLO.
    loads = [_loads(catalog, problem.fleet[kind].name, mode) for mode in modes]
    total = 0.0
    for i, own in enumerate(loads):
        colocated = loads[:i] + loads[i + 1 :]
        total += sum((slowdown(problem, load, colocated) - 1) ** 2 for load in own)
    return total


def _loads(catalog: ModeCatalog, kind: str, mode: Mode) -> list[Load]:
    share = catalog.slots[mode.slot].share
    return [Load(catalog.names[i], kind, batch, share) for i, batch in zip(mode.models, mode.batches, strict=True)]


def partition_drafts(catalog: ModeCatalog, group: DeviceGroup, factors: NDArray[np.float64]) -> list[PartitionDraft]:
    """Draft the partitions of one device of a group. factors: on the rates of each model."""
    return [
        PartitionDraft(
            catalog.slots[mode.slot].share,
            {catalog.names[i]: rate * float(factors[i]) for i, rate in zip(mode.models, mode.rates, strict=True)},
            {catalog.names[i]: n for i, n in zip(mode.models, mode.procs, strict=True) if n > 1},
        )
        for mode in group.modes
    ]
