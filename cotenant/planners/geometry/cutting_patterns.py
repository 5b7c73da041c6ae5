"""The ways to cut one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.planners.geometry.modes import PartitionSize

MAX_ENUMERATED_SHARES = 25  # shares of which every cutting is made
MAX_PATTERNS = 700  # ways to cut a device that are all looked at; beyond, those that prices ask for


class CuttingPattern(msgspec.Struct, frozen=True):
    """One way to cut a device. kind: index in the fleet; pieces: slots, and how many of each."""

    kind: int
    pieces: tuple[tuple[int, int], ...]


def enumerate_patterns(
    kind: int, of: Kind, slots: Sequence[PartitionSize], usable_slots: Sequence[int]
) -> list[CuttingPattern] | None:
    """All cuttings of a kind that leave no room for one more useful piece; None where there are very many."""
    mine = [s for s in usable_slots if slots[s].kind == kind]
    if of.geometry is not None:
        return _instances(kind, of, [s for s, slot in enumerate(slots) if slot.kind == kind], set(usable_slots))
    if len(mine) > MAX_ENUMERATED_SHARES:
        return None
    found: list[CuttingPattern] = []
    for pieces in _fillings([slots[s].share for s in mine], WHOLE, of.max_partitions or WHOLE):
        found.append(CuttingPattern(kind, tuple((s, n) for s, n in zip(mine, pieces, strict=True) if n)))
        if len(found) > MAX_PATTERNS:
            return None
    return found


def _instances(kind: int, of: Kind, mine: Sequence[int], usable_slots: set[int]) -> list[CuttingPattern]:
    assert of.geometry is not None
    legal = [instance for instance in mig.instances(of.geometry) if instance.share in of.cuts]
    number = dict(zip(legal, mine, strict=True))
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for layout in mig.maximal_layouts(of.geometry):
        pieces = Counter(number[instance] for instance in layout if number.get(instance) in usable_slots)
        chosen = list(pieces.elements())[: of.max_partitions]
        found[tuple(sorted(Counter(chosen).items()))] = None
    return [CuttingPattern(kind, pieces) for pieces in found if pieces]


def _fillings(shares: Sequence[int], room: int, most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of pieces of ascending sizes to which none can be added."""
    if not shares:
        return
    *smaller, largest = shares
    for n in range(min(room // largest, most), -1, -1):
        left, parts = room - n * largest, most - n
        if not smaller:
            if left < largest or parts == 0:
                yield (n,)
            continue
        for rest in _fillings(smaller, left, parts) if smaller[0] <= left and parts else [(0,) * len(smaller)]:
            if parts == sum(rest) or left - sum(a * b for a, b in zip(rest, smaller, strict=True)) < shares[0]:
                yield (*rest, n)


def most_valuable_pattern(
    kind: int, of: Kind, slots: Sequence[PartitionSize], price: NDArray[np.float64]
) -> tuple[float, CuttingPattern]:
    """The cutting whose pieces are worth most at a price for each slot, and what it is worth.

    Only for kinds without MIG, which have few. An unbounded knapsack: the best of each size follows from smaller ones.
    """
    mine = np.array([s for s, slot in enumerate(slots) if slot.kind == kind and price[s] > 0], dtype=np.int64)
    if not len(mine):
        return 0.0, CuttingPattern(kind, ())
    shares = np.array([slots[s].share for s in mine])
    unit = int(np.gcd.reduce([*shares, WHOLE]))
    sizes, worth, whole = shares // unit, price[mine], WHOLE // unit
    parts = min(of.max_partitions or whole, whole // int(sizes.min()))
    has_finite_optimum = of.max_partitions is not None and of.max_partitions < whole // int(sizes.min())
    rows = parts + 1 if has_finite_optimum else 2
    best = np.zeros((rows, whole + 1))
    taken = np.full((rows, whole + 1), -1)
    for row in range(1, rows):
        before = row - 1 if has_finite_optimum else row
        for room in range(1, whole + 1):
            able = sizes <= room
            if not able.any():
                continue
            value = np.where(able, best[before, np.maximum(room - sizes, 0)] + worth, -1.0)
            n = int(value.argmax())
            if value[n] > best[row, room - 1]:
                best[row, room], taken[row, room] = value[n], n
            else:
                best[row, room], taken[row, room] = best[row, room - 1], -2
    pieces: Counter[int] = Counter()
    row, room = rows - 1, whole
    while row > 0 and room > 0 and taken[row, room] != -1:
        n = int(taken[row, room])
        if n == -2:
            room -= 1
            continue
        pieces[int(mine[n])] += 1
        room -= int(sizes[n])
        row -= 1 if has_finite_optimum else 0
    return float(best[rows - 1, whole]), CuttingPattern(kind, tuple(sorted(pieces.items())))
