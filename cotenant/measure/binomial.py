"""Test by the binomial distribution whether chance explains how many requests missed their targets."""

from __future__ import annotations

import numpy as np

CHANCE = 0.05


def consistent_with_rate(missed: int, of: int, rate: float, chance: float = CHANCE) -> bool:
    """Return whether chance explains that many misses at an allowed rate: misses at exactly that rate would be as many
    with a probability above `chance`."""
    return rate > 0 and binomial_cdf(missed - 1, of, rate) < 1 - chance


def max_misses(of: int, rate: float, chance: float = CHANCE) -> int:
    """Return the largest number of misses that chance explains."""
    few, many = -1, of + 1  # `few` is explained, `many` is not
    while many - few > 1:
        middle = (few + many) // 2
        if middle <= of * rate or consistent_with_rate(middle, of, rate, chance):
            few = middle
        else:
            many = middle
    return few


def binomial_cdf(hits: int, tries: int, rate: float) -> float:
    """Return the probability of at most that many hits in independent tries with a hit rate."""
    if hits < 0:
        return 0.0
    if hits >= tries or rate <= 0:
        return 1.0
    if rate >= 1:
        return 0.0
    n = np.arange(1, hits + 1)
    # From one number of hits to the next the probability grows by (tries - n + 1) / n * rate / (1 - rate).
    steps = np.log((tries + 1 - n) / n) + np.log(rate / (1 - rate))
    logs = np.concatenate(([0.0], np.cumsum(steps))) + tries * np.log1p(-rate)
    return min(1.0, float(np.exp(logs).sum()))
