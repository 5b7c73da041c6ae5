"""From numbers of modes and cuttings to devices: who lies beside whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import Partition
from cotenant.planners import Problem
from cotenant.planners.capacity import Cut, partitions, slowdown
from cotenant.planners.geometry.cuttings import Cutting
from cotenant.planners.geometry.modes import Menu, Mode
from cotenant.predictors import Alone, Load

SWAPS = 64  # devices among which modes change places; more are alike anyway


class Group(msgspec.Struct):
    """Devices that are alike. kind: index in the fleet; modes: one for each partition; count: how many devices."""

    kind: int
    modes: tuple[Mode, ...]
    count: int


def lay(
    menu: Menu, modes: Sequence[tuple[Mode, int]], cuttings: Sequence[tuple[Cutting, int]], rooms: Sequence[int | None]
) -> list[Group]:
    """Devices that hold the modes, in as few groups as they come. What finds no memory is left out."""
    pool: dict[int, Counter[Mode]] = {}
    for mode, count in modes:
        pool.setdefault(mode.slot, Counter())[mode] += count
    groups: list[Group] = []
    for cutting, count in sorted(cuttings, key=lambda each: -max(each[0].pieces, default=0)):
        left = count
        while left > 0:
            chosen = _compose(cutting, pool, rooms[cutting.kind])
            if not chosen:
                break
            times = min([left, *(pool[mode.slot][mode] // many for mode, many in chosen.items())])
            for mode, many in chosen.items():
                pool[mode.slot][mode] -= many * times
            groups.append(Group(cutting.kind, tuple(chosen.elements()), times))
            left -= times
    return groups


def _compose(cutting: Cutting, pool: dict[int, Counter[Mode]], room: int | None) -> Counter[Mode]:
    """One device: of each piece what there is most of, as far as memory goes."""
    chosen: Counter[Mode] = Counter()
    for s, many in sorted(cutting.pieces.items(), reverse=True):
        for _ in range(many):
            able = [mode for mode, n in pool.get(s, {}).items() if n > chosen[mode]]
            if room is not None:
                taken = sum(mode.memory * n for mode, n in chosen.items())
                able = [mode for mode in able if taken + mode.memory <= room]
            if able:
                chosen[max(able, key=lambda mode: pool[s][mode] - chosen[mode])] += 1
    return chosen


def pair(problem: Problem, menu: Menu, groups: list[Group], rooms: Sequence[int | None]) -> list[Group]:
    """The same devices, with modes of equal shares changing places as long as slowdowns get less."""
    if isinstance(problem.interference, Alone) or sum(group.count for group in groups) > SWAPS:
        return groups
    devices = [(group.kind, list(group.modes)) for group in groups for _ in range(group.count)]
    cost = [_slowness(problem, menu, kind, modes) for kind, modes in devices]
    improved = True
    while improved:
        improved = False
        for a in range(len(devices)):
            for b in range(a + 1, len(devices)):
                (kind, mine), (_, theirs) = devices[a], devices[b]
                for i, one in enumerate(mine):
                    for j, other in enumerate(theirs):
                        if one.slot != other.slot or one == other:
                            continue
                        swapped = [*mine[:i], other, *mine[i + 1 :]], [*theirs[:j], one, *theirs[j + 1 :]]
                        if any(rooms[kind] is not None and _memory(modes) > rooms[kind] for modes in swapped):  # type: ignore[operator]
                            continue
                        new = [_slowness(problem, menu, kind, modes) for modes in swapped]
                        if sum(new) < cost[a] + cost[b] - 1e-9:
                            mine[i], theirs[j] = other, one
                            cost[a], cost[b] = new
                            one, improved = other, True
    return [Group(kind, tuple(modes), 1) for kind, modes in devices]


def _memory(modes: Sequence[Mode]) -> int:
    return sum(mode.memory for mode in modes)


def _slowness(problem: Problem, menu: Menu, kind: int, modes: Sequence[Mode]) -> float:
    """The worst slowdown counts most: it is what breaks a promise."""
    loads = [_loads(menu, mode) for mode in modes]
    total = 0.0
    for i, own in enumerate(loads):
        beside = loads[:i] + loads[i + 1 :]
        total += sum((slowdown(problem, load, beside) - 1) ** 2 for load in own)
    return total


def _loads(menu: Menu, mode: Mode) -> list[Load]:
    share = menu.slots[mode.slot].share
    return [Load(menu.names[i], batch, share) for i, batch in zip(mode.models, mode.batches, strict=True)]


def cuts(menu: Menu, group: Group, factors: Sequence[float]) -> list[Cut]:
    """The partitions of one device, with a factor on the rates of each model."""
    return [
        Cut(
            menu.slots[mode.slot].share,
            {menu.names[i]: rate * factors[i] for i, rate in zip(mode.models, mode.rates, strict=True)},
            {menu.names[i]: n for i, n in zip(mode.models, mode.procs, strict=True) if n > 1},
        )
        for mode in group.modes
    ]
