"""What is read of claims: quantities, allocations and placements, whoever wrote them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import ClaimError
from cotenant.k8s.dra.allocation import AllocatedClaim, is_allocated, read_allocation
from cotenant.k8s.dra.devices import DRIVER
from cotenant.k8s.dra.placement_config import PlacementConfig, read_parameters
from cotenant.k8s.dra.quantities import is_same_capacity, is_same_quantity, read_quantity
from cotenant.k8s.resource import key_of
from tests.k8s.dra.published import check
from tests.k8s.dra.samples import GIB, claim, config, gpu, parameters, result


def read(*results: dict[str, Any], configs: list[dict[str, Any]] | None = None) -> AllocatedClaim:
    body = claim("a", *results, configs=configs)
    body["metadata"]["uid"] = "uid-a"
    return read_allocation(body, "uid-a")


@pytest.mark.parametrize(
    ("text", "value"),
    [("200", 200), ("1k", 1000), ("1e3", 1000), ("16Gi", 16 * GIB), ("0", 0), ("2000m", 2), (250, 250), ("0.5Ki", 512)],
)
def test_quantity_is_read_however_it_is_written(text: object, value: int) -> None:
    assert read_quantity(text, "share") == value


@pytest.mark.parametrize("text", ["", "a", "-1", "0.5", "500m", "1 Gi", "1Gib", None, True, 0.5, [], "NaN", "9" * 40])
def test_quantity_that_is_no_whole_number_is_refused(text: object) -> None:
    with pytest.raises(ClaimError, match=r"share: .* is not a whole number of at least 0"):
        read_quantity(text, "share")


@given(st.integers(0, 1 << 45))
def test_quantities_in_other_units_are_the_same(value: int) -> None:
    assert is_same_quantity(str(value << 10), f"{value}Ki")
    assert is_same_quantity(str(value * 1000), f"{value}k")
    assert not is_same_quantity(str(value), str(value + 1))


def test_capacities_are_the_same_where_policies_are() -> None:
    one = {"share": {"value": "1000", "requestPolicy": {"default": "1k", "validRange": {"min": "1"}}}}
    other: dict[str, Any] = {"share": {"value": "1k", "requestPolicy": {"default": "1000", "validRange": {"min": "1"}}}}
    assert is_same_capacity(one, other)
    del other["share"]["requestPolicy"]
    assert not is_same_capacity(one, other)


def test_share_memory_and_placement_are_read() -> None:
    found = read(result(gpu(0), "200", "16Gi"), configs=[config(share=200, memory=16 * GIB, model="bert", slo=0.05)])
    (device,) = found.devices
    assert (device.device, device.share, device.memory) == (gpu(0).name, 200, 16 * GIB)
    assert device.config == PlacementConfig(share=200, memory=16 * GIB, model="bert", slo=0.05)


def test_capacity_may_be_named_with_its_domain() -> None:
    capacity = {"cotenant.dev/share": "300", "cotenant.dev/memory": "1Gi", "other.dev/share": "7"}
    (device,) = read(result(gpu(0), consumedCapacity=capacity)).devices
    assert (device.share, device.memory) == (300, GIB)


def test_device_without_consumed_capacity_is_had_alone() -> None:
    (device,) = read(result(gpu(0), None, None)).devices
    assert (device.share, device.memory) == (None, None)


def test_devices_and_configurations_of_other_drivers_are_theirs() -> None:
    foreign = {"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "GpuConfig"}}}
    found = read(result(gpu(1), driver="gpu.nvidia.com"), result(gpu(0)), configs=[foreign])
    assert [each.device for each in found.devices] == [gpu(0).name]
    assert found.devices[0].config == PlacementConfig()


def test_claim_configures_over_its_class_field_by_field() -> None:
    configs = [config(share=200), config("FromClass", sharing="mps", share=100, model="any")]
    assert read(result(gpu(0)), configs=configs).devices[0].config == PlacementConfig(
        sharing="mps", share=200, model="any"
    )


@pytest.mark.parametrize(
    ("requests", "applies"), [([], True), (["share"], True), (["other"], False), (["share/small"], True)]
)
def test_configuration_is_for_its_requests(requests: list[str], applies: bool) -> None:
    (device,) = read(result(gpu(0), request="share/small"), configs=[config(requests=requests, model="bert")]).devices
    assert (device.config.model == "bert") == applies


def test_two_placements_that_differ_contradict_each_other() -> None:
    for source, name in (("FromClaim", "claim"), ("FromClass", "class")):
        with pytest.raises(ClaimError, match=f"its {name} has two placements for it that differ; leave one"):
            read(result(gpu(0)), configs=[config(source, share=200), config(source, ["share"], share=300)])
    read(result(gpu(0)), configs=[config(share=200), config(share=200)])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "GpuConfig"}, r"Invalid enum value 'GpuConfig' - at `\$.kind`"),
        ({"apiVersion": "cotenant.dev/v2"}, r"Invalid enum value 'cotenant.dev/v2' - at `\$.apiVersion`"),
        ({"shares": 1}, "unknown field `shares`"),
        ({"share": "20%"}, r"Expected `int \| null`, got `str` - at `\$.share`"),
        ({"share": -1}, "share: -1 must be at least 0"),
        ({"memory": -1}, "memory: -1 must be at least 0"),
        ({"slo": -0.1}, "slo: -0.1 must be at least 0"),
        ({"sharing": "threads"}, r"Invalid enum value 'threads' - at `\$.sharing`"),
        ({"device": 7}, "Expected `str`"),
    ],
    ids=str,
)
def test_placement_that_cannot_be_read_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ClaimError, match=f"claim a: .*{why}"):
        read_parameters({**parameters(), **changes}, "claim a")


@pytest.mark.parametrize("value", [None, [], "x", {}, {"kind": "PlacementConfig"}])
def test_parameters_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ClaimError, match="write a PlacementConfig of cotenant"):
        read_parameters(value, "claim a")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"results": [{"driver": "cotenant.dev"}]}, "missing required field `request`"),
        ({"results": 7}, "Expected `array`"),
        ({"results": []}, "no device of cotenant.dev is allocated to it"),
    ],
    ids=str,
)
def test_allocation_that_cannot_be_read_is_refused(body: dict[str, Any], why: str) -> None:
    made = {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "status": {"allocation": {"devices": body}}}
    with pytest.raises(ClaimError, match=f"claim n/a: .*{why}"):
        read_allocation(made, "u")


def test_access_for_administrators_is_refused() -> None:
    with pytest.raises(ClaimError, match="leave adminAccess out"):
        read(result(gpu(0), adminAccess=True))


def test_claim_that_is_not_allocated_or_another_is_refused() -> None:
    body = claim("a")
    body["metadata"]["uid"] = "u"
    assert not is_allocated(body)
    with pytest.raises(ClaimError, match="claim default/a is not allocated"):
        read_allocation(body, "u")
    with pytest.raises(ClaimError, match=r"with uid v is gone; another has its name \(u\)"):
        read_allocation(body, "v")


@given(
    st.builds(
        PlacementConfig,
        sharing=st.none() | st.sampled_from(["whole", "mps", "mig"]),
        device=st.text(max_size=5),
        instance=st.text(max_size=5),
        share=st.none() | st.integers(0, 1000),
        memory=st.none() | st.integers(0, 1 << 40),
        slot=st.none() | st.integers(0, 7),
        model=st.text(max_size=5),
        slo=st.none() | st.floats(0, 10),
        rate=st.none() | st.floats(0, 1e6),
    )
)
def test_placement_that_is_written_is_read_again(placement: PlacementConfig) -> None:
    assert read_parameters(placement.parameters(), "here") == placement


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_claim_that_is_broken_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever stands in one place of a claim: it is read, or refused by a ClaimError."""
    body = claim("a", result(gpu(0)), configs=[config(share=200)])
    body["metadata"]["uid"] = "u"
    spoiled = copy.deepcopy(body)
    place: Any = spoiled["status"]
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    said = ""
    try:
        found = read_allocation(spoiled, "u")
    except ClaimError as error:
        said = str(error)
    if said:
        assert f"claim {key_of(body)}" in said
        return
    results = [each for each in spoiled["status"]["allocation"]["devices"]["results"] if each["driver"] == DRIVER]
    assert [(each.request, each.pool, each.device) for each in found.devices] == [
        (each["request"], each["pool"], each["device"]) for each in results
    ]


def test_claims_of_these_tests_are_of_the_published_schema() -> None:
    body = claim("a", result(gpu(0)), configs=[config(share=200)])
    check({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **body})
