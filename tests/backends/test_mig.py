"""Over the real pynvml, and a fake driver below it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from cotenant.backends import Launch, nvidia
from cotenant.backends.mig import Mig, cut_gpu
from cotenant.core import mig
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Model
from cotenant.core.profile import Point, Profile
from cotenant.errors import DeviceError
from cotenant.planners import Problem
from cotenant.planning import plan as plan_problem
from tests.driver.build import loaded

GIB = 1 << 30
ONE, TWO, THREE, FOUR, SEVEN = 142, 285, 428, 571, 1000
CUT = "h200-mig=3g.71gb+2g.35gb+1g.18gb+1g.18gb"
Machine = Callable[..., Mig]


@pytest.fixture
def machine(state: Path) -> Iterator[Machine]:
    with ExitStack() as stack:

        def made(gpus: str, *, create: bool = False) -> Mig:
            stack.enter_context(loaded(gpus, state=state))
            return Mig(nvidia.list_gpus(), create=create)

        yield made


class OnProcessor(Mig):
    """Its workers have what those on instances have, but run their models on the processor."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return msgspec.structs.replace(super().open(lane, share, leaving), cuda=False)


def on_processor(_: pytest.MonkeyPatch, held: ExitStack) -> Mig:
    """One that may make instances, so that shares of any size are to be had; for tests of every backend."""
    held.enter_context(loaded("a30-mig"))
    backend = OnProcessor(nvidia.list_gpus(), create=True)
    held.callback(backend._watch.close)  # before the driver goes
    return backend


def where(backend: Mig, lane: LaneId, share: int, leaving: tuple[LaneId, ...] = ()) -> str:
    """The UUID of the instance on which a lane opens."""
    launch = backend.open(lane, share, leaving)
    assert launch.cuda and list(launch.env) == ["CUDA_VISIBLE_DEVICES"]
    return launch.env["CUDA_VISIBLE_DEVICES"]


def cut_now() -> list[str]:
    return sorted(one.profile for gpu in nvidia.list_gpus() for one in gpu.instances)


def test_mig_gpu_has_the_shares_of_its_instances(machine: Machine) -> None:
    (kind,) = machine(CUT).fleet()
    assert (kind.name, kind.count, kind.memory, kind.cuts) == ("h200-mig", 1, 64 * GIB, (ONE, TWO, THREE))
    assert kind.geometry is not None
    assert mig.placements_fit(kind.geometry, [(ONE, GIB), (THREE, 60 * GIB), (ONE, 16 * GIB), (TWO, GIB)])
    assert not mig.placements_fit(kind.geometry, [(ONE, GIB)] * 3)


def test_mig_gpus_of_equal_layout_are_one_kind(machine: Machine) -> None:
    backend = machine("h200-mig=4g.71gb,h200-mig=4g.71gb,a30-mig=2g.12gb")
    assert [(kind.name, kind.count) for kind in backend.fleet()] == [("h200-mig", 2), ("a30-mig", 1)]
    assert backend.open(LaneId.parse("h200-mig-1/0"), FOUR) != backend.open(LaneId.parse("h200-mig-0/0"), FOUR)


def test_mig_gpus_of_different_layouts_are_different_kinds(machine: Machine) -> None:
    backend = machine("h200-mig=4g.71gb,h200-mig=3g.71gb+3g.71gb")
    assert {kind.name: kind.cuts for kind in backend.fleet()} == {
        "h200-mig-4g.71gb": (FOUR,),
        "h200-mig-2x3g.71gb": (THREE,),
    }
    assert where(backend, LaneId.parse("h200-mig-4g.71gb-0/0"), FOUR).startswith("MIG-00000001-")


def test_mig_gpus_with_different_free_instances_are_different_kinds(machine: Machine, state: Path) -> None:
    state.write_text(f"process 1 77 {GIB} 1\n")
    backend = machine("h200-mig=4g.71gb+3g.71gb,h200-mig=4g.71gb+3g.71gb")
    assert {kind.name: kind.cuts for kind in backend.fleet()} == {
        "h200-mig-4g.71gb-3g.71gb": (THREE, FOUR),
        "h200-mig-3g.71gb": (THREE,),
    }


