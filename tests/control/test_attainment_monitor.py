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


def test_few_requests_say_nothing() -> None:
    monitor = AttainmentMonitor()
    assert monitor.value is None
    monitor.observe(int(LEAST) - 1, 0)
    assert not monitor.missed(0.99)
    monitor.observe(2, 0)
    assert monitor.missed(0.99)


def test_reset_forgets_all_requests() -> None:
    monitor = AttainmentMonitor()
    monitor.observe(1000, 0)
    monitor.reset()
    assert monitor.value is None
    assert not monitor.missed(0.99)
