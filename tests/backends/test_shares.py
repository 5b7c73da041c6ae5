"""Shares of the processor hold under real work, as seen from outside.

Slow: each case runs a real worker for four seconds. What other programs on the machine take is no fault of the worker:
the time in which it could run and had no processor counts in its favour, but never against its upper limit.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.shares import Measured, measure

POINTS = 3.0  # percent of the device
SECONDS = 4.0
TRIES = 3  # a virtual machine loses time to others that it cannot see

pytestmark = pytest.mark.slow


def deviation(measured: Measured) -> float:
    """Percent of the device by which a worker used more than its share, or less although processors were free."""
    over = measured.used_share - measured.share
    return max(over, -over - measured.waited_share)


def check_used_shares(shares: list[tuple[int, int]]) -> None:
    """Measure lanes of these shares (‰) and batches, and compare the best of a few tries with the shares."""
    for _ in range(TRIES):
        lanes = asyncio.run(measure(shares, SECONDS))
        if all(abs(lane.used_share - lane.share) <= POINTS for lane in lanes):
            return
    assert max(map(deviation, lanes)) <= POINTS, lanes
    waited = max(lane.waited_share for lane in lanes)
    pytest.skip(f"no worker exceeded its share; other programs took up to {waited:.0f} % of the device")


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("share", [200, 400, 600, 800])
def test_used_share_alone_is_the_share(share: int, batch: int) -> None:
    check_used_shares([(share, batch)])


@pytest.mark.parametrize("share", [200, 400, 600, 800])
def test_used_share_beside_a_busy_lane_is_the_share(share: int) -> None:
    check_used_shares([(share, 8), (1000 - share, 32)])
