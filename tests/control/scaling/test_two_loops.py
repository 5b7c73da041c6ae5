"""Dynamo's two loops: a lower bound by throughput, and single steps by latency."""

from __future__ import annotations

import pytest

from cotenant.control.scaling import Observation
from cotenant.control.scaling.two_loops import TwoLoopScaling
from tests.control.scaling.contexts import context

SCALE = TwoLoopScaling(kind="gpu")  # a device carries 100 requests/s, the target is 100 ms


def seen(time: float, rate: float, latency: float) -> Observation:
    return Observation(time=time, seconds=5, rates={"a": rate}, concurrency={"a": rate * latency}, ready={"gpu": 3})


@pytest.mark.parametrize(("latency", "wanted"), [(0.11, 4), (0.09, 3), (0.07, 2)])
def test_latency_adds_and_removes_one_device(latency: float, wanted: int) -> None:
    assert SCALE(context([seen(5, 50, latency)], ready=3)) == {"gpu": wanted}


def test_nothing_is_added_while_a_device_is_on_its_way() -> None:
    assert SCALE(context([seen(5, 50, 0.2)], ready=3, launching=1)) == {"gpu": 4}


def test_throughput_is_a_lower_bound_that_changes_every_180_seconds() -> None:
    history = [seen(5.0 * n, 450.0 if 5 * n <= 180 else 50.0, 0.01) for n in range(1, 80)]
    assert SCALE(context(history[:35], ready=5)) == {"gpu": 4}  # 175 s: no whole interval yet
    assert SCALE(context(history[:36], ready=3)) == {"gpu": 5}
    assert SCALE(context(history[:71], ready=3)) == {"gpu": 5}  # 355 s
    assert SCALE(context(history[:72], ready=5)) == {"gpu": 4}  # 360 s: of 50 requests/s


def test_requests_that_wait_while_none_arrive_are_slow() -> None:
    stuck = Observation(time=5, seconds=5, rates={"a": 0.0}, concurrency={"a": 3.0}, ready={"gpu": 3})
    assert SCALE(context([stuck], ready=3)) == {"gpu": 4}


def test_idle_devices_go_down_to_the_last() -> None:
    idle = Observation(time=5, seconds=5, rates={"a": 0.0}, concurrency={"a": 0.0}, ready={"gpu": 1})
    assert [SCALE(context([idle], ready=n))["gpu"] for n in (3, 2, 1)] == [2, 1, 1]


def test_nothing_observed_changes_nothing() -> None:
    assert SCALE(context(ready=3)) == {"gpu": 3}
