"""Which MIG instances lie side by side on one GPU: a set of them is legal by placement, not by sum.

An instance takes a run of memory slices, and may begin only at some of them (NVIDIA MIG user guide, supported
profiles; `nvidia-smi mig -lgipp`). Its share is its sevenths (an A30's quarters) of the multiprocessors, rounded down.
Its memory is what `nvidia-smi mig -lgip` lists, the least where drivers differ; for the larger instances of an H200 no
listing was at hand, and they count as so many of its smallest.

A geometry is a name of that table or, for a GPU that is at hand, what its driver says of it: `geometry_name` writes
that as a name of its own, so that it goes wherever a name does.
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
    """One kind of MIG instance. share: ‰; memory: bytes; slices: of memory; starts: slices where it may begin."""

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
    """Whether that is the name of a geometry."""
    return geometry in GEOMETRIES or geometry.startswith(_DESCRIBED)


def instances(geometry: str) -> tuple[Instance, ...]:
    """What a geometry can be cut into."""
    return _read(geometry) if geometry.startswith(_DESCRIBED) else GEOMETRIES[geometry]


def geometry_name(some: Iterable[Instance]) -> str:
    """A geometry of just these, as a name."""
    return _DESCRIBED + " ".join(
        f"{it.name}:{it.share}:{it.memory}:{it.slices}:{','.join(map(str, it.starts))}" for it in some
    )


@cache
def _read(geometry: str) -> tuple[Instance, ...]:
    found = []
    for text in geometry.removeprefix(_DESCRIBED).split():
        name, share, memory, slices, starts = text.split(":")
        found.append(Instance(name, int(share), int(memory), int(slices), tuple(map(int, starts.split(",")))))
    return tuple(found)


def fixed_geometry(some: Iterable[tuple[str, int, int]]) -> str:
    """The geometry of a GPU that is cut already, and stays so: instances as (name, share in ‰, bytes)."""
    alike: dict[tuple[str, int, int], list[int]] = {}
    for place, one in enumerate(some):
        alike.setdefault(one, []).append(place)
    return geometry_name(Instance(*one, 1, tuple(places)) for one, places in alike.items())


def instance_shares(geometry: str) -> tuple[int, ...]:
    """The shares that its instances have, in ‰, ascending."""
    return tuple(sorted({instance.share for instance in instances(geometry)}))


@cache
def maximal_layouts(geometry: str) -> tuple[tuple[Instance, ...], ...]:
    """Every set of instances to which none can be added, in the order of the table."""
    table = instances(geometry)
    found: dict[tuple[Instance, ...], None] = {}
    for places in _placements(table, 0, 0):
        taken = sum(((1 << instance.slices) - 1) << start for instance, start in places)
        if not any(_free(instance, taken) for instance in table):
            chosen = tuple(sorted((instance for instance, _ in places), key=table.index))
            found[chosen] = None
    return tuple(found)


def placements_fit(geometry: str, needs: Sequence[tuple[int, int]]) -> tuple[Instance, ...] | None:
    """Instances that lie side by side and hold partitions of (share in ‰, bytes), in the same order; None if none do.

    Where an instance with less memory does, it is taken.
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
    """Every legal multiset of instances, as pairs of instance and number."""
    every = _placements(instances(geometry), 0, 0)
    return frozenset(_multiset(instance for instance, _ in places) for places in every)


def _multiset(some: Iterable[Instance]) -> _Multiset:
    return frozenset(Counter(some).items())


def _free(instance: Instance, taken: int) -> bool:
    mask = (1 << instance.slices) - 1
    return any(not taken & mask << start for start in instance.starts)


def _placements(table: Sequence[Instance], start: int, taken: int) -> list[list[tuple[Instance, int]]]:
    """Every way to put instances on the slices from `start` on that are not `taken`."""
    last = max(at for instance in table for at in instance.starts)
    found: list[list[tuple[Instance, int]]] = [[]]
    for at in range(start, last + 1):
        for instance in table:
            mask = ((1 << instance.slices) - 1) << at
            if at in instance.starts and not taken & mask:
                rest = _placements(table, at + 1, taken | mask)
                found += [[(instance, at), *more] for more in rest]
    return found
