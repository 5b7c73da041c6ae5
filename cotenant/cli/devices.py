"""Show what this machine has, what runs on it now, and in which ways it can be partitioned: `cotenant devices`."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cotenant.backends import cgroup, nvidia
from cotenant.backends.cpu import Cpu
from cotenant.backends.mps import mps_unavailable
from cotenant.backends.nvidia import Gpu, GpuProcess, GpuReading
from cotenant.cli.options import Json
from cotenant.cli.output import console, show_json
from cotenant.core.units import show_memory, show_share
from cotenant.errors import DeviceError
from cotenant.profiling import cache

INDENT = 4


class CpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the CPU. capacity: processor seconds per second that this process may use. memory: bytes. can: by way of
    enforcing shares, why it is unavailable; empty where it is available."""

    name: str
    cores: int
    capacity: float
    memory: int
    can: dict[str, str]


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a GPU. name: as a device of plans. reading: None where it does not respond any more, for that reason.
    can: by backend, why it is unavailable; empty where it is available."""

    name: str
    gpu: Gpu
    reading: GpuReading | None
    reason: str
    processes: tuple[GpuProcess, ...]
    can: dict[str, str]


class MachineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describe this machine. driver, cuda: versions, empty without a driver; reason then says what is missing. torch:
    the version of PyTorch, which models on a GPU need; empty where it is not installed."""

    cpu: CpuInfo
    driver: str
    cuda: str
    torch: str
    reason: str
    gpus: tuple[GpuInfo, ...]


def devices(json: Json = False) -> None:
    """Show the devices of this machine, what runs on them, and which backends can partition them."""
    machine = inspect_machine()
    if json:
        show_json(machine)
    else:
        console.print(machine_view(machine))


def inspect_machine() -> MachineInfo:
    torch = ""
    with suppress(PackageNotFoundError):
        torch = version("torch")
    try:
        driver, cuda = nvidia.driver_version()
        gpus = tuple(_found(name, gpu) for name, gpu in nvidia.gpus_by_device(nvidia.list_gpus()).items())
    except DeviceError as error:
        return MachineInfo(cpu=_processor(), driver="", cuda="", torch=torch, reason=str(error), gpus=())
    return MachineInfo(cpu=_processor(), driver=driver, cuda=cuda, torch=torch, reason="", gpus=gpus)


def _processor() -> CpuInfo:
    backend = Cpu()
    (kind,) = backend.fleet()
    group = cgroup.own_cgroup("cpu")
    quota = ""
    if group is None:
        quota = "this system has no control groups"
    elif not os.access(group.folder, os.W_OK):
        quota = f"this user may not write {group.folder}; run as root, or in a scope that is delegated to you"
    return CpuInfo(
        name=cache.machine_fingerprint(),
        cores=len(backend.cores),
        capacity=backend.capacity,
        memory=kind.memory,
        can={"throttle": "", "quota": quota},
    )


def _found(name: str, gpu: Gpu) -> GpuInfo:
    try:
        return GpuInfo(
            name=name,
            gpu=gpu,
            reading=nvidia.gpu_reading(gpu.uuid),
            reason="",
            processes=nvidia.gpu_processes(gpu.uuid),
            can={**nvidia.available_sharing_modes(gpu), "mps": mps_unavailable(gpu)},
        )
    except DeviceError as error:  # lost since
        return GpuInfo(name=name, gpu=gpu, reading=None, reason=str(error), processes=(), can={})


def machine_view(machine: MachineInfo) -> Group:
    cpu = machine.cpu
    cores = f"{cpu.cores} core{'s' if cpu.cores > 1 else ''}"
    if cpu.capacity < cpu.cores:
        cores += f", of which this process may use {cpu.capacity:g}"
    blocks: list[RenderableType] = [
        _title("cpu-0", cpu.name),
        _line(f"{cores}, {show_memory(cpu.memory)}"),
        _abilities({f"cpu, {enforcement}": reason for enforcement, reason in cpu.can.items()}),
        Text(),
    ]
    if machine.reason:
        blocks.append(_title("no GPU", machine.reason))
    elif not machine.gpus:
        blocks.append(
            _title("no GPU", f"driver {machine.driver} shows none; in a container, start that with `--gpus all`")
        )
    else:
        blocks.append(Text(f"NVIDIA's driver {machine.driver}, CUDA {machine.cuda}; {_torch(machine.torch)}"))
    for found in machine.gpus:
        blocks += [Text(), *_gpu(found)]
    return Group(*blocks)


def _torch(installed: str) -> str:
    if not installed:
        return "PyTorch is not installed, and without it no model runs on a GPU; install `cotenant[gpu]`"
    if installed.endswith("+cpu"):
        return f"PyTorch {installed} is without CUDA, so that no model runs on a GPU; install a build with it"
    return f"PyTorch {installed}"


def _gpu(found: GpuInfo) -> list[RenderableType]:
    gpu = found.gpu
    lines: list[RenderableType] = [_title(found.name, gpu.name, f"index {gpu.index}"), _line(gpu.uuid)]
    if found.reading is None:
        return [*lines, _line(Text.assemble(("lost", "red"), f": {found.reason}"))]
    used = "" if found.reading.memory is None else f"{show_memory(found.reading.memory)} used of "
    count = f"{gpu.multiprocessors} multiprocessors, " if gpu.multiprocessors else ""
    lines.append(_line(f"{used}{show_memory(gpu.memory)}, {count}compute capability {gpu.capability}"))
    if doing := _doing(found.reading):
        lines.append(_line(doing))
    for process in found.processes:
        memory = "" if process.memory is None else f", {show_memory(process.memory)}"
        place = "" if process.instance is None else f", on instance {process.instance}"
        lines.append(_line(f"process {process.pid} {process.name}{memory}{place}"))
    if gpu.mig:
        cut = Counter((one.profile, one.share) for one in gpu.instances)
        parts = [f"{n} x {profile} ({show_share(share)})" for (profile, share), n in cut.items()]
        lines.append(_line(f"MIG is on, and has cut it into {', '.join(parts) or 'nothing yet'}"))
    return [*lines, _abilities(found.can)]


def _doing(reading: GpuReading) -> str:
    parts = [
        None if reading.utilisation is None else f"busy {reading.utilisation:.0%} of the time",
        None if reading.bandwidth is None else f"its memory {reading.bandwidth:.0%}",
        None if reading.power is None else f"{reading.power:.0f} W",
        None if reading.clock is None else f"{reading.clock} MHz",
        None if reading.temperature is None else f"{reading.temperature} °C",
    ]
    return ", ".join(part for part in parts if part is not None)


def _abilities(can: dict[str, str]) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    for name, reason in can.items():
        word = ("no", "red") if reason else ("yes", "green")
        rows.add_row(Text(name), Text.assemble(word, f": {reason}" if reason else ""))
    return Padding.indent(rows, INDENT)


def _title(name: str, *rest: str) -> Text:
    return Text.assemble((name, "bold"), *(f"  {text}" for text in rest))


def _line(text: str | Text) -> RenderableType:
    return Padding.indent(Text(text) if isinstance(text, str) else text, INDENT)
