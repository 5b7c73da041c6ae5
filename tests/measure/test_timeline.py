from __future__ import annotations

import msgspec
import pytest

from cotenant.measure.timeline import Timeline

RUN = Timeline(
    step=10.0,
    offered={"a": [5.0, 1.0]},
    goodput={"a": [4.0, 1.0], "b": [0.5, 0.5]},
    missed={"a": [1.0, 0.0]},
    p99={"a": [0.1, None]},
    waiting=[2.0, 0.0],
    busy=[0.8, 0.2],
    devices=[3.0, 1.0],
    cost=[36.0, 72.0],
)


def test_timeline_totals_weigh_each_interval_by_its_length_and_devices() -> None:
    assert RUN.times == [5.0, 15.0]
    assert RUN.answers == pytest.approx(60.0)
    assert RUN.spent == pytest.approx(0.3)
    assert RUN.utilisation == pytest.approx((3 * 0.8 + 0.2) / 4)


def test_timeline_without_prices_or_devices_has_no_cost_and_no_use() -> None:
    bare = msgspec.structs.replace(RUN, cost=None, devices=[0.0, 0.0])
    assert (bare.spent, bare.utilisation) == (None, 0.0)
