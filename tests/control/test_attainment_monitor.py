"""When an SLO is said to be missed."""

from __future__ import annotations

import numpy as np

from cotenant.control.attainment_monitor import LEAST, AttainmentMonitor


def test_slo_that_is_just_kept_is_not_missed_by_chance() -> None:
    rng = np.random.default_rng(0)
    monitor = AttainmentMonitor()
    for _ in range(20_000):
        monitor.observe(20, int(rng.binomial(20, 0.99)))
        assert not monitor.missed(0.99)
    assert monitor.value is not None
    assert abs(monitor.value - 0.99) < 0.01


def test_missed_slo_is_noticed() -> None:
    monitor = AttainmentMonitor()
    for _ in range(50):
        monitor.observe(20, 19)
    assert monitor.missed(0.99)
    assert not monitor.missed(0.94)


def test_misses_that_come_together_now_and_then_are_chance() -> None:
    """A queue that is long for a moment makes all in it late: 24 requests in a second, once in 400 s."""
    monitor = AttainmentMonitor()
    for second in range(830):
        monitor.observe(12, 0 if second % 400 == 30 else 12)
        monitor.observe(12, 0 if second % 400 == 30 else 12)
        assert not monitor.missed(0.99)


def test_slo_that_is_missed_all_the_time_is_noticed_within_seconds() -> None:
    monitor = AttainmentMonitor()
    for _ in range(1000):
        monitor.observe(50, 50)
    for _ in range(10):
        monitor.observe(50, 10)
    assert monitor.missed(0.99)


def test_slo_of_many_requests_that_is_missed_by_little_is_noticed() -> None:
    """What few intervals hold of them would all be taken for misses that come together."""
    rng = np.random.default_rng(0)
    monitor = AttainmentMonitor()
    for _ in range(200):
        monitor.observe(200, int(rng.binomial(200, 0.99)))
        assert not monitor.missed(0.99)
    for _ in range(60):
        monitor.observe(200, int(rng.binomial(200, 0.96)))
    assert monitor.missed(0.99)


def test_few_requests_say_nothing() -> None:
    monitor = AttainmentMonitor()
    assert monitor.value is None
    for _ in range(int(LEAST) - 1):
        monitor.observe(1, 0)
        assert not monitor.missed(0.99)
    monitor.observe(5, 0)
    assert monitor.missed(0.99)


def test_reset_forgets_all_requests() -> None:
    monitor = AttainmentMonitor()
    monitor.observe(1000, 0)
    monitor.reset()
    assert monitor.value is None
    assert not monitor.missed(0.99)
