import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.measure.histogram import Histogram

durations = st.floats(1e-6, 9e3)


@given(st.lists(durations, min_size=1, max_size=300), st.floats(0, 1))
def test_histogram_any_values_gives_quantiles_within_one_percent(values: list[float], q: float) -> None:
    histogram = Histogram()
    histogram.extend(values)
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert histogram.quantile(q) == pytest.approx(exact, rel=0.01)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert (histogram.least, histogram.largest) == (min(values), max(values))


def test_histogram_values_in_pieces_count_the_same() -> None:
    values = np.random.default_rng(0).lognormal(-4, 1, 100_000)
    histogram = Histogram()
    for chunk in np.array_split(values, 999):
        histogram.extend(chunk.tolist())
    for q in (0.5, 0.99, 0.999):
        assert histogram.quantile(q) == pytest.approx(np.quantile(values, q, method="inverted_cdf"), rel=0.01)
    assert histogram.count == 100_000
    assert histogram.mean == pytest.approx(values.mean())


@pytest.mark.parametrize("value", [0.0, 1e-9, 5e4])
def test_histogram_extreme_outside_the_buckets_is_exact(value: float) -> None:
    histogram = Histogram()
    histogram.extend([value])
    assert histogram.quantile(0.0) == histogram.quantile(1.0) == value


def test_histogram_quantile_of_all_is_the_largest_also_outside_the_buckets() -> None:
    histogram = Histogram()
    histogram.extend([1.0, 2e4, 5e4])
    assert histogram.quantile(1.0) == 5e4


def test_histogram_without_values_has_no_quantile() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert math.isnan(Histogram().mean)
    assert Histogram().cumulative([0.0, 1.0]) == [0, 0]


def test_histogram_total_and_extremes_count_what_is_pending() -> None:
    histogram = Histogram()
    histogram.extend([2.0, 1.0])
    assert (histogram.total, histogram.least, histogram.largest) == (3.0, 1.0, 2.0)
    histogram.extend([5.0])
    assert (histogram.total, histogram.least, histogram.largest) == (8.0, 1.0, 5.0)


@given(st.lists(durations, max_size=300), st.lists(durations, min_size=1, max_size=5))
def test_histogram_cumulative_counts_meet_bounds_within_one_percent(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram()
    histogram.extend(values)
    for bound, count in zip(bounds, histogram.cumulative(bounds), strict=True):
        assert (
            sum(value <= bound / 1.0101 for value in values) <= count <= sum(value < bound * 1.0101 for value in values)
        )
