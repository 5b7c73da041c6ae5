from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.runtime.lending import MAX_CREDIT
from cotenant.worker.cpu_throttle import CpuThrottle


class Machine:
    """A clock and a meter that only move when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.used = 0.0

    def work(self, cpu: float, *, speed: float = 1.0) -> None:
        self.used += cpu
        self.now += cpu / speed


def test_throttle_batch_takes_its_cpu_time_over_the_rate() -> None:
    machine = Machine()
    throttle = CpuThrottle(0.25, lambda: machine.used)
    machine.work(0.010)
    assert throttle.charge(0.0) == pytest.approx((0.040, 0.010))


def test_throttle_cpu_time_between_batches_counts_for_the_next() -> None:
    machine = Machine()
    throttle = CpuThrottle(0.5, lambda: machine.used)
    machine.work(0.001)
    started = machine.now
    machine.work(0.010)
    due, cost = throttle.charge(started)
    assert (due - started, cost) == pytest.approx((0.022, 0.011))


def test_throttle_oversleep_is_credited_within_bounds() -> None:
    machine = Machine()
    throttle = CpuThrottle(0.5, lambda: machine.used)
    throttle.ended(due=1.0, now=1.004)
    machine.used += 0.010
    assert throttle.charge(1.0)[0] == pytest.approx(1.0 + 0.020 - 0.004)
    throttle.ended(due=1.0, now=99.0)
    machine.used += 0.1
    assert throttle.charge(2.0)[0] == pytest.approx(2.0 + 0.2 - MAX_CREDIT)


def test_throttle_idle_time_is_not_credited() -> None:
    machine = Machine()
    throttle = CpuThrottle(0.5, lambda: machine.used)
    machine.used += 0.010
    due, _ = throttle.charge(0.0)
    throttle.ended(due, due)
    machine.used += 0.010
    assert throttle.charge(100.0)[0] == pytest.approx(100.020)


@given(rate=st.floats(0.05, 0.95), seed=st.integers(0, 2**32 - 1))
def test_throttle_busy_worker_keeps_its_rate(rate: float, seed: int) -> None:
    """Batches of all sizes, wakes that come late, a processor that others slow down at times."""
    rng = np.random.default_rng(seed)
    machine = Machine()
    throttle = CpuThrottle(rate, lambda: machine.used)
    for _ in range(150):
        started = machine.now
        machine.work(rng.uniform(0.001, 0.05), speed=rng.uniform(max(rate, 0.6), 1.0))
        due, _ = throttle.charge(started)
        machine.now = max(machine.now, due) + rng.exponential(0.0002)
        throttle.ended(due, machine.now)
        machine.work(0.0001)
    assert machine.used / machine.now == pytest.approx(rate, rel=0.03)
