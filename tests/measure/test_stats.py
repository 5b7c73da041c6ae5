import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.request import Outcome, Request
from cotenant.measure.stats import Histogram, Tally

durations = st.floats(1e-6, 9e3)


@given(st.lists(durations, min_size=1, max_size=300), st.floats(0, 1))
def test_quantiles_are_within_one_percent_of_exact_ones(values: list[float], q: float) -> None:
    histogram = Histogram()
    histogram.extend(values)
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert histogram.quantile(q) == pytest.approx(exact, rel=0.01)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert (histogram.least, histogram.largest) == (min(values), max(values))


def test_many_values_arrive_in_pieces_and_count_the_same() -> None:
    values = np.random.default_rng(0).lognormal(-4, 1, 100_000)
    histogram = Histogram()
    for chunk in np.array_split(values, 999):
        histogram.extend(chunk.tolist())
    for q in (0.5, 0.99, 0.999):
        assert histogram.quantile(q) == pytest.approx(np.quantile(values, q, method="inverted_cdf"), rel=0.01)
    assert histogram.count == 100_000
    assert histogram.mean == pytest.approx(values.mean())


@pytest.mark.parametrize("value", [0.0, 1e-9, 5e4])
def test_what_lies_outside_the_buckets_is_exact_when_it_is_an_extreme(value: float) -> None:
    histogram = Histogram()
    histogram.extend([value])
    assert histogram.quantile(0.0) == histogram.quantile(1.0) == value


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert math.isnan(Histogram().mean)
    assert math.isnan(Tally().attainment)


ends = st.tuples(st.sampled_from(Outcome), st.floats(0, 10), st.floats(1e-3, 1), st.floats(1e-3, 2))


@given(st.lists(ends, max_size=100))
def test_a_tally_equals_a_naive_count(cases: list[tuple[Outcome, float, float, float]]) -> None:
    tally = Tally()
    for outcome, arrived, slo, took in cases:
        tally.ended((Request(0, "m", arrived, arrived + slo),), outcome, arrived + took)
    served = [case for case in cases if case[0] is Outcome.SERVED]
    on_time = sum(arrived + took <= arrived + slo for _, arrived, slo, took in served)
    stayed = sum(outcome is not Outcome.CANCELLED for outcome, *_ in cases)
    assert tally.arrived == len(cases)
    assert tally.served == len(served)
    assert tally.on_time == on_time
    assert tally.outcomes == {
        outcome: sum(case[0] is outcome for case in cases) for outcome in Outcome if outcome is not Outcome.SERVED
    }
    if stayed:
        assert tally.attainment == on_time / stayed