def test_mig_plan_uses_the_existing_instances(machine: Machine) -> None:
    backend = machine(CUT)
    (kind,) = backend.fleet()
    names = ("a", "b", "c", "d")
    points = [Point(share=share, batch=1, latency=2 / share, memory=GIB) for share in kind.cuts]
    plan = plan_problem(
        Problem(
            models=tuple(Model(name=name, slo=0.1) for name in names),
            rates=dict.fromkeys(names, 1.0),
            fleet=(kind,),
            profiles={(name, kind.name): Profile(name, kind.name, points) for name in names},
            objective="rate",
        ),
        "geometry",
        validate=False,
    )
    (device,) = plan.devices
    assert sorted(cut.share for cut in device.partitions) == [ONE, ONE, TWO, THREE]
    found = {where(backend, LaneId(device.id, slot), cut.share) for slot, cut in enumerate(device.partitions)}
    assert len(found) == 4


def test_mig_lane_owns_its_instance_until_it_closes(machine: Machine) -> None:
    backend = machine(CUT)
    first, second = where(backend, LaneId.parse("h200-mig-0/0"), ONE), where(backend, LaneId.parse("h200-mig-0/1"), ONE)
    assert first != second
    with pytest.raises(DeviceError) as refusal:
        backend.open(LaneId.parse("h200-mig-0/2"), ONE)
    assert str(refusal.value) == (
        "h200-mig-0 has no free MIG instance of 14.29 %, and no room for one; "
        "it is cut into 3g.71gb, 2g.35gb, 1g.18gb, 1g.18gb"
    )
    backend.close(LaneId.parse("h200-mig-0/0"))
    assert where(backend, LaneId.parse("h200-mig-0/2"), ONE) == first
    assert cut_now() == ["1g.18gb", "1g.18gb", "2g.35gb", "3g.71gb"]


def test_mig_lane_may_take_the_instance_of_a_leaving_one(machine: Machine) -> None:
    backend = machine(CUT)
    old = where(backend, LaneId.parse("h200-mig-0/0"), TWO)
    with pytest.raises(DeviceError):
        backend.open(LaneId.parse("h200-mig-0/1"), TWO, leaving=(LaneId.parse("h200-mig-0/7"),))
    assert where(backend, LaneId.parse("h200-mig-0/1"), TWO, leaving=(LaneId.parse("h200-mig-0/0"),)) == old
    backend.close(LaneId.parse("h200-mig-0/0"))
    with pytest.raises(DeviceError):  # the new one is there still
        backend.open(LaneId.parse("h200-mig-0/2"), TWO)


def test_mig_equal_shares_take_the_instance_with_the_most_memory(machine: Machine) -> None:
    backend = machine("h200-mig=1g.18gb+1g.35gb")
    uuids = {one.profile: one.uuid for one in nvidia.list_gpus()[0].instances}
    assert [where(backend, LaneId(DeviceId("h200-mig"), slot), ONE) for slot in (0, 1)] == [
        uuids["1g.35gb"],
        uuids["1g.18gb"],
    ]


def test_mig_workers_of_a_partition_share_its_instance(machine: Machine) -> None:
    backend = machine(CUT)
    device = DeviceId("h200-mig")
    first = where(backend, LaneId(device, 0), ONE)
    assert not backend.divides
    assert where(backend, LaneId(device, 0, 1), ONE) == first
    assert where(backend, LaneId(device, 1), ONE) != first
    backend.close(LaneId(device, 0))
    assert where(backend, LaneId(device, 0), ONE) == first  # its worker starts again


def test_mig_missing_device_is_an_error(machine: Machine) -> None:
    backend = machine(CUT)
    with pytest.raises(
        DeviceError, match=r"^lane 'h200-mig-1/0': there is no device 'h200-mig-1'; available: h200-mig-0$"
    ):
        backend.open(LaneId.parse("h200-mig-1/0"), ONE)
    backend.close(LaneId.parse("h200-mig-1/0"))


