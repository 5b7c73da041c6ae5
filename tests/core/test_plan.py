from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import ConfigError

placements = st.builds(
    Placement,
    model=st.sampled_from(["a", "b", "é"]),
    batch=st.integers(1, 64),
    rate=st.floats(0, 1e4),
    duty=st.floats(1e-4, 10),
    latency=st.floats(1e-4, 10),
    procs=st.integers(1, 3),
)
partitions = st.builds(Partition, share=st.integers(1, 500), placements=st.lists(placements, max_size=3).map(tuple))
devices = st.builds(
    Device,
    id=st.builds(DeviceId, st.just("k"), st.integers(0, 9)),
    partitions=st.lists(partitions, max_size=2).map(tuple),
)
plans = st.builds(
    Plan,
    planner=st.just("p"),
    devices=st.lists(devices, max_size=3).map(tuple),
    unserved=st.dictionaries(st.just("a"), st.floats(0, 10)),
    bound=st.none() | st.floats(0, 10),
)


@given(plans)
def test_plan_json_round_trips(plan: Plan) -> None:
    read = Plan.from_json(plan.to_json())
    assert read.to_json() == plan.to_json()
    assert [d.partitions for d in read.devices] != [] or not plan.devices
    for (_, cut, new), (_, old_cut, old) in zip(read.placements(), plan.placements(), strict=True):
        assert (new.model, new.batch, new.procs, cut.share) == (old.model, old.batch, old.procs, old_cut.share)
        assert (new.rate, new.duty, new.latency) == pytest.approx((old.rate, old.duty, old.latency), rel=1e-12)


def test_plan_json_uses_percent_and_milliseconds() -> None:
    placement = Placement(model="m", batch=4, rate=30.0, duty=0.02, latency=0.01)
    plan = Plan(
        planner="p", devices=(Device(id=DeviceId("k", 2), partitions=(Partition(share=125, placements=(placement,)),)),)
    )
    file = json.loads(plan.to_json())
    assert file["devices"] == [
        {
            "kind": "k",
            "id": 2,
            "partitions": [
                {
                    "share_pct": 12.5,
                    "placements": [
                        {"model": "m", "batch": 4, "rate": 30.0, "duty_ms": 20.0, "latency_ms": 10.0, "procs": 1}
                    ],
                }
            ],
        }
    ]
    assert file["devices_used"] == 1


def test_plan_rates_sum_placements_and_device_free_is_unallocated() -> None:
    def partition(share: int, rate: float) -> Partition:
        placement = Placement(model="m", batch=1, rate=rate, duty=0.1, latency=0.1)
        return Partition(share=share, placements=(placement,))

    device = Device(id=DeviceId("k", 0), partitions=(partition(200, 1.5), partition(300, 2.0)))
    assert Plan(planner="p", devices=(device,)).rate("m") == 3.5
    assert device.free == 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"devices": [{"kind": "k", "id": 0, "partitions": [{"share_pct": 120, "placements": []}]}]},
            r"a share of 120 %",
        ),
        ({"devices": [{"kind": "k", "id": -1, "partitions": []}]}, r"Expected `int` >= 0 - at `\$.devices\[0\].id`"),
        ({"devices": [{"kind": "a/b/c", "id": 0, "partitions": []}]}, r"- at `\$.devices\[0\].kind`"),
        ({"scale": "all"}, r"p.json: not a plan: Expected `float`, got `str` - at `\$.scale`"),
        ({"scales": 1}, r"unknown field `scales`"),
    ],
)
def test_plan_from_invalid_json_raises_config_error_with_place(change: dict[str, object], message: str) -> None:
    text = json.dumps(json.loads(Plan(planner="p").to_json()) | change)
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(text, "p.json")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"null"])
def test_plan_from_other_text_raises_config_error(text: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^plan: not a plan: "):
        Plan.from_json(text)
