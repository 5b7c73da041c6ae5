"""What is written so that a slice tells the devices of a node."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import DeviceError
from cotenant.k8s.dra.devices import NodeDevice, device_name
from cotenant.k8s.dra.resource_slice import MOST_DEVICES, pool_generation, slice_change, slice_name
from cotenant.k8s.resource import ObjectKey
from tests.k8s.dra.published import check_slice
from tests.k8s.dra.samples import NODE, gpu, mig_gpu

KEY = ObjectKey("", slice_name(NODE))


def stored(*devices: NodeDevice, seen: int = 0) -> dict[str, Any]:
    """A slice as an API server gives it back: quantities in its own spelling."""
    change = slice_change(NODE, "uid-a", devices, {}, seen)
    assert change.create is not None
    body = copy.deepcopy(change.create)
    body["metadata"] |= {"resourceVersion": "7", "uid": "s"}
    for device in body["spec"]["devices"]:
        share, memory = device["capacity"]["share"], device["capacity"]["memory"]
        share["value"] = share["requestPolicy"]["default"] = share["requestPolicy"]["validRange"]["max"] = "1k"
        memory["value"] = "80Gi"
    return body


def test_devices_of_a_node_are_published_with_share_and_memory() -> None:
    change = slice_change(NODE, "uid-a", [gpu(1), mig_gpu(0)], {})
    assert change.create is not None and change.replace is None and change.delete == ()
    body = change.create
    check_slice({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **body})
    assert body["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    assert [owner["uid"] for owner in body["metadata"]["ownerReferences"]] == ["uid-a"]
    first, second = body["spec"]["devices"]
    assert (first["name"], second["name"]) == (mig_gpu(0).name, gpu(1).name)
    assert second["attributes"] == {
        "kind": {"string": "h100"},
        "index": {"int": 1},
        "uuid": {"string": gpu(1).uuid},
        "product": {"string": "NVIDIA H100 80GB HBM3"},
        "mps": {"bool": True},
        "green": {"bool": True},
        "mig": {"bool": False},
    }
    assert second["capacity"]["share"]["value"] == "1000"
    assert second["capacity"]["memory"] == {"value": str(80 << 30)}
    assert second["allowMultipleAllocations"]


def test_nothing_is_written_where_nothing_changed() -> None:
    for order in ((gpu(0), gpu(1)), (gpu(1), gpu(0))):
        change = slice_change(NODE, "uid-a", order, {KEY: stored(gpu(0), gpu(1))})
        assert (change.create, change.replace, change.delete) == (None, None, ())


@pytest.mark.parametrize(
    ("devices", "uid"),
    [
        ((gpu(0),), "uid-a"),
        ((gpu(0), gpu(1), gpu(2)), "uid-a"),
        ((gpu(0), gpu(1, memory=40 << 30)), "uid-a"),
        ((gpu(0), gpu(1, modes=())), "uid-a"),
        ((), "uid-a"),
        ((gpu(0), gpu(1)), "uid-b"),
    ],
    ids=["lost", "found", "smaller", "shared otherwise", "none", "another node of the name"],
)
def test_change_is_written_with_the_next_generation(devices: tuple[NodeDevice, ...], uid: str) -> None:
    before = stored(gpu(0), gpu(1), seen=4)
    change = slice_change(NODE, uid, devices, {KEY: before})
    assert change.create is None and change.replace is not None
    assert change.replace["spec"]["pool"]["generation"] == 6
    assert change.replace["metadata"]["resourceVersion"] == "7"
    assert len(change.replace["spec"]["devices"]) == len(devices)


def test_slice_that_was_deleted_comes_back_with_a_higher_generation() -> None:
    change = slice_change(NODE, "uid-a", [gpu(0)], {}, seen=9)
    assert change.create is not None and change.create["spec"]["pool"]["generation"] == 10


def test_other_slices_of_this_driver_and_node_are_deleted() -> None:
    other = stored(gpu(5), seen=20)
    present = {KEY: stored(gpu(0)), ObjectKey("", "former"): other}
    change = slice_change(NODE, "uid-a", [gpu(0)], present)
    assert change.delete == (ObjectKey("", "former"),)
    assert pool_generation(present.values()) == 21


def test_slice_that_was_edited_by_hand_is_put_right() -> None:
    before = stored(gpu(0))
    before["spec"]["devices"][0]["capacity"]["share"]["value"] = "2k"
    change = slice_change(NODE, "uid-a", [gpu(0)], {KEY: before})
    assert change.replace is not None
    assert change.replace["spec"]["devices"][0]["capacity"]["share"]["value"] == "1000"


def test_more_devices_than_a_slice_has_are_refused() -> None:
    devices = [gpu(number) for number in range(MOST_DEVICES + 1)]
    with pytest.raises(DeviceError, match="129 devices are more than the 128 of a ResourceSlice"):
        slice_change(NODE, "uid-a", devices, {})


@pytest.mark.parametrize("uuid", ["", "GPU 0", "-a", "a" * 64, "GPU/0", "ü"])
def test_uuid_that_makes_no_name_is_refused(uuid: str) -> None:
    with pytest.raises(DeviceError, match="makes no name"):
        device_name(uuid)


node_names = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?){0,8}\Z").filter(
    lambda name: len(name) <= 253
)


@given(node_names, st.lists(st.integers(0, 20), unique=True, max_size=6), st.text(max_size=80), st.integers(0, 99))
def test_any_slice_is_one_that_a_server_takes(node: str, numbers: list[int], kind: str, seen: int) -> None:
    change = slice_change(node, "uid", [gpu(number, kind=kind) for number in numbers], {}, seen)
    assert change.create is not None
    check_slice({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **change.create})
    assert change.create["spec"]["pool"]["generation"] > seen


@given(node_names, node_names)
def test_slices_of_two_nodes_have_two_names(one: str, other: str) -> None:
    assert (slice_name(one) == slice_name(other)) == (one == other)
