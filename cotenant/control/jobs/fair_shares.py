"""Divide what is idle on a device among its jobs, so that each gets share-seconds in proportion to its weight.

Start-time fair queueing (Goyal, Vin and Cheng, 1997) with rates in place of packets. A job's *virtual time* is its
share-seconds over its weight. Shares are chosen to bring all virtual times to one level within `horizon` seconds: equal
ones get shares in proportion to their weights, and a job whose long step took more than its share waits until the
others have caught up. A job that cannot use its part saves nothing up: its virtual time is at least the device's, which
is that of the job with least among those who could use more.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ROUNDING = 1e-6  # of sums of shares, in ‰


class Claim(msgspec.Struct, kw_only=True):
    """Hold a job's claim on its device. served: its virtual time, in share-seconds per weight. most: the share, in ‰,
    that it can use; ceiling: that it can use as far as its threads go, whatever it has used of late."""

    weight: int
    served: float = 0.0
    most: int
    ceiling: int


def caught_up(claims: Sequence[Claim], idle: int, virtual: float) -> float:
    """Return the device's virtual time now, at least what it was, and raise that of jobs that could not use their part
    to it. Where all are such, it is the least of all."""
    parts = _filled([float(claim.weight) for claim in claims], [0.0] * len(claims), [c.most for c in claims], idle)
    hungry = [claim.served for claim, part in zip(claims, parts, strict=True) if part < claim.most]
    virtual = max(virtual, min(hungry or [claim.served for claim in claims], default=virtual))
    for claim, part in zip(claims, parts, strict=True):
        if part >= claim.most:
            claim.served = max(claim.served, virtual)
    return virtual


def fair_shares(claims: Sequence[Claim], idle: int, *, capacity: float, horizon: float) -> list[int]:
    """Return the share of each claim in ‰; together they are at most `idle`, and all of it where claims can use it.

    capacity: share-seconds that the whole device gives in a second. horizon: seconds.
    """
    scale = 1000.0 / (capacity * horizon)  # from share-seconds to be caught up with within the horizon to ‰
    first = min((claim.served for claim in claims), default=0.0)
    starts = [scale * claim.weight * (claim.served - first) for claim in claims]
    weights = [scale * claim.weight for claim in claims]
    shares = _filled(weights, starts, [float(claim.most) for claim in claims], idle)
    left = idle - sum(shares)
    if left > ROUNDING:  # nobody has used so much of late; whoever can now, may
        rooms = [claim.ceiling - share for claim, share in zip(claims, shares, strict=True)]
        more = _filled([float(claim.weight) for claim in claims], [0.0] * len(claims), rooms, left)
        shares = [share + extra for share, extra in zip(shares, more, strict=True)]
    return _rounded(shares, [claim.ceiling for claim in claims])


def _filled(weights: Sequence[float], starts: Sequence[float], most: Sequence[float], total: float) -> list[float]:
    """Return `level * weight - start` of each, between 0 and most (water-filling), with the level at which their sum is
    the total, or what all can take."""
    total = min(total, sum(most))
    levels = sorted(  # between two of these the sum is linear
        level
        for weight, start, limit in zip(weights, starts, most, strict=True)
        for level in (start / weight, (start + limit) / weight)
    )

    def filled(level: float) -> list[float]:
        return [
            min(max(level * weight - start, 0.0), limit)
            for weight, start, limit in zip(weights, starts, most, strict=True)
        ]

    below, under = 0.0, 0.0
    for level in levels:
        reached = sum(filled(level))
        if reached >= total:
            between = (total - under) / (reached - under) if reached > under else 1.0
            return filled(below + (level - below) * between)
        below, under = level, reached
    return list(most)


def _rounded(shares: Sequence[float], most: Sequence[int]) -> list[int]:
    """Round so that the sum is at most what it was and no share above its limit: those with the largest fractions
    up."""
    rounded = [int(share + ROUNDING) for share in shares]
    left = int(sum(shares) + ROUNDING) - sum(rounded)
    for place in sorted(range(len(shares)), key=lambda place: rounded[place] - shares[place]):
        if left > 0 and rounded[place] < most[place]:
            rounded[place] += 1
            left -= 1
    return rounded
