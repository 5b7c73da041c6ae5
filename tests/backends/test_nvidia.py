"""Over the real pynvml, and a fake driver below it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from cotenant.backends import nvidia
from cotenant.backends.nvidia import DeviceWatch, Gpu, MigInstance
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.errors import DeviceError
from tests.driver.build import fitted, loaded

GIB = 1 << 30
Machine = Callable[..., None]


@pytest.fixture
def machine(state: Path) -> Iterator[Machine]:
    """Gives this process some GPUs, once."""
    with ExitStack() as stack:
        yield lambda gpus, driver="": stack.enter_context(loaded(gpus, driver=driver, state=state))


def uuid(index: int) -> str:
    return f"GPU-{index + 1:08x}-0000-4000-8000-000000000000"


def test_list_gpus_returns_every_gpu(machine: Machine) -> None:
    machine("h200,rtx4090")
    assert nvidia.driver_version() == ("580.95.05", "13.0")
    first, second = nvidia.list_gpus()
    assert first == Gpu(
        index=0,
        uuid=uuid(0),
        name="NVIDIA H200",
        kind="h200",
        memory=143771 << 20,
        multiprocessors=132,
        capability="9.0",
    )
    assert (second.kind, second.multiprocessors, second.capability) == ("geforce-rtx-4090", 128, "8.9")


def test_list_gpus_with_mig_gives_their_instances(machine: Machine) -> None:
    machine("a100-80gb-mig=3g.40gb+2g.20gb,a30-mig=2g.12gb")
    a100, a30 = nvidia.list_gpus()
    assert (a100.kind, a100.mig, a100.multiprocessors) == ("a100-sxm4-80gb-mig", True, 98)
    assert a100.instances[1] == MigInstance(
        uuid="MIG-00000001-0000-4000-8000-000000000002",
        id=2,
        profile="2g.20gb",
        share=285,
        memory=19968 << 20,
        multiprocessors=28,
    )
    assert [one.share for one in (*a100.instances, *a30.instances)] == [428, 285, 500]


def test_gpu_reading_and_processes_give_usage(machine: Machine, state: Path) -> None:
    state.write_text(f"process 0 77 {3 * GIB}\nprocess 1 78 {GIB} 1\n")
    machine("h200,h200-mig=3g.71gb+1g.18gb")
    h200, cut = nvidia.list_gpus()
    reading = nvidia.gpu_reading(h200.uuid)
    assert (reading.memory, reading.utilisation, reading.bandwidth) == (3 * GIB, 0.42, 0.17)
    assert (reading.power, reading.clock, reading.temperature) == (123.456, 1980, 36)
    (process,) = nvidia.gpu_processes(h200.uuid)
    assert (process.pid, process.name, process.memory, process.instance) == (77, "/usr/bin/program-77", 3 * GIB, None)
    assert [process.instance for process in nvidia.gpu_processes(cut.uuid)] == [1]
    inside = nvidia.gpu_reading(cut.instances[0].uuid)
    assert (inside.memory, inside.utilisation, inside.power) == (GIB, None, None)
    assert nvidia.gpu_reading(cut.instances[1].uuid).memory == 0


def test_gpu_reading_unsupported_values_are_none(machine: Machine, state: Path) -> None:
    unknown = ("GetPowerUsage 3", "GetMigMode 13", "GetNumGpuCores 13", "GetComputeRunningProcesses_v3 4")
    state.write_text("".join(f"error nvmlDevice{name}\n" for name in unknown))
    machine("v100")
    (gpu,) = nvidia.list_gpus()
    assert (gpu.kind, gpu.mig, gpu.multiprocessors) == ("v100-sxm2-16gb", False, 0)
    assert nvidia.gpu_reading(gpu.uuid).power is None
    assert nvidia.gpu_processes(gpu.uuid) == ()


def test_gpus_by_device_different_mig_layouts_are_different_kinds(machine: Machine) -> None:
    machine("h200,h200-mig=3g.71gb+1g.18gb+1g.18gb,h200-mig,a30-mig=4g.24gb")
    assert list(nvidia.gpus_by_device(nvidia.list_gpus())) == [
        "h200-0",
        "h200-mig-3g.71gb-2x1g.18gb-0",
        "h200-mig-uncut-0",
        "a30-mig-0",
    ]


def test_gpu_reading_without_root_has_no_memory_of_a_mig_gpu(machine: Machine, state: Path) -> None:
    state.write_text("error nvmlDeviceGetMemoryInfo 4\n")
    machine("h200-mig=3g.71gb")
    (gpu,) = nvidia.list_gpus()
    assert gpu.memory == 128 * GIB
    assert nvidia.gpu_reading(gpu.uuid).memory is None
    watch = DeviceWatch({DeviceId.parse("h200-mig-0"): gpu})
    assert watch.lost() == {}
    watch.close()


def test_gpus_by_device_equal_gpus_are_one_kind(machine: Machine) -> None:
    machine("h200,rtx4090,h200")
    every = nvidia.list_gpus()
    assert {name: gpu.index for name, gpu in nvidia.gpus_by_device(every).items()} == {
        "h200-0": 0,
        "geforce-rtx-4090-0": 1,
        "h200-1": 2,
    }
    assert nvidia.device_kinds(every, lambda gpu: (500, 1000))[0] == Kind(
        name="h200", count=2, memory=143771 << 20, cuts=(500, 1000)
    )


@pytest.mark.parametrize(
    ("gpus", "driver", "can"),
    [
        ("h200", "", {"mps": "", "green": "", "mig": "MIG is off; `sudo nvidia-smi -i 0 -mig 1` turns it on"}),
        ("rtx4090", "555.42/12.5", {"mps": "", "green": "", "mig": "this GPU, or its driver, has no MIG"}),
        ("v100", "535.54/12.2", {"mps": "", "green": "it needs a driver for CUDA 12.5 (this one is for 12.2)"}),
        ("v100", "470.42/11.4", {"mps": "its limits of memory need a driver for CUDA 11.5 (this one is for 11.4)"}),
        ("p100", "", {"mps": "it needs Volta or newer (compute capability 7.0; this is 6.0)", "green": ""}),
        ("h200-mig=7g.141gb", "", {"mps": "MIG is on;", "green": "MIG is on;", "mig": ""}),
        ("h200-mig", "", {"mps": "MIG is on;", "mig": "MIG is on, without an instance; let the server make them"}),
    ],
)
def test_available_sharing_modes_of_a_gpu_give_what_it_lacks(
    gpus: str, driver: str, can: dict[str, str], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / nvidia.CONTROL).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        "cotenant.backends.nvidia.sharing_modes.find_spec", lambda package: package
    )  # as if all were installed
    machine(gpus, driver)
    (gpu,) = nvidia.list_gpus()
    found = nvidia.available_sharing_modes(gpu)
    for name, reason in can.items():
        assert found[name].startswith(reason) and bool(found[name]) == bool(reason), found


def test_available_sharing_modes_unavailable_give_the_remedy(
    machine: Machine, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.backends.nvidia.sharing_modes.find_spec", lambda package: package)
    state.write_text("mode 0 2\nmig 1\n")
    machine("h200,h200")
    prohibited, pending = nvidia.list_gpus()
    assert nvidia.available_sharing_modes(prohibited)["green"].startswith(
        "its compute mode prohibits all contexts; `sudo nvidia-smi"
    )
    assert nvidia.available_sharing_modes(pending)["mig"].startswith(
        "MIG will be on after a reset; `sudo nvidia-smi -i 1 --gpu-r"
    )
    monkeypatch.setattr(
        "cotenant.backends.nvidia.sharing_modes.find_spec",
        lambda package: None if package == "cuda.bindings" else package,
    )
    missing = "it needs the Python package 'cuda.bindings'; install `cotenant[gpu]`"
    assert nvidia.available_sharing_modes(pending)["green"] == missing
    monkeypatch.setattr("cotenant.backends.nvidia.sharing_modes.find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.delitem(sys.modules, "cuda.bindings", raising=False)
    assert nvidia.available_sharing_modes(pending)["green"] == missing
    monkeypatch.setenv("PATH", "")
    assert nvidia.available_sharing_modes(pending)["mps"].startswith(f"there is no `{nvidia.CONTROL}`")


def test_select_gpus_by_index_or_uuid_returns_those(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("h200,h200,h200-mig=3g.71gb+3g.71gb")
    every = nvidia.list_gpus()

    def indexes(*wanted: str) -> list[int]:
        return [gpu.index for gpu in nvidia.select_gpus(every, wanted)]

    assert indexes() == [0, 1, 2]
    assert indexes("1", uuid(0), "1") == [1, 0]
    assert nvidia.select_gpus(every, ["GPU-00000003"]) == every[2:]
    (part,) = nvidia.select_gpus(every, [every[2].instances[1].uuid])
    assert (part.index, part.instances) == (2, every[2].instances[1:])
    for wrong, why in [("3", "no GPU '3'"), ("GPU-", "several GPUs begin with 'GPU-'"), ("all", "no GPU 'all'")]:
        with pytest.raises(DeviceError, match=rf"^gpu.devices: {why}; available: 0 \(GPU-00000001-"):
            indexes(wrong)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    assert (indexes(), indexes("1")) == ([2, 0], [1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DeviceError, match=r"^CUDA_VISIBLE_DEVICES: no GPU '7'"):
        indexes()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="hides all GPUs"):
        indexes()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (4, "this user may not query NVIDIA's driver for that; run as root, or change the permissions of /dev/nvidia"),
        (9, "NVIDIA's driver is installed, but not loaded; run `sudo modprobe nvidia`"),
        (18, "NVIDIA's driver was updated while an older one is still loaded; restart the machine"),
        (999, "NVIDIA's driver says: Unknown Error"),
    ],
)
def test_list_gpus_with_a_broken_driver_raises_device_error(
    code: int, words: str, machine: Machine, state: Path
) -> None:
    state.write_text(f"error nvmlInitWithFlags {code}\n")
    machine("h200")
    with pytest.raises(DeviceError, match=f"^{words}"):
        nvidia.list_gpus()
    state.write_text("")
    assert len(nvidia.list_gpus()) == 1  # what failed is tried again


def test_list_gpus_without_a_driver_says_what_is_needed() -> None:
    code = "from cotenant.backends import nvidia; nvidia.list_gpus()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if said.returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")
    assert "DeviceError: no NVIDIA driver was found (there is no libnvidia-ml.so.1); install it" in said.stderr


def test_list_gpus_without_nvidia_ml_py_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvidia.nvml_session.cache_clear()
    with pytest.raises(DeviceError, match=r"^NVIDIA GPUs need nvidia-ml-py; install `cotenant\[gpu\]`$"):
        nvidia.list_gpus()


def test_list_gpus_in_a_subprocess_uses_the_fake_driver() -> None:
    """As workers and servers under test do."""
    code = "from cotenant.backends import nvidia; print(nvidia.list_gpus()[1].name)"
    said = subprocess.run(
        [sys.executable, "-c", code], env=fitted("h200,a30"), capture_output=True, text=True, check=True
    )
    assert said.stdout == "NVIDIA A30\n"


def test_list_gpus_unresponsive_gpu_is_omitted(machine: Machine, state: Path, caplog: pytest.LogCaptureFixture) -> None:
    state.write_text("lost 0\n")
    machine("h200,h200")
    assert [gpu.index for gpu in nvidia.list_gpus()] == [1]
    assert "GPU 0 is left out: it is off the bus, or cannot be reached" in caplog.text
    with pytest.raises(DeviceError, match=f"^the GPU {uuid(0)}: it is off the bus, or cannot be reached; reset it"):
        nvidia.gpu_reading(uuid(0))


@pytest.fixture
def watch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceWatch]:
    monkeypatch.setattr("cotenant.backends.nvidia.watch.LOOK", 0.01)
    machine("h200,h200")
    watch = DeviceWatch(nvidia.gpus_by_device(nvidia.list_gpus()))
    yield watch
    watch.close()


def eventually(watch: DeviceWatch, lost: dict[str, str]) -> None:
    end = time.monotonic() + 10
    while (found := watch.lost()) != lost:
        assert time.monotonic() < end, found


def test_device_watch_lost_gpu_is_reported_until_it_returns(watch: DeviceWatch, state: Path) -> None:
    assert watch.lost() == {}
    state.write_text("reset 1\n")
    eventually(watch, {"h200-1": "it needs a reset; `sudo nvidia-smi --gpu-reset` does that"})
    state.write_text("")
    eventually(watch, {})


def test_device_watch_gpu_that_needs_a_reset_is_lost_until_then(watch: DeviceWatch, state: Path) -> None:
    assert watch.lost() == {}
    state.write_text("action 0 1\naction 1 4\n")  # the second is to be drained, which is not for us
    eventually(watch, {"h200-0": "it needs a reset; `sudo nvidia-smi --gpu-reset` does that"})
    state.write_text("action 0 1\nerror nvmlDeviceGetFieldValues 13\n")  # an old driver does not know
    eventually(watch, {})


def test_device_watch_first_call_reports_lost_gpus(watch: DeviceWatch, state: Path) -> None:
    state.write_text("lost 0\n")
    assert list(watch.lost()) == ["h200-0"]


def test_device_watch_fatal_xid_is_permanent_and_others_are_ignored(
    watch: DeviceWatch, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("xid 0 31\nxid 1 79\n")
    eventually(watch, {"h200-1": "Xid 79, it has fallen off the bus; reset it, then start the server again"})
    assert "h200-0 reports Xid 31" in caplog.text  # a page fault: the program's own
    state.write_text("xid 0 31\nxid 1 79\nlost 0\n")
    eventually(
        watch,
        {
            "h200-0": "it is off the bus, or cannot be reached; reset it, or restart the machine",
            "h200-1": "Xid 79, it has fallen off the bus; reset it, then start the server again",
        },
    )


def test_device_watch_hung_driver_reports_all_gpus_lost(watch: DeviceWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch.lost() == {}
    watch.close()
    watch._begun = time.monotonic() - nvidia.HUNG - 1  # as a look that has not ended
    assert watch.lost() == dict.fromkeys(("h200-0", "h200-1"), nvidia.SILENT)


def test_core_import_loads_no_gpu_package() -> None:
    code = (
        "import sys; import cotenant.app.deployment_builder; "
        "sys.exit(any(m in sys.modules for m in ('pynvml', 'torch', 'cuda')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
