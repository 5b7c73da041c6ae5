"""What a claim gets on a node, by tables and over any sequence of claims."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.units import WHOLE
from cotenant.errors import ClaimError
from cotenant.k8s.dra.allocation import AllocatedClaim, AllocatedDevice
from cotenant.k8s.dra.container_edits import ContainerOptions, cdi_device_ids, cdi_specification, environment_of
from cotenant.k8s.dra.devices import NodeDevice
from cotenant.k8s.dra.placement_config import PlacementConfig
from cotenant.k8s.dra.preparation import PreparedClaim, PreparedDevice, prepare
from cotenant.k8s.resource import ObjectKey
from tests.k8s.dra.samples import GIB, NODE, gpu, mig_gpu, named

DEVICES = named(gpu(0), mig_gpu(1), gpu(2, modes=()))


def asked(device: NodeDevice, share: int | None = 200, memory: int | None = GIB, /, **fields: Any) -> AllocatedDevice:
    return AllocatedDevice(
        request="share", pool=NODE, device=device.name, share=share, memory=memory, config=PlacementConfig(**fields)
    )


def claim_of(*devices: AllocatedDevice, uid: str = "new") -> AllocatedClaim:
    return AllocatedClaim(uid=uid, key=ObjectKey("default", uid), devices=devices)


def one(device: AllocatedDevice, prepared: tuple[PreparedClaim, ...] = ()) -> PreparedDevice:
    (found,) = prepare(claim_of(device), NODE, DEVICES, prepared).devices
    return found


@pytest.mark.parametrize(
    ("device", "sharing", "share", "memory", "instance"),
    [
        (asked(gpu(0)), "mps", 200, GIB, ""),
        (asked(gpu(0), 200, 0), "mps", 200, 0, ""),
        (asked(gpu(0), 200, None), "mps", 200, 80 * GIB, ""),
        (asked(gpu(0), WHOLE), "whole", WHOLE, GIB, ""),
        (asked(gpu(0), None, None), "whole", WHOLE, 80 * GIB, ""),
        (asked(gpu(0), WHOLE, sharing="mps"), "mps", WHOLE, GIB, ""),
        (asked(gpu(0), share=200, memory=GIB, device=gpu(0).uuid, slot=1, model="bert"), "mps", 200, GIB, ""),
        (asked(gpu(2), WHOLE), "whole", WHOLE, GIB, ""),
        (asked(mig_gpu(1)), "mig", 200, GIB, "MIG-00000001-1"),
        (asked(mig_gpu(1), 285, 20 * GIB), "mig", 285, 20 * GIB, "MIG-00000001-1"),
        (asked(mig_gpu(1), 300, 20 * GIB), "mig", 300, 20 * GIB, "MIG-00000001-0"),
        (asked(mig_gpu(1), 200, 30 * GIB), "mig", 200, 30 * GIB, "MIG-00000001-0"),
        (asked(mig_gpu(1), instance="MIG-00000001-2", sharing="mig"), "mig", 200, GIB, "MIG-00000001-2"),
    ],
)
def test_claim_gets_what_is_allocated(
    device: AllocatedDevice, sharing: str, share: int, memory: int, instance: str
) -> None:
    found = one(device)
    assert (found.sharing, found.share, found.memory, found.instance) == (sharing, share, memory, instance)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (asked(gpu(7)), "device gpu-00000007-0000-0000-0000-000000000000 is lost, or was never here; available: gpu-"),
        (asked(gpu(0), 0), "a share of 0 ‰ must be above 0"),
        (asked(gpu(0), 1001), "a share of 1001 ‰ must be above 0 and at most 1000 ‰"),
        (asked(gpu(0), 200, share=300), "planned with 300 ‰ of the device, and allocated 200 ‰"),
        (asked(gpu(0), None, None, share=300), "planned with 300 ‰ of the device, and allocated 1000 ‰"),
        (asked(gpu(0), device=gpu(2).uuid), "planned on device GPU-00000002.* and allocated on GPU-00000000.*select"),
        (asked(gpu(0), 200, GIB, memory=2 * GIB), "planned with 2147483648 bytes .* and allocated 1073741824"),
        (asked(gpu(0), 200, 81 * GIB), "are more than the 80"),
        (asked(gpu(0), sharing="whole"), 'are not the whole; share it as "mps"'),
        (asked(gpu(0), sharing="mig"), "MIG is off for device GPU-00000000"),
        (asked(gpu(0), instance="MIG-1"), "names MIG instance MIG-1, and is shared as 'mps'"),
        (asked(gpu(2)), "cannot be shared by MPS here; ways that work: none"),
        (asked(mig_gpu(1), sharing="mps"), "MIG is on for device .* cannot be shared as 'mps'"),
        (asked(mig_gpu(1), WHOLE, sharing="whole"), "MIG is on for device .* cannot be shared as 'whole'"),
        (asked(mig_gpu(1), instance="MIG-9"), "has no MIG instance MIG-9 now; it may have been cut anew"),
        (asked(mig_gpu(1), 300, instance="MIG-00000001-1"), "has 285 ‰ and .*, less than the 300 ‰"),
        (asked(mig_gpu(1), 500, GIB), "no free MIG instance of device .* has 500 ‰ and 1.* none is that large"),
    ],
)
def test_wrong_claim_is_refused_with_the_reason(device: AllocatedDevice, why: str) -> None:
    with pytest.raises(ClaimError, match=f"claim default/new: request share: .*{why}") as refused:
        one(device)
    assert refused.value.holders == ()


def test_claim_of_another_pool_is_refused() -> None:
    device = AllocatedDevice(request="share", pool="node-b", device=gpu(0).name)
    with pytest.raises(ClaimError, match="its device is of pool 'node-b', and this is 'node-a'"):
        one(device)


def held(device: AllocatedDevice, uid: str = "old") -> PreparedClaim:
    return prepare(claim_of(device, uid=uid), NODE, DEVICES, ())


@pytest.mark.parametrize(
    ("there", "new", "why"),
    [
        (asked(gpu(0), 600), asked(gpu(0), 500), "50 % of device .* are more than the 40 % that are left"),
        (asked(gpu(0), WHOLE), asked(gpu(0), 1), "0.1 % of device .* are more than the 0 %"),
        (asked(gpu(0), 1), asked(gpu(0), WHOLE), "100 % of device .* are more than the 99.9 %"),
        (asked(gpu(0), 100, 60 * GIB), asked(gpu(0), 100, 30 * GIB), "are more than the 20"),
        (
            asked(mig_gpu(1), instance="MIG-00000001-0"),
            asked(mig_gpu(1), instance="MIG-00000001-0"),
            "MIG instance MIG-00000001-0 is that of ",
        ),
    ],
)
def test_claim_for_more_than_is_left_is_refused_and_names_who_has_it(
    there: AllocatedDevice, new: AllocatedDevice, why: str
) -> None:
    with pytest.raises(ClaimError, match=f"{why}.*default/old") as refused:
        one(new, (held(there),))
    assert refused.value.holders == ("old",)


def test_own_share_is_not_counted_against_a_claim() -> None:
    before = prepare(claim_of(asked(gpu(0), WHOLE)), NODE, DEVICES, ())
    assert prepare(claim_of(asked(gpu(0), WHOLE)), NODE, DEVICES, (before,)) == before


def test_several_devices_of_a_claim_are_whole_and_different() -> None:
    pair = prepare(claim_of(asked(gpu(0), WHOLE), asked(gpu(2), WHOLE)), NODE, DEVICES, ())
    assert [each.sharing for each in pair.devices] == ["whole", "whole"]
    with pytest.raises(ClaimError, match="has 2 devices, and not all of them whole"):
        prepare(claim_of(asked(gpu(0), WHOLE), asked(mig_gpu(1))), NODE, DEVICES, ())
    with pytest.raises(ClaimError, match="has the same device twice"):
        prepare(claim_of(asked(gpu(0), WHOLE), asked(gpu(0), WHOLE)), NODE, DEVICES, ())


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (
            asked(gpu(0), 125, GIB + 1),
            {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1025M"},
        ),
        (asked(gpu(0), 200, 0), {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}),
        (asked(gpu(0), WHOLE), {}),
        (asked(mig_gpu(1)), {}),
    ],
)
def test_environment_holds_the_limits_of_mps_alone(device: AllocatedDevice, wanted: dict[str, str]) -> None:
    found = environment_of(one(device))
    assert {name: value for name, value in found.items() if "MPS" in name} == wanted


def test_device_without_a_known_node_needs_the_vendors_specification() -> None:
    device = gpu(0, minor=None)
    claim = prepare(claim_of(asked(device)), NODE, named(device), ())
    with pytest.raises(ClaimError, match=r"the device nodes of device GPU-.* are not known; start the driver wi"):
        cdi_specification(claim, ContainerOptions(vendor=""))


allocations = st.builds(
    lambda device, share, memory: asked(device, share, memory),
    st.sampled_from([gpu(0), mig_gpu(1)]),
    st.none() | st.integers(1, WHOLE),
    st.none() | st.integers(0, 80).map(lambda gib: gib * GIB),
)


@given(st.lists(st.tuples(allocations, st.booleans()), max_size=25))
def test_no_share_memory_or_instance_is_given_twice(steps: list[tuple[AllocatedDevice, bool]]) -> None:
    """Over any sequence of claims, of which some end: what is prepared fits on the devices, and what is refused had
    no room or is impossible."""
    there: dict[str, PreparedClaim] = {}
    for number, (device, ends) in enumerate(steps):
        uid = f"c{number}"
        refused = None
        try:
            there[uid] = prepare(claim_of(device, uid=uid), NODE, DEVICES, there.values())
        except ClaimError as error:
            refused = error
        if refused is not None:
            assert set(refused.holders) <= there.keys()
            if not refused.holders:  # then it is refused on an empty node as well
                with pytest.raises(ClaimError):
                    prepare(claim_of(device, uid=uid), NODE, DEVICES, ())
        if ends and there:
            there.pop(next(iter(there)))
        for each in DEVICES.values():
            parts = [part for claim in there.values() for part in claim.devices if part.uuid == each.uuid]
            assert sum(part.share for part in parts) <= WHOLE
            if not each.mig:
                assert sum(part.memory for part in parts) <= each.memory or len(parts) == 1
            instances = [part.instance for part in parts if part.instance]
            assert len(set(instances)) == len(instances)
            assert all(bool(part.instance) == each.mig for part in parts)


@given(allocations, st.sampled_from(["nvidia.com/gpu", ""]))
def test_specification_has_a_device_for_each_id_and_edits_in_each(device: AllocatedDevice, vendor: str) -> None:
    try:
        claim = prepare(claim_of(device), NODE, DEVICES, ())
    except ClaimError:
        return
    options = ContainerOptions(vendor=vendor)
    if not vendor and any(each.instance for each in claim.devices):
        with pytest.raises(ClaimError, match="the device nodes of a MIG instance are not known"):
            cdi_specification(claim, options)
        return
    specification = cdi_specification(claim, options)
    names = {f"cotenant.dev/claim={each['name']}" for each in specification["devices"]}
    ids = [one for each in claim.devices for one in cdi_device_ids(claim, each, options)]
    assert {each for each in ids if each.startswith("cotenant.dev/")} == names
    assert all(each["containerEdits"] for each in specification["devices"])
