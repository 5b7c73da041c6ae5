"""When batches are said to take longer than predicted."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.control.adaptation import BatchLatency
from cotenant.control.slowdown_monitor import SlowdownMonitor

PERIOD = 0.5


def observe(monitor: SlowdownMonitor, ratio: float, seconds: float, per_second: float = 40.0, cv: float = 0.0) -> None:
    rng = np.random.default_rng(0)
    for _ in range(round(seconds / PERIOD)):
        count = round(per_second * PERIOD)
        took = 0.01 * ratio * np.maximum(rng.normal(1.0, cv, count), 0.1)
        monitor.observe(BatchLatency(count, 0.01 * count, float(took.sum())), PERIOD)


def test_batches_as_predicted_have_not_drifted() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 1.1, 600, cv=0.5)
    assert not monitor.drifted
    assert monitor.ratio == pytest.approx(1.1, rel=0.1)


def test_slow_batches_drift_within_seconds_and_recover() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 1.0, 60)
    observe(monitor, 1.6, 4)
    assert monitor.drifted
    assert monitor.shrunk_ratio(1.0) > 1.45, "batches from before the change count no more"
    observe(monitor, 1.0, 15)
    assert not monitor.drifted


def test_few_batches_say_nothing() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 3.0, 2, per_second=2.0)
    assert monitor.ratio == 1.0
    assert not monitor.drifted
    assert monitor.shrunk_ratio(1.5) < 2.1


def test_single_slow_interval_is_no_drift() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 1.0, 30)
    monitor.observe(BatchLatency(20, 0.2, 0.6), PERIOD)
    assert not monitor.drifted


def test_reset_forgets_all_batches() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 2.0, 10)
    monitor.reset()
    assert monitor.ratio == 1.0
    assert not monitor.drifted


def test_nothing_observed_is_as_predicted() -> None:
    monitor = SlowdownMonitor()
    monitor.observe(None, PERIOD)
    assert monitor.ratio == monitor.shrunk_ratio(1.0) == 1.0


def test_faster_batches_drift_later_than_slower_ones() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 0.5, 9)
    assert not monitor.drifted
    observe(monitor, 0.5, 3)
    assert monitor.drifted


def test_batches_that_swing_have_not_drifted() -> None:
    monitor = SlowdownMonitor()
    for _ in range(20):
        observe(monitor, 0.4, 4)
        observe(monitor, 1.0, 4)
        assert not monitor.drifted


def test_slow_batches_after_fast_ones_begin_a_time_of_their_own() -> None:
    monitor = SlowdownMonitor()
    observe(monitor, 0.3, 9, per_second=6.0)
    monitor.observe(BatchLatency(200, 2.0, 5.0), PERIOD)
    assert monitor.ratio > 2.0
    assert not monitor.drifted
    observe(monitor, 2.5, 2)
    assert monitor.drifted
