"""Describe MIG geometries: which instances fit one GPU together. A set is legal by placement, not by sum.

An instance occupies consecutive memory slices, and may start only at some of them (NVIDIA MIG user guide, supported
profiles; `nvidia-smi mig -lgipp`). Its share is its sevenths (an A30's quarters) of the multiprocessors, rounded down.
Its memory is what `nvidia-smi mig -lgip` lists, the least where drivers differ; for the larger instances of an H200 no
listing was available, and they count as multiples of its smallest.

A geometry is the name of a table below or, for an attached GPU, what its driver reports: `geometry_name` encodes that
as a name, so that it can be used wherever a name can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

from cotenant.core.units import WHOLE

GIB = 1 << 30
_DESCRIBED = "mig of "


class Instance(msgspec.Struct, frozen=True):
    """Describe a MIG instance profile.

    share: ‰; memory: bytes; slices: memory slices that it occupies; starts: slices at which it may start.
    """

    name: str
    share: int
    memory: int
    slices: int
    starts: tuple[int, ...]


def _sevenths(names: str, gib: Sequence[float]) -> tuple[Instance, ...]:
    shapes = ((1, 1, range(7)), (1, 2, (0, 2, 4, 6)), (2, 2, (0, 2, 4)), (3, 4, (0, 4)), (4, 4, (0,)), (7, 8, (0,)))
    return tuple(
        Instance(name, WHOLE * parts // 7, round(size * GIB), slices, tuple(starts))
        for name, size, (parts, slices, starts) in zip(names.split(), gib, shapes, strict=True)
    )


GEOMETRIES: dict[str, tuple[Instance, ...]] = {
    "mig-a30-24gb": (
        Instance("1g.6gb", 250, round(5.75 * GIB), 1, (0, 1, 2, 3)),
        Instance("2g.12gb", 500, round(11.62 * GIB), 2, (0, 2)),
        Instance("4g.24gb", 1000, round(23.37 * GIB), 4, (0,)),
    ),
    "mig-a100-40gb": _sevenths("1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb", (4.75, 9.62, 9.62, 19.5, 19.5, 39.25)),
    "mig-a100-80gb": _sevenths(
        "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb", (9.5, 19.5, 19.5, 39.25, 39.25, 78.75)
    ),
    "mig-h100-80gb": _sevenths(
        "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb", (9.75, 19.62, 19.62, 39.5, 39.5, 79.25)
    ),
    "mig-h200-141gb": _sevenths("1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb", (16, 32, 32, 64, 64, 128)),
}


def is_known_geometry(geometry: str) -> bool:
    """Return whether a name is that of a geometry."""
    return geometry in GEOMETRIES or geometry.startswith(_DESCRIBED)


def instances(geometry: str) -> tuple[Instance, ...]:
    """Return the instance profiles of a geometry."""
    return _parse(geometry) if geometry.startswith(_DESCRIBED) else GEOMETRIES[geometry]


def geometry_name(entries: Iterable[Instance]) -> str:
    """Encode a geometry of these instance profiles as a name."""
    return _DESCRIBED + " ".join(
        f"{each.name}:{each.share}:{each.memory}:{each.slices}:{','.join(map(str, each.starts))}" for each in entries
    )


@cache
def _parse(geometry: str) -> tuple[Instance, ...]:
    parsed = []
    for text in geometry.removeprefix(_DESCRIBED).split():
        name, share, memory, slices, starts = text.split(":")
        parsed.append(Instance(name, int(share), int(memory), int(slices), tuple(map(int, starts.split(",")))))
    return tuple(parsed)


def fixed_geometry(entries: Iterable[tuple[str, int, int]]) -> str:
    """Return the geometry of a GPU whose instances exist and stay: (name, share in ‰, bytes) of each."""
    numbers: dict[tuple[str, int, int], list[int]] = {}
    for number, entry in enumerate(entries):
        numbers.setdefault(entry, []).append(number)
    return geometry_name(Instance(*entry, 1, tuple(positions)) for entry, positions in numbers.items())


def instance_shares(geometry: str) -> tuple[int, ...]:
    """Return the shares of a geometry's instances, in ‰, ascending."""
    return tuple(sorted({instance.share for instance in instances(geometry)}))


@cache
def maximal_layouts(geometry: str) -> tuple[tuple[Instance, ...], ...]:
    """Return every set of instances to which none can be added, in the order of the table."""
    table = instances(geometry)
    layouts_: dict[tuple[Instance, ...], None] = {}
    for placements in _placements(table, 0, 0):
        used = sum(((1 << instance.slices) - 1) << start for instance, start in placements)
        if not any(_free(instance, used) for instance in table):
            chosen = tuple(sorted((instance for instance, _ in placements), key=table.index))
            layouts_[chosen] = None
    return tuple(layouts_)


def placements_fit(geometry: str, needs: Sequence[tuple[int, int]]) -> tuple[Instance, ...] | None:
    """Return co-located instances for partitions of (share in ‰, bytes), in that order; None where there are none.

    Of several sufficient profiles, one with less memory is preferred.
    """
    return _fit(geometry, tuple(needs))


@cache
def _fit(geometry: str, needs: tuple[tuple[int, int], ...]) -> tuple[Instance, ...] | None:
    table = instances(geometry)
    options = [[i for i in table if i.share == share and i.memory >= memory] for share, memory in needs]
    if not all(options):
        return None

    def choose(index: int, chosen: tuple[Instance, ...]) -> tuple[Instance, ...] | None:
        if _multiset(chosen) not in _subsets(geometry):
            return None
        if index == len(options):
            return chosen
        for instance in options[index]:
            if (rest := choose(index + 1, (*chosen, instance))) is not None:
                return rest
        return None

    return choose(0, ())


_Multiset = frozenset[tuple[Instance, int]]


@cache
def _subsets(geometry: str) -> frozenset[_Multiset]:
    """Return every legal multiset of instances, as pairs of instance and number."""
    placements_lists = _placements(instances(geometry), 0, 0)
    return frozenset(_multiset(instance for instance, _ in placements) for placements in placements_lists)


def _multiset(entries: Iterable[Instance]) -> _Multiset:
    return frozenset(Counter(entries).items())


def _free(instance: Instance, used: int) -> bool:
    mask = (1 << instance.slices) - 1
    return any(not used & mask << start for start in instance.starts)


def _placements(table: Sequence[Instance], start: int, used: int) -> list[list[tuple[Instance, int]]]:
    """Return every way to place instances on the slices from `start` on that are not `used` (a bit mask)."""
    last = max(position for instance in table for position in instance.starts)
    ways: list[list[tuple[Instance, int]]] = [[]]
    for position in range(start, last + 1):
        for instance in table:
            mask = ((1 << instance.slices) - 1) << position
            if position in instance.starts and not used & mask:
                rest = _placements(table, position + 1, used | mask)
                ways += [[(instance, position), *others] for others in rest]
    return ways
