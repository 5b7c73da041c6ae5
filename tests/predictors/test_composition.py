from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.predictors import Load
from cotenant.predictors.composition import EFFECT, MEAN_EXCESS, NOISE, Excess, MeasuredSet, composed, waiting

A, B, C, D = (Load(name, "k", 4, 500) for name in "abcd")


def test_composed_adds_what_each_load_costs_beyond_the_baseline() -> None:
    total, elasticities = composed(1.0, [1.5, 2.0])
    assert total == 2.5
    assert elasticities == [1.5 / 2.5, 2.0 / 2.5]


def test_composed_counts_an_error_of_the_latency_alone_once() -> None:
    """Ten of ten slowdowns three times too high is a latency alone a third of what it should be."""
    right, _ = composed(1.0, [1.0, 1.5, 2.0])
    wrong, _ = composed(3.0, [3.0, 4.5, 6.0])
    assert wrong == pytest.approx(3 * right)


def test_composed_takes_no_load_for_faster_than_the_baseline() -> None:
    assert composed(1.2, [1.1, 1.5])[0] == pytest.approx(1.5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=6))
def test_composed_slowdowns_of_time_sliced_loads_keep_the_total_throughput(work: list[float]) -> None:
    """Each load waits for one kernel of each other between two of its own: so it is with two, and with all of them."""
    slowdowns = [
        composed(1.0, [1 + other / own for j, other in enumerate(work) if j != i])[0] for i, own in enumerate(work)
    ]
    assert sum(1 / slowdown for slowdown in slowdowns) == pytest.approx(1)


def test_waiting_is_none_beside_loads_that_do_not_interfere() -> None:
    assert waiting(1.2, 1.2) == 0.0
    assert waiting(1.0, 1.0 - 1e-12) == 0.0  # rounding
    assert 0 < waiting(1.0, 1.5) < waiting(1.0, 3.0)


def test_mean_excess_grows_with_the_set_and_learnt_effects_do_not() -> None:
    none, learnt = Excess([]), Excess([MeasuredSet(A, [B, C], 1.0, MEAN_EXCESS + 0.3)] * 20)
    assert none.of(A, [B])[0] == 0.0
    assert none.of(A, [B, C])[0] < none.of(A, [B, C, D])[0]
    gained = [learnt.of(A, others)[0] - none.of(A, others)[0] for others in ([B, C], [B, C, B, C])]
    assert gained[0] == pytest.approx(gained[1]) == pytest.approx(0.3, abs=0.05)


def test_excess_without_sets_is_the_prior() -> None:
    mean, variance = Excess([]).of(A, [B, C])
    assert mean == MEAN_EXCESS
    # All, the victim's model and load, and two co-located models and loads with a half each.
    assert variance == pytest.approx(NOISE**2 + EFFECT**2 * (3 + 4 / 4))


def test_excess_learns_effects_of_victims_and_of_colocated_loads() -> None:
    effect = {"a": 0.3, "b": 0.0, "c": -0.1, "d": -0.2}
    sets = [
        MeasuredSet(one, others, 1.0, MEAN_EXCESS + effect[one.model])
        for one in (A, B, C, D)
        for others in itertools.combinations([load for load in (A, B, C, D) if load != one], 2)
        for _ in range(10)
    ]
    learnt = Excess(sets)
    assert learnt.of(A, [B, C])[0] == pytest.approx(MEAN_EXCESS + 0.3, abs=0.08)
    assert learnt.of(D, [B, C])[0] == pytest.approx(MEAN_EXCESS - 0.2, abs=0.08)
    new = Load("e", "k", 1, 500)
    assert learnt.of(A, [B, C])[1] < learnt.of(new, [B, C])[1] < Excess([]).of(new, [B, C])[1]


def test_excess_leave_out_errors_are_those_without_the_set() -> None:
    rng = np.random.default_rng(0)
    sets = [
        MeasuredSet(one, others, waits, waits * float(rng.normal(0.2, 0.2)))
        for one in (A, B, C)
        for others in (*itertools.combinations((A, B, C, D), 2), *itertools.combinations((A, B, C, D), 3))
        for waits in (0.3, 0.9)
    ]
    learnt = Excess(sets)
    for i, left_out in enumerate(sets):
        mean, variance = Excess(sets[:i] + sets[i + 1 :]).of(left_out.victim, left_out.colocated)
        assert learnt.leave_out_errors[i] == pytest.approx(left_out.excess - left_out.waiting * mean)
        assert math.sqrt(learnt.leave_out_variances[i]) == pytest.approx(left_out.waiting * math.sqrt(variance))
