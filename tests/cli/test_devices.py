from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cotenant.app.backend import create_backend
from cotenant.cli import devices
from cotenant.config import read_settings
from cotenant.errors import DeviceError
from tests.cli.program import Program
from tests.driver.build import loaded


def absent() -> Any:
    raise DeviceError("no NVIDIA driver was found; install it")


def test_devices_without_a_driver_shows_the_cpu_and_what_is_missing(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.backends.nvidia.cards.nvml_session", absent)
    said = program("devices")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("cpu-0  ") and "cpu, throttle  yes" in said.out
    assert "no GPU  no NVIDIA driver was found; install it" in said.out
    found = json.loads(program("devices", "--json").out)
    assert found["cpu"]["capacity"] > 0
    assert (found["driver"], found["reason"], found["gpus"]) == ("", "no NVIDIA driver was found; install it", [])


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_devices_with_gpus_shows_processes_and_backends(program: Program, state: Path) -> None:
    state.write_text(f"process 0 123 {3 << 30}\n")
    with loaded("h200,a100-80gb-mig=3g.40gb+1g.10gb+1g.10gb", state=state):
        said = program("devices")
        found = json.loads(program("devices", "--json").out)
    lines = [line.strip() for line in said.out.splitlines()]
    assert any(line.startswith("NVIDIA's driver 580.95.05, CUDA 13.0; PyTorch") for line in lines)
    for line in (
        "h200-0  NVIDIA H200  index 0",
        "3 GiB used of 140 GiB, 132 multiprocessors, compute capability 9.0",
        "busy 42% of the time, its memory 17%, 123 W, 1980 MHz, 36 °C",
        "process 123 /usr/bin/program-123, 3 GiB",
        "a100-sxm4-80gb-mig-0  NVIDIA A100-SXM4-80GB  index 1",
        "MIG is on, and has cut it into 1 x 3g.40gb (42.86 %), 2 x 1g.10gb (14.29 %)",
        "mig    yes",
    ):
        assert line in lines, said.out
    first, second = found["gpus"]
    assert first["reading"]["memory"] == 3 << 30
    assert first["can"]["mig"].startswith("MIG is off")
    assert [one["profile"] for one in second["gpu"]["instances"]] == ["3g.40gb", "1g.10gb", "1g.10gb"]


def test_devices_with_a_lost_gpu_shows_the_others(program: Program, state: Path) -> None:
    state.write_text("error nvmlDeviceGetComputeRunningProcesses_v3 15\n")
    with loaded("h200", state=state):
        said = program("devices")
    assert "lost: the GPU GPU-00000001-0000-4000-8000-000000000000: it is off the bus" in said.out


def test_devices_with_a_driver_and_no_gpu_says_so(program: Program) -> None:
    with loaded(""):
        assert "no GPU  driver 580.95.05 shows none; in a container" in program("devices").out


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ("2.11.0+cu130", "PyTorch 2.11.0+cu130\n"),
        ("2.13.0+cpu", "PyTorch 2.13.0+cpu is without CUDA, so that no model runs on a GPU"),
        (None, "PyTorch is not installed, and without it no model runs on a GPU"),
    ],
)
def test_devices_shows_the_installed_pytorch(
    installed: str | None, words: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(devices, "version", version)
    with loaded("h200"):
        assert f"CUDA 13.0; {words}" in program("devices").out


@pytest.mark.parametrize("backend", ["mps", "green", "mig"])
@pytest.mark.parametrize("command", ["serve", "profile", "plan"])
def test_gpu_backend_without_a_driver_is_rejected(
    backend: str, command: str, program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.backends.nvidia.cards.nvml_session", absent)
    (folder / "gpu.toml").write_text(f'backend = "{backend}"\n')
    flag = ["--settings"] if command == "plan" else []
    assert program.refuses(command, *flag, "gpu.toml") == "no NVIDIA driver was found; install it"


@pytest.mark.parametrize("backend", ["mps", "green", "mig"])
def test_gpu_backend_without_a_gpu_is_rejected(backend: str, program: Program, folder: Path) -> None:
    (folder / "gpu.toml").write_text(f'backend = "{backend}"\n')
    with loaded(""):
        why = program.refuses("serve", "gpu.toml")
    assert why == f'backend = "{backend}": the driver shows no GPU; in a container, start that with `--gpus all`'


def test_gpu_backend_with_an_unknown_gpu_is_rejected(program: Program, folder: Path) -> None:
    (folder / "gpu.toml").write_text('backend = "green"\ngpu = { devices = [1] }\n')
    with loaded("h200"):
        why = program.refuses("serve", "gpu.toml")
    assert why == "gpu.devices: no GPU '1'; available: 0 (GPU-00000001-0000-4000-8000-000000000000)"


def test_gpu_backend_leaves_out_unsuitable_gpus_unless_named(
    program: Program, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cotenant.backends.nvidia.sharing_modes.find_spec", lambda package: package
    )  # as if all were installed
    with loaded("h200-mig=7g.141gb,rtx4090"):
        backend = create_backend(read_settings(written(folder, 'backend = "green"')))
        assert backend.fleet()[0].name == "geforce-rtx-4090"
        assert "NVIDIA H200 (GPU-00000001-0000-4000-8000-000000000000) is left out: MIG is on" in caplog.text
        with pytest.raises(DeviceError, match="MIG is on"):
            create_backend(read_settings(written(folder, 'backend = "green"\ngpu = { devices = [0] }'))).fleet()


def test_gpu_backend_without_a_suitable_gpu_names_each_reason(program: Program, folder: Path) -> None:
    written(folder, 'backend = "green"')
    with loaded("h200-mig=7g.141gb,h200-mig"):
        why = program.refuses("serve", "gpu.toml")
    assert why == 'no GPU here can do "green": GPU 0, 1: MIG is on; its instances are for the backend mig'


def written(folder: Path, text: str) -> Path:
    path = folder / "gpu.toml"
    path.write_text(text + "\n")
    return path
