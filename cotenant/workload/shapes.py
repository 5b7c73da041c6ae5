"""Curves of load from papers. Their figures are pictures: what the text says is kept to the letter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotenant.workload.sources import Curve

_CORNERS = 48  # in a hill; between them the curve is straight, and less than 0.2 % of the peak off


def hills(low: float, peaks: Sequence[tuple[float, float, float]]) -> Curve:
    """A low rate, and hills that rise and fall like a cosine. peaks: (start, end, highest rate), in seconds."""
    points = [(0.0, low)]
    for start, end, peak in peaks:
        points += [
            (start + (end - start) * n / _CORNERS, low + (peak - low) * (1 - math.cos(math.tau * n / _CORNERS)) / 2)
            for n in range(_CORNERS + 1)
        ]
    return Curve(tuple(points))


def wave(low: float, high: float, period: float) -> Curve:
    """From low to high and back, like a cosine, for ever. period: seconds."""
    return Curve(hills(low, [(0.0, period, high)]).points, repeat=True)


def gpulet_waves(low: float, first: float, second: float) -> Curve:
    """gpulet, section 5 and Figure 15, for 3,200 s: up and down again until 1,200 s, and from 1,400 s a higher wave."""
    return hills(low, [(0.0, 1200.0, first), (1400.0, 3200.0, second)])


def hetsev_production(valley: float, spike: float = 4.0) -> Curve:
    """HetSev, section 6.1 and Figure 5, for 6,000 s: low load, and from 3,500 s a spike of so many times the valley.

    The text has the peak four times the valley, and rates of 200 to 1,000 a second; it does not say how long the spike
    lasts, nor how fast it rises: here it rises within 100 s and is over at 5,500 s.
    """
    high = valley * spike
    return Curve(((0, valley), (3500, valley), (3600, high), (5400, high), (5500, valley), (6000, valley)))


def hetsev_fluctuating(low: float, first: float, second: float) -> Curve:
    """HetSev, section 6.2 and Figure 6, for 2,500 s: up and down until 1,000 s, flat, from 1,200 s a higher wave."""
    return hills(low, [(0.0, 1000.0, first), (1200.0, 2500.0, second)])
