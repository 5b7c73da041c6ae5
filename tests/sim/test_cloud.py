"""The simulated cloud: what it gives, when, at what cost, and each way in which it lies."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.control.adaptation import Acquire, AcquisitionFailed, DevicesFound, DevicesGone, Release
from cotenant.control.provider import DeviceOffer, ProviderEvent
from cotenant.core.identity import DeviceId
from cotenant.errors import ConfigError
from cotenant.sim.cloud import CloudKind, SimulatedCloud

A0, A1, B0 = DeviceId("a", 0), DeviceId("a", 1), DeviceId("b", 0)


def cloud(seed: int = 1, **options: Any) -> SimulatedCloud:
    kinds = [CloudKind(kind="a", price=3.6, launch_seconds=30.0, **options), CloudKind(kind="b", price=36.0)]
    return SimulatedCloud(kinds, seed=seed)


def test_a_device_takes_its_time_and_costs_from_the_request_on() -> None:
    it = cloud()
    it.handle(Acquire("a", 2), 10.0)
    assert it.due == 40.0
    assert not it.works(A0)
    assert it.news(39.9) == []
    assert it.news(40.0) == [DevicesFound((A0,)), DevicesFound((A1,))]
    assert it.works(A0) and it.due == math.inf
    it.handle(Release((A0,)), 60.0)
    assert it.news(60.0) == [DevicesGone((A0,), "released")]
    assert not it.works(A0)
    assert it.device_seconds(110.0) == {"a": 50.0 + 100.0, "b": 0.0}
    assert it.cost(110.0) == pytest.approx(0.15)


def test_a_number_is_never_given_twice() -> None:
    it = SimulatedCloud([CloudKind(kind="a")], seed=1, used=[A1])
    it.handle(Release((A1,)), 0.0)
    it.handle(Acquire("a", 1), 0.0)
    assert DevicesFound((DeviceId("a", 2),)) in it.news(0.0)


def test_quota_and_unknown_kinds_are_refused_at_once() -> None:
    it = cloud(quota=2)
    it.handle(Acquire("a", 3), 0.0)
    assert it.news(0.0) == [AcquisitionFailed("a", 1, "the quota of 2 devices of kind 'a' is used up")]
    it.handle(Acquire("c", 1), 1.0)
    assert it.news(1.0) == [AcquisitionFailed("c", 1, "the cloud has no devices of kind 'c'")]
    assert it.offers()[0] == DeviceOffer(kind="a", price=3.6, launch_seconds=30.0, quota=2)


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({"failure": 1.0}, [AcquisitionFailed("a", 1, "the cloud has no capacity now")]),
        ({"silent_failure": 1.0}, []),
        ({"wrong_kind": 1.0, "other": "b"}, [DevicesFound((B0,))]),
        ({"broken": 1.0}, [DevicesFound((A0,)), DevicesGone((A0,), "it was never there")]),
    ],
)
def test_each_lie(lie: dict[str, Any], told: list[ProviderEvent]) -> None:
    it = cloud(**lie)
    it.handle(Acquire("a", 1), 0.0)
    assert it.news(30.0) == told[:1]
    assert it.works(B0) == (lie.get("other") == "b")
    assert not it.works(A0)
    assert it.news(1000.0) == told[1:]


def test_late_devices_are_late() -> None:
    it = cloud(late=1.0, late_factor=4.0)
    it.handle(Acquire("a", 1), 0.0)
    assert it.due == 120.0


def test_launch_times_have_their_median_and_deviation() -> None:
    it = cloud(launch_cv=0.5)
    it.handle(Acquire("a", 2000), 0.0)
    times = []
    while it.due < math.inf:
        times.append(it.due)
        it.news(it.due)
    assert sorted(times)[1000] == pytest.approx(30.0, rel=0.05)
    mean = sum(times) / len(times)
    assert math.sqrt(sum((time - mean) ** 2 for time in times) / len(times)) / mean == pytest.approx(0.5, rel=0.1)


def test_devices_are_taken_away_after_their_lifetime_on_average() -> None:
    it = cloud(lifetime=100.0)
    it.handle(Acquire("a", 2000), 0.0)
    events = it.news(1e6)
    assert sum(isinstance(event, DevicesGone) for event in events) == 2000
    assert it.device_seconds(1e6)["a"] / 2000 == pytest.approx(130.0, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failure": 1.5}, "failure = 1.5 is a probability"),
        ({"failure": 0.6, "broken": 0.6}, "all that may go wrong exceed 1"),
        ({"launch_seconds": math.nan}, "launch_seconds = nan must be finite"),
        ({"price": -1.0}, "price = -1 must be finite and at least 0"),
        ({"lifetime": 0.0}, "a lifetime of 0 s must be above 0"),
        ({"wrong_kind": 0.1}, "wrong_kind needs `other`"),
    ],
)
def test_values_that_make_no_sense_are_errors(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CloudKind(kind="a", **options)  # type: ignore[arg-type]


def test_kinds_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(ConfigError, match="two entries for cloud devices of kind 'a'"):
        SimulatedCloud([CloudKind(kind="a"), CloudKind(kind="a")], seed=0)
    with pytest.raises(ConfigError, match="the cloud has no devices of kind 'b'; it has a"):
        SimulatedCloud([CloudKind(kind="a", wrong_kind=0.5, other="b")], seed=0)
    with pytest.raises(ConfigError, match="the cloud has no devices of kind 'b'"):
        SimulatedCloud([CloudKind(kind="a")], seed=0, used=[B0])


COMMANDS = st.lists(
    st.tuples(st.floats(0, 50), st.one_of(st.integers(1, 4), st.just("release"))), min_size=1, max_size=20
)
CHANCES = st.sampled_from([0.0, 0.25])


@settings(max_examples=100)
@given(commands=COMMANDS, seed=st.integers(0, 9999), chances=st.tuples(*[CHANCES] * 4), lifetime=st.booleans())
def test_what_it_says_adds_up(
    commands: list[tuple[float, int | str]], seed: int, chances: tuple[float, ...], lifetime: bool
) -> None:
    """Devices are found once, go once and after that; what is there is within the quota; the bill only grows; and the
    same seed says the same."""

    def told() -> list[tuple[float, ProviderEvent]]:
        lies = dict(zip(("failure", "silent_failure", "broken", "late"), chances, strict=True))
        it = cloud(seed, quota=5, launch_cv=0.3, lifetime=60.0 if lifetime else math.inf, **lies)
        now, cost, there, log = 0.0, 0.0, set[DeviceId](), list[tuple[float, ProviderEvent]]()
        for wait, what in commands:
            now += wait
            it.handle(Acquire("a", what) if isinstance(what, int) else Release(tuple(sorted(there)[:2])), now)
            for event in it.news(now):
                log.append((now, event))
                match event:
                    case DevicesFound(devices):
                        assert not there & set(devices)
                        there |= set(devices)
                    case DevicesGone(devices):
                        assert set(devices) <= there
                        there -= set(devices)
            assert len(there) <= 5
            assert it.due > now
            assert it.cost(now) >= cost
            cost = it.cost(now)
            assert all(not it.works(device) or device in there for device in (A0, A1))
        return log

    assert told() == told()
