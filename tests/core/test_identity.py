from __future__ import annotations

import copy
import pickle  # noqa: TID251  # as processes that simulate beside each other do

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.identity import DeviceId, LaneId, own_kind, parse_identity
from cotenant.errors import ConfigError

names = st.text(st.characters(exclude_characters="/"), min_size=1)
numbers = st.integers(0, 10**6)
devices = st.builds(lambda kind, index, node: DeviceId(kind, index, node=node), names, numbers, st.just("") | names)
lanes = st.builds(LaneId, devices, numbers, numbers)


@given(device=devices)
def test_device_id_printed_parses_to_the_same_value(device: DeviceId) -> None:
    parsed = DeviceId.parse(str(device))
    assert parsed == device
    assert (parsed.node, parsed.kind, parsed.index) == (device.node, device.kind, device.index)
    assert type(parse_identity(str(device))) is DeviceId


@given(lane=lanes)
def test_lane_id_printed_parses_to_the_same_value(lane: LaneId) -> None:
    parsed = LaneId.parse(str(lane))
    assert parsed == lane
    assert (parsed.device, parsed.slot, parsed.worker) == (lane.device, lane.slot, lane.worker)
    assert type(parse_identity(str(lane))) is LaneId


@given(one=lanes, other=lanes)
def test_lane_ids_are_equal_only_where_all_parts_are(one: LaneId, other: LaneId) -> None:
    parts = [(lane.device, lane.slot, lane.worker) for lane in (one, other)]
    assert (one == other) == (parts[0] == parts[1])
    assert (hash(one) == hash(other)) or one != other


@pytest.mark.parametrize(
    ("device", "spelling"),
    [
        (DeviceId("h200"), "h200-0"),
        (DeviceId("h200-mig-2x3g.71gb", 11), "h200-mig-2x3g.71gb-11"),
        (DeviceId("h200", 1, node="node-a"), "node-a/h200-1"),
    ],
)
def test_identities_are_spelled_as_documented(device: DeviceId, spelling: str) -> None:
    assert str(device) == f"{device}" == spelling
    assert str(LaneId(device, 1)) == f"{spelling}/1"
    assert str(LaneId(device, 1, 1)) == f"{spelling}/1.2"


@pytest.mark.parametrize(
    "text", ["", "h200", "-0", "h200-", "h200-01", "h200--1x", "h200-0/1", "/h200-0", "a/b/h200-0"]
)
def test_parse_device_id_of_other_text_raises_with_the_spelling(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"names no device; write KIND-INDEX, such as h200-0, or NODE/KIND-INDEX$"
    ) as no:
        DeviceId.parse(text)
    assert str(no.value).startswith(repr(text))


@pytest.mark.parametrize(
    "text", ["", "h200-0", "h200/0", "h200-0/", "h200-0/x", "h200-0/01", "h200-0/0.1", "h200-0/0.0", "a/b/h200-0/1"]
)
def test_parse_lane_id_of_other_text_raises_with_the_spelling(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"names no lane; write DEVICE/SLOT, such as h200-0/1, or DEVICE/SLOT.WORKER"
    ) as no:
        LaneId.parse(text)
    assert str(no.value).startswith(repr(text))


def test_parse_identity_of_other_text_raises() -> None:
    with pytest.raises(
        ConfigError, match=r"^'node-a/x' names neither a device, such as h200-0, nor a lane, such as h200"
    ):
        parse_identity("node-a/x")


@pytest.mark.parametrize(
    ("kind", "index", "node"),
    [
        ("", 0, ""),
        ("a/", 0, ""),
        ("/b", 0, ""),
        ("a/b/c", 0, ""),
        ("a/b", 0, "c"),
        ("a", 0, "b/c"),
        ("a", -1, ""),
    ],
)
def test_identity_with_unspellable_parts_is_rejected(kind: str, index: int, node: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"a kind is KIND or NODE/KIND, neither of which may contain another '/', and the first index is 0",
    ):
        DeviceId(kind, index, node=node)


def test_device_id_of_a_node_has_the_kind_that_problems_name() -> None:
    device = DeviceId("node-a/h200", 2)
    assert device == DeviceId("h200", 2, node="node-a") == DeviceId.parse("node-a/h200-2")
    assert (device.node, device.kind, own_kind(device.kind)) == ("node-a", "node-a/h200", "h200")
    local = device.local
    assert local == DeviceId("h200", 2) and local.local is local
    lane = LaneId(device, 1, 1)
    assert lane.local == LaneId.parse("h200-2/1.2") and lane.local.on("node-a") == lane


@pytest.mark.parametrize(("slot", "worker"), [(-1, 0), (0, -1)])
def test_identity_with_negative_slot_or_worker_is_rejected(slot: int, worker: int) -> None:
    with pytest.raises(ConfigError, match=rf"^worker {worker} of slot {slot} of cpu-0: both count from 0$"):
        LaneId(DeviceId("cpu"), slot, worker)


def test_identities_are_ordered_by_their_parts() -> None:
    ordered = [
        *(
            LaneId(DeviceId("a", index), slot, worker)
            for index in (0, 2, 10)
            for slot in (2, 10)
            for worker in (0, 1, 9)
        ),
        LaneId(DeviceId("b"), 0),
        LaneId(DeviceId("a", node="n"), 0),
    ]
    as_text = sorted(ordered, key=str)
    assert as_text != ordered
    assert sorted(as_text) == ordered
    assert ordered[0] <= ordered[0] < ordered[1] and ordered[1] >= ordered[1] > ordered[0]


def test_identities_are_immutable() -> None:
    with pytest.raises(AttributeError, match=r"^DeviceId 'cpu-0' is immutable; create another$"):
        DeviceId("cpu").index = 1
    with pytest.raises(AttributeError, match=r"^LaneId 'cpu-0/1' is immutable; create another$"):
        del LaneId(DeviceId("cpu"), 1).slot


@pytest.mark.parametrize("identity", [DeviceId("h200", 3, node="node-a"), LaneId(DeviceId("h200", 3, node="n"), 1, 1)])
def test_identities_serialize_as_their_spelling(identity: DeviceId | LaneId) -> None:
    for made in (pickle.loads(pickle.dumps(identity)), copy.deepcopy(identity)):  # noqa: S301  # our own
        assert type(made) is type(identity) and made == identity and not made < identity
    assert msgspec.json.encode({"of": [identity]}, enc_hook=str) == b'{"of":["' + str(identity).encode() + b'"]}'
