"""Equation 2 and Algorithm 1 of InSS."""

from __future__ import annotations

import msgspec
import pytest

from cotenant.planners.inss.batch_decision import DEFAULT_BATCH, decide_batches, longest_latency
from cotenant.planners.inss.cluster import Cluster, Provisioning
from tests.planners.inss.cases import two_devices
from tests.planners.problems import MIB, ProportionalInterference


def test_longest_latency_of_an_empty_queue_waits_for_the_batch_to_fill() -> None:
    """Equation 2, second case: seven more requests at 100/s take 70 ms, and the batch 20."""
    assert longest_latency(8, 0.020, 100.0, 0) == pytest.approx(0.090)


def test_longest_latency_of_a_batch_that_fills_fast_waits_for_the_one_in_flight() -> None:
    assert longest_latency(2, 0.020, 1000.0, 0) == pytest.approx(0.040)


def test_longest_latency_behind_a_queue_waits_for_all_batches_before() -> None:
    """Equation 2, first case: eleven requests wait, so that the next is in the third batch of four."""
    assert longest_latency(4, 0.020, 1000.0, 11) == pytest.approx(0.080)


def test_longest_latency_of_an_unasked_model_is_two_batches() -> None:
    assert longest_latency(1, 0.020, 0.0, 0) == pytest.approx(0.040)


def decided(rate: float, share: int = 1000, slo: float = 0.1, queued: float = 0.0) -> tuple[int, bool]:
    cluster = Cluster.of(two_devices(rates=(rate,), slo=slo))
    made = decide_batches(cluster, Provisioning((0,), (share,)), [rate], [queued])
    return made.batches[0], made.feasible[0]


def exhaustive(rate: float, share: int, slo: float) -> int:
    """Return the largest batch that meets all constraints, by trying all; 0 for none."""
    cluster = Cluster.of(two_devices(rates=(rate,), slo=slo))
    curve = cluster.curve(0, 0, share)
    fits = [
        b for b, seconds in enumerate(curve, 1) if longest_latency(b, seconds, rate, 0) <= slo and b / seconds >= rate
    ]
    return max(fits, default=0)


@pytest.mark.parametrize("share", [300, 500, 1000])
@pytest.mark.parametrize("slo", [0.03, 0.06, 0.1])
@pytest.mark.parametrize("rate", [20.0, 60.0, 150.0])
def test_algorithm_1_finds_the_largest_batch_where_its_search_does_not_break_off(
    rate: float, slo: float, share: int
) -> None:
    """Throughput and latency grow with the batch, so a binary search is enough, but for line 10."""
    batch, feasible = decided(rate, share, slo)
    largest = exhaustive(rate, share, slo)
    assert (batch if feasible else 0) in (largest, 0)
    if feasible:
        assert batch == largest


def test_algorithm_1_breaks_off_where_a_smaller_batch_sustains_too_little() -> None:
    """Line 10: 16 rows take too long, 8 sustain too little, and 12, which would do, is never tried."""
    rate, slo = 420.0, 0.058
    assert exhaustive(rate, 500, slo) == 12
    assert decided(rate, 500, slo) == (DEFAULT_BATCH, False)


def test_algorithm_1_without_a_batch_in_time_is_infeasible() -> None:
    assert decided(10.0, 100, 0.05) == (DEFAULT_BATCH, False)


def test_queue_that_no_batch_clears_in_time_is_infeasible() -> None:
    assert decided(100.0, queued=10)[1]
    assert decided(100.0, queued=400) == (DEFAULT_BATCH, False)


def test_memory_limits_batches_of_the_models_of_a_device_together() -> None:
    problem = two_devices(rates=(100.0, 50.0), memory=7 * MIB)
    cluster = Cluster.of(problem)
    together = decide_batches(cluster, Provisioning((0, 0), (500, 500)), [100.0, 50.0], [0, 0])
    apart = decide_batches(cluster, Provisioning((0, 1), (500, 500)), [100.0, 50.0], [0, 0])
    assert together.feasible == (False, False)
    assert apart.feasible == (True, True)


def test_colocated_models_are_assumed_to_run_batches_of_four() -> None:
    """A share of 50 % with a batch of 4 slows by 1 + 0.1 · 0.5 · (1 + 4 / 32)."""
    problem = msgspec.structs.replace(two_devices(slo=0.05), interference=ProportionalInterference(0.1))
    cluster = Cluster.of(problem)
    where = Provisioning((0, 0), (500, 500))
    (batch, _) = decide_batches(cluster, where, [100.0, 50.0], [0, 0]).batches
    slow = 1 + 0.1 * 0.5 * (1 + 4 / 32)
    curve = [seconds * slow for seconds in cluster.curve(0, 0, 500)]
    fits = [b for b, seconds in enumerate(curve, 1) if longest_latency(b, seconds, 100.0, 0) <= 0.05]
    assert batch == max(fits)
