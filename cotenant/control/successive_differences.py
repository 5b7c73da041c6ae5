"""Estimate the variance of counts from the differences between successive ones, on which a change of level has little
influence (von Neumann et al., "The Mean Square Successive Difference", Annals of Mathematical Statistics, 1941)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class SuccessiveDifferences:
    """Hold the latest `most` values, at least 2, and the squares of their differences in order: an observation of many
    models must not sort them anew."""

    def __init__(self, most: int) -> None:
        self.values: deque[float] = deque(maxlen=most)
        self._squares: list[float] = []  # ascending

    def append(self, value: float) -> None:
        """Take the next value, and forget the oldest where there are more than `most`."""
        values, squares = self.values, self._squares
        if len(values) == values.maxlen:
            del squares[bisect_left(squares, (values[1] - values[0]) ** 2)]
        if values:
            insort(squares, (value - values[-1]) ** 2)
        values.append(value)

    def variance(self, steps: int) -> float:
        """Return half the mean square of the differences without the largest `steps`, which steps of the level may have
        made; there have to be more."""
        kept = self._squares[: len(self._squares) - steps]
        return sum(kept) / len(kept) / 2
