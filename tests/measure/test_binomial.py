from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.measure.binomial import binomial_cdf, consistent_with_rate, max_misses


@given(hits=st.integers(-1, 40), tries=st.integers(0, 40), rate=st.floats(0.001, 0.999))
@settings(max_examples=100, deadline=None)
def test_binomial_cdf_of_any_arguments_equals_the_sum(hits: int, tries: int, rate: float) -> None:
    summed = math.fsum(math.comb(tries, n) * rate**n * (1 - rate) ** (tries - n) for n in range(min(hits, tries) + 1))
    assert binomial_cdf(hits, tries, rate) == pytest.approx(summed, abs=1e-9)


def test_binomial_cdf_of_many_trials_is_accurate() -> None:
    assert binomial_cdf(1000, 100_000, 0.01) == pytest.approx(0.5, abs=0.02)
    assert binomial_cdf(1100, 100_000, 0.01) == pytest.approx(0.9992, abs=3e-4)
    assert binomial_cdf(50_000, 100_000, 0.9) == 0.0


def test_binomial_cdf_of_rate_zero_is_one() -> None:
    assert binomial_cdf(0, 10, 0.0) == 1.0


def test_binomial_cdf_of_rate_one_is_certain() -> None:
    assert binomial_cdf(9, 10, 1.0) == 0.0
    assert binomial_cdf(10, 10, 1.0) == 1.0
    assert consistent_with_rate(10, 10, 1.0)


def test_max_misses_few_requests_allow_what_chance_makes_of_the_rate() -> None:
    """Of 20 at 5 %: 3 or more are missed in 7.5 % of runs, 4 or more in 1.6 %."""
    assert max_misses(20, 0.05) == 3
    assert [consistent_with_rate(missed, 20, 0.05) for missed in (3, 4)] == [True, False]


def test_max_misses_rate_of_zero_allows_none() -> None:
    assert max_misses(20, 0.0) == 0
    assert not consistent_with_rate(0, 20, 0.0)
