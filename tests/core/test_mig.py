from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement, product

import pytest

from cotenant.core import mig
from cotenant.core.mig import GEOMETRIES, GIB, Instance

A100 = "mig-a100-80gb"
ONE, TWO, THREE, FOUR, SEVEN = (1000 * parts // 7 for parts in (1, 2, 3, 4, 7))


def share(*sizes: int) -> list[tuple[int, int]]:
    """Return partitions of some sevenths, with almost no memory."""
    return [(1000 * size // 7, 1) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [(7,), (3, 3), (4, 3), (4, 2, 1), (1,) * 7, (2, 2, 3), (3, 2, 1, 1), (4, 1, 1, 1), (2, 2, 2, 1), (3, 2, 2), (3, 1)],
)
def test_placements_fit_accepts_sets_of_the_user_guide(sizes: tuple[int, ...]) -> None:
    assert mig.placements_fit(A100, share(*sizes)) is not None
    assert mig.placements_fit(A100, share(*reversed(sizes))) is not None


@pytest.mark.parametrize("sizes", [(3, 3, 1), (4, 4), (7, 1), (2, 2, 2, 2), (4, 3, 1), (1,) * 8, (4, 2, 2), (5,)])
def test_placements_fit_rejects_illegal_set_within_the_sum(sizes: tuple[int, ...]) -> None:
    assert mig.placements_fit(A100, share(*sizes)) is None


def test_instance_shares_of_a30_are_quarters() -> None:
    assert mig.instance_shares("mig-a30-24gb") == (250, 500, 1000)
    assert mig.placements_fit("mig-a30-24gb", [(250, 1)] * 4) is not None
    assert mig.placements_fit("mig-a30-24gb", [(500, 1), (250, 1), (250, 1)]) is not None
    assert mig.placements_fit("mig-a30-24gb", [(500, 1), (500, 1), (250, 1)]) is None


def test_placements_fit_prefers_instance_with_less_memory() -> None:
    (small,) = mig.placements_fit(A100, [(ONE, 9 * GIB)]) or ()
    (large,) = mig.placements_fit(A100, [(ONE, 12 * GIB)]) or ()
    assert (small.name, large.name) == ("1g.10gb", "1g.20gb")
    assert mig.placements_fit(A100, [(ONE, 20 * GIB)]) is None
    # Four of them take all the memory there is: with 20 GB each no fifth has room.
    assert mig.placements_fit(A100, [(ONE, 12 * GIB)] * 4) is not None
    assert mig.placements_fit(A100, [(ONE, 12 * GIB)] * 4 + [(ONE, GIB)]) is None


def test_placements_fit_keeps_the_order_of_needs() -> None:
    found = mig.placements_fit(A100, [(ONE, GIB), (FOUR, GIB), (TWO, GIB)])
    assert [instance.share for instance in found or ()] == [ONE, FOUR, TWO]


def tried(chosen: tuple[Instance, ...]) -> bool:
    """Return whether some choice of starts gives every slice to at most one instance."""
    return any(
        max(Counter(s for i, at in zip(chosen, starts, strict=True) for s in range(at, at + i.slices)).values()) == 1
        for starts in product(*(instance.starts for instance in chosen))
    )


@pytest.mark.parametrize("name", ["mig-a30-24gb", A100])
def test_maximal_layouts_equal_brute_force(name: str) -> None:
    instances = GEOMETRIES[name]
    most = max(len(instance.starts) for instance in instances)
    legal = {
        chosen
        for size in range(1, most + 1)
        for chosen in combinations_with_replacement(instances, size)
        if sum(instance.slices for instance in chosen) <= max(i.slices for i in instances) and tried(chosen)
    }
    found = set(mig.maximal_layouts(name))
    assert found <= legal
    # Whatever is legal is part of a layout, and every layout that no other holds is there.
    counts = [Counter(layout) for layout in found]
    assert all(any(Counter(chosen) <= layout for layout in counts) for chosen in legal)
    largest = {c for c in legal if not any(Counter(c) < Counter(other) for other in legal)}
    assert largest <= found
    for chosen in legal:
        assert mig.placements_fit(name, [(instance.share, instance.memory) for instance in chosen]) is not None


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries_have_consistent_tables(name: str) -> None:
    whole = GEOMETRIES[name][-1]
    assert whole.share == 1000
    assert whole.memory == max(instance.memory for instance in GEOMETRIES[name])
    for instance in GEOMETRIES[name]:
        assert all(start + instance.slices <= whole.slices for start in instance.starts)
    for layout in mig.maximal_layouts(name):
        assert sum(instance.share for instance in layout) <= 1000
        assert sum(instance.memory for instance in layout) <= whole.memory


def test_fixed_geometry_allows_exactly_its_instances() -> None:
    three, one = ("3g.71gb", 428, 64 * GIB), ("1g.18gb", 142, 16 * GIB)
    geometry = mig.fixed_geometry([three, one, one])
    assert mig.is_known_geometry(geometry) and not mig.is_known_geometry("mig-v100")
    assert mig.instance_shares(geometry) == (142, 428)
    assert mig.maximal_layouts(geometry) == ((mig.instances(geometry)[0], *[mig.instances(geometry)[1]] * 2),)
    assert [it.name for it in mig.placements_fit(geometry, [(142, GIB), (428, GIB), (142, GIB)]) or ()] == [
        "1g.18gb",
        "3g.71gb",
        "1g.18gb",
    ]
    assert mig.placements_fit(geometry, [(142, GIB)] * 3) is None
    assert mig.placements_fit(geometry, [(428, 65 * GIB)]) is None


def test_fixed_geometry_of_equal_names_keeps_memory_apart() -> None:
    geometry = mig.fixed_geometry([("1g.18gb", 142, 16 * GIB), ("1g.18gb", 142, 15 * GIB)])
    assert mig.placements_fit(geometry, [(142, 16 * GIB), (142, 15 * GIB)])
    assert mig.placements_fit(geometry, [(142, 16 * GIB)] * 2) is None


def test_geometry_name_round_trips() -> None:
    for name, table in GEOMETRIES.items():
        own = mig.geometry_name(table)
        assert mig.instances(own) == table
        assert set(mig.maximal_layouts(own)) == set(mig.maximal_layouts(name))
