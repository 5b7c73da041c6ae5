"""Compute rates and batches as the published program does, in 32-bit floats."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache

LARGEST_BATCH = 32

_FLOAT = struct.Struct("f")


def f32(x: float) -> float:
    """Round to the nearest 32-bit float."""
    value: float = _FLOAT.unpack(_FLOAT.pack(x))[0]
    return value


@cache
def planned_rate(rate: int) -> int:
    """Return the rate to plan for, in requests/s: about the 99th percentile of a Poisson count (1.2, not in the paper).

    The program's sum omits zero arrivals, and it returns the count after the one that reaches 99 %. Up to 4 requests/s
    the other counts never sum to 99 % and the program would loop forever; the rate, which it would ignore anyway, is
    returned unchanged.
    """
    if rate > 550:
        return int(1.1 * rate)
    if math.exp(-rate) >= 0.01:
        return rate
    count, total = 0, 0.0
    while total < 0.99:
        count += 1
        total += math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))
    return count + 1


def largest_batch(feasible: Callable[[int], bool]) -> int:
    """Search for the largest feasible batch by bisection; 0 if there is none (1.5).

    The program stops when both ends differ by one, so the result is at most 31, never 32.
    """
    low, high = 1, LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        if feasible(middle):
            low = middle
        else:
            high = middle
    return low if low > 1 or feasible(1) else 0


def saturated_batch(curve: Sequence[float], slo: int) -> tuple[int, float]:
    """Return the largest batch that takes at most half the SLO (at least 1), and its throughput in requests/s (1.5)."""
    batch = largest_batch(lambda batch: f32(2 * curve[batch]) <= slo) or 1
    return batch, f32(1000 * batch / curve[batch])


def residual_batch(curve: Sequence[float], slo: int, rate: int) -> tuple[int, int]:
    """Return the largest batch that can be gathered at that rate and served within the SLO, or 0; and the rate (1.5).

    If the time between two requests already exceeds the SLO, the program serves batches of one and raises the rate.
    """
    batch = largest_batch(lambda batch: f32(curve[batch] + f32(1000 * batch / rate)) <= slo)
    if not batch and curve[1] < f32(1000 / rate) and curve[1] < slo:
        return 1, int(1000 / (slo - curve[1]) * 1.1)
    return batch, rate
