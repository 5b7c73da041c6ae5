"""Shares of the processor hold under real work, as seen from outside. Other work on the machine disturbs this."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.shares import Measured, measure

POINTS = 3.0  # percent of the device
TRIES = 3

pytestmark = pytest.mark.slow


def held(shares: list[tuple[int, int]]) -> list[Measured]:
    """Of a few measurements the best: what a worker does not get, because others have the core, is no fault of it."""
    tries = []
    for _ in range(TRIES):
        measured = asyncio.run(measure(shares, 4.0))
        tries.append(measured)
        if all(abs(it.used_share - it.share) <= POINTS for it in measured):
            break
    return min(tries, key=lambda measured: max(abs(it.used_share - it.share) for it in measured))


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("share", [200, 400, 600, 800])
def test_alone(share: int, batch: int) -> None:
    (it,) = held([(share, batch)])
    assert it.used_share == pytest.approx(share / 10, abs=POINTS)


@pytest.mark.parametrize("share", [200, 400, 600, 800])
def test_beside_a_greedy_neighbour(share: int) -> None:
    for it in held([(share, 8), (1000 - share, 32)]):
        assert it.used_share == pytest.approx(it.share, abs=POINTS)
