from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core import mig
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.planners.geometry.cutting_patterns import (
    MAX_ENUMERATED_SHARES,
    MAX_PATTERNS,
    CuttingPattern,
    enumerate_patterns,
    most_valuable_pattern,
)
from cotenant.planners.geometry.modes import PartitionSize

coarse = st.lists(st.sampled_from((140, 200, 250, 300, 450, 500, 700, 1000)), min_size=1, max_size=5, unique=True)
limits = st.sampled_from((None, 1, 2, 3))


def slots(shares: Sequence[int], kind: int = 0) -> list[PartitionSize]:
    return [PartitionSize(kind, share, 1) for share in sorted(shares)]


def legal(sizes: Sequence[int], limit: int | None) -> Iterator[Counter[int]]:
    """Enumerate every multiset of sizes that fits a device."""
    for count in range(1, min(limit or WHOLE, WHOLE // min(sizes)) + 1):
        for chosen in combinations_with_replacement(range(len(sizes)), count):
            if sum(sizes[n] for n in chosen) <= WHOLE:
                yield Counter(chosen)


@given(shares=coarse, limit=limits)
def test_enumerate_patterns_of_any_shares_returns_all_maximal_patterns(shares: list[int], limit: int | None) -> None:
    own = slots(shares)
    found = enumerate_patterns(
        0, Kind(name="k", cuts=tuple(sorted(shares)), max_partitions=limit), own, range(len(own))
    )
    assert found is not None
    full = [Counter(dict(pattern.pieces)) for pattern in found]
    possible = list(legal(sorted(shares), limit))
    assert all(pieces in possible for pieces in full)
    assert len(set(found)) == len(found)
    assert sorted(map(repr, full)) == sorted(
        repr(one) for one in possible if not any(one < other for other in possible)
    )


@given(shares=coarse, limit=limits, prices=st.lists(st.floats(0, 10), min_size=5, max_size=5))
def test_most_valuable_pattern_of_any_values_equals_best_enumerated(
    shares: list[int], limit: int | None, prices: list[float]
) -> None:
    own = slots(shares)
    worth, pattern = most_valuable_pattern(0, Kind(name="k", max_partitions=limit), own, np.array(prices[: len(own)]))
    best = max(sum(prices[n] * many for n, many in one.items()) for one in legal(sorted(shares), limit))
    assert worth == pytest.approx(best)
    assert sum(prices[s] * many for s, many in pattern.pieces) == pytest.approx(best)
    assert sum(own[s].share * many for s, many in pattern.pieces) <= WHOLE
    assert sum(many for _, many in pattern.pieces) <= (limit or WHOLE)


def test_most_valuable_pattern_of_two_kinds_uses_slots_of_its_own() -> None:
    both = [*slots((400, 600)), *slots((500,), kind=1)]
    assert most_valuable_pattern(0, Kind(name="k"), both, np.array([1.0, 1.0, 9.0])) == (
        2.0,
        CuttingPattern(0, ((0, 2),)),
    )
    assert most_valuable_pattern(1, Kind(name="l"), both, np.array([1.0, 1.0, 9.0])) == (
        18.0,
        CuttingPattern(1, ((2, 2),)),
    )
    assert most_valuable_pattern(0, Kind(name="k"), both, np.zeros(3)) == (0.0, CuttingPattern(0, ()))


def test_enumerate_patterns_with_unusable_slots_omits_them() -> None:
    found = enumerate_patterns(0, Kind(name="k", cuts=(200, 600, 1000)), slots((200, 600, 1000)), [1, 2])
    assert found == [CuttingPattern(0, ((2, 1),)), CuttingPattern(0, ((1, 1),))]


def test_enumerate_patterns_of_fine_shares_returns_none() -> None:
    fine = tuple(range(10, 1001, 10))
    assert len(fine) > MAX_ENUMERATED_SHARES
    assert enumerate_patterns(0, Kind(name="k", cuts=fine), slots(fine), range(len(fine))) is None
    # A whole number n is a sum in p(n) ways: p(20) = 627, p(25) = 1958.
    for sizes, count in ((20, 627), (25, None)):
        cuts = tuple(range(WHOLE // sizes, WHOLE + 1, WHOLE // sizes))
        found = enumerate_patterns(0, Kind(name="k", cuts=cuts), slots(cuts), range(sizes))
        assert (found and len(found)) == count
        assert 627 < MAX_PATTERNS < 1958 and sizes <= MAX_ENUMERATED_SHARES


def outdone(some: Sequence[mig.Instance], by: Sequence[mig.Instance]) -> bool:
    """Return whether each instance has one of its own in `by` that is no smaller, in share and memory."""
    return len(some) <= len(by) and any(
        all(a.share <= b.share and a.memory <= b.memory for a, b in zip(some, order, strict=False))
        for order in permutations(by, len(some))
    )


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("geometry", ["mig-a30-24gb", "mig-a100-40gb", "mig-h200-141gb"])
def test_enumerate_patterns_of_mig_geometry_returns_legal_maximal_layouts(geometry: str, limit: int | None) -> None:
    instances = mig.GEOMETRIES[geometry]
    own = [PartitionSize(0, instance.share, instance.memory) for instance in instances]
    kind = Kind(name="k", cuts=mig.instance_shares(geometry), geometry=geometry, max_partitions=limit)
    found = enumerate_patterns(0, kind, own, range(len(own)))
    assert found is not None
    cut = [[instances[s] for s, many in pattern.pieces for _ in range(many)] for pattern in found]
    for chosen in cut:
        assert mig.placements_fit(geometry, [(instance.share, instance.memory) for instance in chosen]) is not None
        assert len(chosen) <= (limit or WHOLE)
    # What else is legal lies in one of them, or is outdone piece by piece.
    for layout in mig.maximal_layouts(geometry):
        sizes = {len(layout)} if limit is None else range(1, min(limit, len(layout)) + 1)
        for some in {some for size in sizes for some in combinations(layout, size)}:
            assert any(outdone(some, chosen) for chosen in cut)


def test_enumerate_patterns_of_mig_with_unusable_instances_omits_them() -> None:
    geometry = "mig-a100-80gb"
    own = [PartitionSize(0, instance.share, instance.memory) for instance in mig.GEOMETRIES[geometry]]
    found = enumerate_patterns(0, Kind(name="k", cuts=mig.instance_shares(geometry), geometry=geometry), own, [4, 5])
    assert set(found or ()) == {CuttingPattern(0, ((4, 1),)), CuttingPattern(0, ((5, 1),))}