def test_mig_instances_in_use_by_others_are_left_alone(
    machine: Machine, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text(f"process 0 77 {GIB} 3\n")
    backend = machine(CUT)
    (kind,) = backend.fleet()
    assert kind.geometry is not None and not mig.placements_fit(kind.geometry, [(ONE, GIB)] * 2)
    taken = nvidia.list_gpus()[0].instances[2].uuid
    assert where(backend, LaneId.parse("h200-mig-0/0"), ONE) != taken
    assert "1g.18gb of GPU-00000001-0000-4000-8000-000000000000 is left out: /usr/bin/program-77 (77)" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ("h200", "MIG is off; `sudo nvidia-smi -i 0 -mig 1` turns it on, with nothing running on the GPU"),
        ("v100", "this GPU, or its driver, has no MIG"),
        ("h200-mig", "MIG is on, without an instance; let the server make them with `mig = { create = true }`"),
    ],
)
def test_mig_unavailable_is_an_error_with_the_reason(gpus: str, why: str, machine: Machine) -> None:
    with pytest.raises(DeviceError) as refusal:
        machine(gpus)
    assert str(refusal.value).startswith('backend = "mig" finds no GPU to use: ')
    assert str(refusal.value).endswith(f"(GPU-00000001-0000-4000-8000-000000000000): {why}")


def test_mig_gpus_without_mig_are_omitted_with_a_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    backend = machine("h200,h200-mig=7g.141gb")
    assert [kind.name for kind in backend.fleet()] == ["h200-mig"]
    assert "NVIDIA H200 (GPU-00000001-0000-4000-8000-000000000000) is left out: MIG is off" in caplog.text


def test_mig_all_instances_in_use_is_an_error(machine: Machine, state: Path) -> None:
    state.write_text(f"process 0 77 {GIB} 1\n")
    with pytest.raises(DeviceError, match=r": others compute on all of its instances$"):
        machine("h200-mig=7g.141gb")


def test_mig_allowed_to_create_makes_and_destroys_instances_with_lanes(machine: Machine) -> None:
    backend = machine("a100-80gb-mig", create=True)
    (kind,) = backend.fleet()
    assert kind.cuts == (ONE, TWO, THREE, FOUR, SEVEN)
    assert kind.geometry is not None
    plain = {it.name: (it.slices, it.starts) for it in mig.instances(kind.geometry)}
    table = {it.name: (it.slices, it.starts) for it in mig.GEOMETRIES["mig-a100-80gb"] if it.name != "1g.20gb"}
    assert plain == table
    lanes = [LaneId(DeviceId("a100-sxm4-80gb-mig"), slot) for slot in range(4)]
    found = {where(backend, lane, share) for lane, share in zip(lanes, (THREE, TWO, ONE, ONE), strict=True)}
    assert len(found) == 4
    assert cut_now() == ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]
    with pytest.raises(
        DeviceError, match=r"no free MIG instance of 57.14 %, and no room for one; it is cut into 3g.40gb"
    ):
        backend.open(LaneId.parse("a100-sxm4-80gb-mig-0/9"), FOUR)
    for lane in lanes:
        backend.close(lane)
        backend.close(lane)
    assert cut_now() == []
    where(backend, lanes[0], SEVEN)
    assert cut_now() == ["7g.80gb"]


@pytest.mark.parametrize("product", ["h200", "a100-40gb", "a30"])
def test_mig_created_instances_largest_first_fit_every_legal_plan(product: str, machine: Machine) -> None:
    backend = machine(f"{product}-mig", create=True)
    (kind,) = backend.fleet()
    assert kind.geometry is not None
    for layout in mig.maximal_layouts(kind.geometry):
        lanes = [LaneId(DeviceId(kind.name), slot) for slot in range(len(layout))]
        for lane, share in zip(lanes, sorted((one.share for one in layout), reverse=True), strict=True):
            backend.open(lane, share)
        assert cut_now() == sorted(one.name for one in layout)
        for lane in lanes:
            backend.close(lane)


