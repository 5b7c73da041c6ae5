"""How what is idle is divided: all of it where it can be used, in proportion to weights, and those behind catch up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.control.jobs.fair_shares import Claim, caught_up, fair_shares


@st.composite
def claims(draw: st.DrawFn) -> list[Claim]:
    drawn = []
    for _ in range(draw(st.integers(0, 5))):
        ceiling = draw(st.integers(1, 1000))
        drawn.append(
            Claim(
                weight=draw(st.integers(1, 100)),
                served=draw(st.floats(0, 1e7)),
                most=draw(st.integers(1, ceiling)),
                ceiling=ceiling,
            )
        )
    return drawn


def claim(weight: int = 1, served: float = 0.0, most: int = 1000, ceiling: int = 1000) -> Claim:
    return Claim(weight=weight, served=served, most=most, ceiling=ceiling)


def divided(claims: list[Claim], idle: int, capacity: float = 1.0) -> list[int]:
    return fair_shares(claims, idle, capacity=capacity, horizon=5.0)


@given(held=claims(), idle=st.integers(0, 1000), capacity=st.floats(0.5, 256))
def test_shares_use_what_is_idle_and_never_more(held: list[Claim], idle: int, capacity: float) -> None:
    shares = divided(held, idle, capacity)
    assert all(0 <= share <= claim.ceiling for share, claim in zip(shares, held, strict=True))
    assert sum(shares) == min(idle, sum(claim.ceiling for claim in held))


@given(weights=st.lists(st.integers(1, 100), min_size=1, max_size=6), idle=st.integers(0, 1000))
def test_shares_of_jobs_with_equal_virtual_times_are_in_proportion_to_their_weights(
    weights: list[int], idle: int
) -> None:
    shares = divided([claim(weight, served=7.0) for weight in weights], idle)
    for share, weight in zip(shares, weights, strict=True):
        assert share == pytest.approx(idle * weight / sum(weights), abs=1)


def test_job_that_is_behind_gets_all_until_it_has_caught_up() -> None:
    assert divided([claim(served=10.0), claim(served=0.0)], 500) == [0, 500]
    # Within the horizon of 5 s: one share-second behind is 200 ‰ more.
    assert divided([claim(served=1.0), claim(served=0.0)], 500) == [150, 350]
    # On two processors one processor second is half as much of the device.
    assert divided([claim(served=1.0), claim(served=0.0)], 500, capacity=2.0) == [200, 300]


def test_all_that_is_idle_is_given_whatever_a_job_has_used() -> None:
    """A hundred days of share-seconds: the differences that are to be caught up with lose their last digits."""
    claims = [claim(most=133, ceiling=133), claim(10, served=2.0**23, most=143, ceiling=143), claim(most=2, ceiling=2)]
    assert sum(divided(claims, 273, capacity=0.5)) == 273


def test_what_a_job_cannot_use_goes_to_the_others() -> None:
    assert divided([claim(most=100, ceiling=100), claim(), claim()], 900) == [100, 400, 400]
    assert divided([claim(weight=9, most=50), claim()], 1000) == [50, 950]


def test_job_that_has_used_little_of_late_may_have_what_nobody_else_can_use() -> None:
    assert divided([claim(most=100)], 800) == [800]
    assert divided([claim(most=100), claim(most=100, ceiling=200)], 800) == [600, 200]


def test_virtual_time_is_that_of_the_job_with_least_of_those_that_could_use_more() -> None:
    held = [claim(served=5.0), claim(served=8.0), claim(served=0.0, most=50)]
    assert caught_up(held, 900, virtual=3.0) == 5.0
    # The one that could use no more has saved nothing up; the others keep what is theirs.
    assert [each.served for each in held] == [5.0, 8.0, 5.0]


def test_virtual_time_never_goes_back() -> None:
    assert caught_up([claim(served=1.0)], 500, virtual=3.0) == 3.0
    assert caught_up([], 500, virtual=3.0) == 3.0


def test_virtual_time_of_jobs_that_all_have_enough_is_the_least_of_all() -> None:
    held = [claim(served=5.0, most=100), claim(served=4.0, most=100)]
    assert caught_up(held, 900, virtual=3.0) == 4.0


@given(held=claims(), idle=st.integers(0, 1000), virtual=st.floats(0, 1e7))
def test_job_that_could_use_more_keeps_its_virtual_time(held: list[Claim], idle: int, virtual: float) -> None:
    before = [each.served for each in held]
    now = caught_up(held, idle, virtual)
    assert now >= virtual
    total = sum(each.weight for each in held)
    for each, served in zip(held, before, strict=True):
        assert each.served >= served
        if idle * each.weight / total > each.most + 1e-6:  # its part alone is more than it can use
            assert each.served >= now
        if each.most >= idle > 0 and len(held) > 1:
            assert each.served == served
