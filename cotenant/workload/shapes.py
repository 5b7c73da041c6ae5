"""Generate load curves from papers. Their figures are pictures: what the text specifies is followed exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.workload.sources import Curve

_CORNERS = 48  # points of a hill; linear between them, with an error below 0.2 % of the peak


def hills(low: float, peaks: Sequence[tuple[float, float, float]]) -> Curve:
    """Return a low rate with hills that rise and fall like a cosine.

    peaks: (start, end, highest rate), times in seconds.
    """
    points = [(0.0, low)]
    for start, end, peak in peaks:
        points += [
            (start + (end - start) * n / _CORNERS, low + (peak - low) * (1 - math.cos(math.tau * n / _CORNERS)) / 2)
            for n in range(_CORNERS + 1)
        ]
    return Curve(tuple(points))


def wave(low: float, high: float, period: float) -> Curve:
    """Return a rate that oscillates between low and high like a cosine, endlessly. period: seconds."""
    return Curve(hills(low, [(0.0, period, high)]).points, repeat=True)


def gpulet_waves(low: float, first: float, second: float) -> Curve:
    """Return gpulet's load (section 5 and Figure 15) for 3,200 s.

    It rises and falls until 1,200 s, and from 1,400 s in a higher wave.
    """
    return hills(low, [(0.0, 1200.0, first), (1400.0, 3200.0, second)])


def hetsev_production(valley: float, spike: float = 4.0) -> Curve:
    """Return HetSev's production load (section 6.1 and Figure 5) for 6,000 s: low, with a spike from 3,500 s.

    In the text the peak is four times the valley, with rates of 200 to 1,000 requests/s. It gives neither the length of
    the spike nor how fast it rises: here it rises within 100 s and is over at 5,500 s.
    """
    high = valley * spike
    return Curve(((0, valley), (3500, valley), (3600, high), (5400, high), (5500, valley), (6000, valley)))


def hetsev_fluctuating(low: float, first: float, second: float) -> Curve:
    """Return HetSev's fluctuating load (section 6.2 and Figure 6) for 2,500 s.

    It rises and falls until 1,000 s, stays flat, and from 1,200 s forms a higher wave.
    """
    return hills(low, [(0.0, 1000.0, first), (1200.0, 2500.0, second)])