def test_mig_existing_instances_are_neither_destroyed_nor_extended(machine: Machine) -> None:
    backend = machine("h200-mig=1g.18gb", create=True)
    assert [kind.cuts for kind in backend.fleet()] == [(ONE,)]
    with pytest.raises(DeviceError):
        backend.open(LaneId.parse("h200-mig-0/0"), FOUR)
    backend.open(LaneId.parse("h200-mig-0/1"), ONE)
    backend.close(LaneId.parse("h200-mig-0/1"))
    assert cut_now() == ["1g.18gb"]


def test_mig_instance_still_in_use_is_kept_for_the_next_lane(
    machine: Machine, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = machine("h200-mig", create=True)
    uuid = where(backend, LaneId.parse("h200-mig-0/0"), THREE)
    state.write_text(f"process 0 77 {GIB} 1\n")
    backend.close(LaneId.parse("h200-mig-0/0"))
    assert cut_now() == ["3g.71gb"]
    assert f"the MIG instance 3g.71gb ({uuid}) stays: it is still in use by a process" in caplog.text
    state.write_text("")
    assert where(backend, LaneId.parse("h200-mig-0/1"), THREE) == uuid
    backend.close(LaneId.parse("h200-mig-0/1"))
    assert cut_now() == []


@pytest.mark.parametrize(
    "function", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"]
)
def test_mig_create_without_permission_is_an_error_and_leaves_nothing(
    function: str, machine: Machine, state: Path
) -> None:
    backend = machine("h200-mig", create=True)
    state.write_text(f"error {function} 4\n")
    with pytest.raises(
        DeviceError, match=r"^a MIG instance of 42.86 % on h200-mig-0: this user may not .*; run as root"
    ):
        backend.open(LaneId.parse("h200-mig-0/0"), THREE)
    state.write_text("")
    lanes = itertools.count()
    assert (
        len({where(backend, LaneId(DeviceId("h200-mig"), next(lanes)), ONE) for _ in range(7)}) == 7
    )  # the GPU is empty


def test_mig_created_instances_are_destroyed_with_the_backend(machine: Machine) -> None:
    backend = machine("h200-mig", create=True)
    backend.open(LaneId.parse("h200-mig-0/0"), THREE)
    del backend
    gc.collect()
    assert cut_now() == []


def test_mig_lost_gpu_is_named(machine: Machine, state: Path) -> None:
    backend = machine("h200-mig=7g.141gb,a30-mig=4g.24gb")
    state.write_text("lost 1\n")
    assert backend.lost() == {"a30-mig-0": "it is off the bus, or cannot be reached; reset it, or restart the machine"}


def test_cut_gpu_replaces_the_instances_of_an_idle_gpu(state: Path) -> None:
    with loaded("h200-mig=3g.71gb+1g.18gb", state=state):
        (gpu,) = nvidia.list_gpus()
        cut_gpu(gpu.uuid, (ONE, THREE, TWO))
        assert cut_now() == ["1g.18gb", "2g.35gb", "3g.71gb"]
        cut_gpu(gpu.uuid, (SEVEN,))
        assert cut_now() == ["7g.141gb"]


def test_cut_gpu_that_does_not_fit_says_what_there_is(state: Path) -> None:
    with loaded("h200-mig", state=state):
        (gpu,) = nvidia.list_gpus()
        with pytest.raises(DeviceError, match=r"no room for a MIG instance of 57\.14 %; available: 14\.29 %, 28\.57 %"):
            cut_gpu(gpu.uuid, (FOUR, FOUR))
        with pytest.raises(DeviceError, match=r"no room for a MIG instance of 12\.3 %"):
            cut_gpu(gpu.uuid, (123,))
        cut_gpu(gpu.uuid, (THREE, THREE))
        assert cut_now() == ["3g.71gb", "3g.71gb"]


def test_cut_gpu_on_which_something_computes_leaves_it(state: Path) -> None:
    with loaded("h200-mig=3g.71gb", state=state):
        (gpu,) = nvidia.list_gpus()
        state.write_text(f"process 0 1234 {GIB} 1\n")
        with pytest.raises(DeviceError, match=r"\(1234\) computes on it$"):
            cut_gpu(gpu.uuid, (SEVEN,))
        assert cut_now() == ["3g.71gb"]
