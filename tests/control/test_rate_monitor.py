"""How a rate is estimated from counts, and when it is said to have changed."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.control.rate_monitor import RateEstimate, RateMonitor, RateOptions, log_likelihood_ratio

PERIOD = 0.5


def observe(monitor: RateMonitor, rate: float, seconds: float, seed: int = 0, burst: int = 1) -> list[RateEstimate]:
    """Poisson arrivals of bursts of that many requests."""
    rng = np.random.default_rng(seed)
    counts = burst * rng.poisson(rate * PERIOD / burst, round(seconds / PERIOD))
    return [monitor.observe(int(count), PERIOD) for count in counts]


@pytest.mark.parametrize("rate", [2.0, 20.0, 200.0])
def test_constant_rate_is_averaged_over_the_horizon(rate: float) -> None:
    for seed in range(5):
        estimates = observe(RateMonitor(), rate, 1200, seed)[240:]
        assert np.mean([abs(each.rate - rate) < 4 * np.sqrt(rate / 120) for each in estimates]) > 0.95
        assert np.mean([each.seconds > 60 for each in estimates]) > 0.95
        assert not any(each.exceeds(1.2 * rate, 10.0) for each in estimates)


@pytest.mark.parametrize(("rate", "within"), [(20.0, 5.0), (200.0, 1.0)])
def test_step_is_seen_within_some_dozens_of_requests(rate: float, within: float) -> None:
    for seed in range(10):
        monitor = RateMonitor()
        observe(monitor, rate, 60, seed)
        estimates = observe(monitor, 2 * rate, within, seed + 100)
        assert estimates[-1].before == pytest.approx(rate, rel=0.25)
        assert estimates[-1].rate == pytest.approx(2 * rate, rel=0.25)
        assert estimates[-1].exceeds(1.02 * rate, 2.0)


@pytest.mark.parametrize("rate", [5.0, 50.0])
def test_poisson_arrivals_are_no_bursts_and_neither_is_a_step(rate: float) -> None:
    """A dispersion that a step itself has brought about would hide the step."""
    for seed in range(10):
        monitor = RateMonitor()
        estimates = observe(monitor, rate, 120, seed) + observe(monitor, 2 * rate, 20, seed + 100)
        assert np.mean([each.dispersion == 1.0 for each in estimates]) > 0.9


def test_step_is_proven_at_whatever_moment_it_comes() -> None:
    """Within a time that does not depend on the lengths of interval that happen to be compared."""
    seen = []
    for seed in range(40):
        monitor = RateMonitor()
        observe(monitor, 50.0, 30 + seed / 2, seed)
        estimates = observe(monitor, 100.0, 5, seed + 100)
        seen.append(next(n for n, each in enumerate(estimates, 1) if each.rose(15.0)) * PERIOD)
    assert np.mean(seen) < 1.3 and max(seen) <= 2.5


def test_rate_that_is_back_after_a_lull_has_not_risen() -> None:
    """Of a lull of some seconds little is known: that the rate is higher than then is no proof."""
    for seed in range(10):
        monitor = RateMonitor()
        observe(monitor, 20.0, 60, seed)
        assert observe(monitor, 1.0, 4, seed + 100)[-1].before == pytest.approx(20.0, rel=0.25)
        back = observe(monitor, 20.0, 30, seed + 200)
        assert any(each.exceeds(1.25 * 5.0, 20.0) for each in back)
        assert not any(each.rose(12.0) for each in back)


def test_rate_that_few_intervals_are_known_of_has_not_surely_risen() -> None:
    assert not RateEstimate(20.0, 2.0, 1.0, before=5.0, before_seconds=1.0).rose(12.0)
    assert RateEstimate(20.0, 2.0, 1.0, before=5.0, before_seconds=60.0).rose(12.0)
    assert not RateEstimate(20.0, 2.0, 1.0, before=5.0, before_seconds=60.0).rose(12.0, least=15.0)
    assert not RateEstimate(20.0, 2.0, 1.0).rose(0.0)
    assert not RateEstimate(5.0, 20.0, 1.0, before=20.0, before_seconds=60.0).rose(0.0)


def test_end_of_traffic_is_seen() -> None:
    monitor = RateMonitor()
    observe(monitor, 50.0, 60)
    assert observe(monitor, 0.0, 2)[-1].rate == 0.0


def test_bursts_are_no_change_of_rate() -> None:
    """With bursts of 20 taken for single requests, chance alone would be taken for changes again and again."""
    estimates = observe(RateMonitor(), 40.0, 1800, burst=20)[240:]
    assert all(each.dispersion > 5 for each in estimates)
    assert all(not each.exceeds(1.25 * 40.0, 2.0) for each in estimates)
    ignorant = RateMonitor(RateOptions(dispersion_intervals=2))  # too few to notice bursts
    assert any(each.exceeds(1.25 * 40.0, 2.0) for each in observe(ignorant, 40.0, 1800, burst=20)[240:])


def test_change_is_forgotten_after_the_horizon() -> None:
    monitor = RateMonitor(RateOptions(horizon=20.0))
    observe(monitor, 100.0, 20)
    assert observe(monitor, 200.0, 5)[-1].before == pytest.approx(100.0, rel=0.1)
    assert observe(monitor, 200.0, 25)[-1].before is None


def test_estimate_knows_its_deviation() -> None:
    assert RateEstimate(100.0, 4.0, 1.0).deviation == pytest.approx(5.0)
    assert RateEstimate(100.0, 4.0, 4.0).deviation == pytest.approx(10.0)
    assert RateEstimate(0.0, 0.0, 1.0).deviation == 0.0


def test_likelihood_ratio_is_least_at_what_is_expected() -> None:
    assert log_likelihood_ratio(10, 10) == 0.0
    assert log_likelihood_ratio(0, 3) == 3.0
    assert log_likelihood_ratio(12, 10) == pytest.approx(12 * np.log(1.2) - 2)
    assert log_likelihood_ratio(1, 0) == np.inf
