"""Find out in which ways a GPU can be partitioned, and what prevents the others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

from cotenant.backends.nvidia.activity import gpu_processes
from cotenant.backends.nvidia.cards import Gpu, driver_version
from cotenant.backends.nvidia.nvml import nvml_errors, nvml_session, optional_reading
from cotenant.errors import DeviceError

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"  # the control program of MPS


def available_sharing_modes(gpu: Gpu, *, starts_mps: bool = True) -> dict[str, str]:
    """Return for each sharing mode why the GPU cannot be partitioned that way here; empty if it can. starts_mps: the
    control program of MPS has to be here, since we start it."""
    cuda = tuple(int(part) for part in driver_version()[1].split("."))
    return {"mps": _mps(gpu, cuda, starts_mps=starts_mps), "green": _green(gpu, cuda), "mig": _mig(gpu)}


def select_shareable(some: Sequence[Gpu], mechanism: str) -> tuple[Gpu, ...]:
    """Return the GPUs that can be partitioned that way here; the others are logged. Raises DeviceError if there is
    none."""
    reasons = {gpu: available_sharing_modes(gpu)[mechanism] for gpu in some}
    found = tuple(gpu for gpu, reason in reasons.items() if not reason)
    if not found:
        alike: dict[str, list[str]] = {}
        for gpu, reason in reasons.items():
            alike.setdefault(reason, []).append(str(gpu.index))
        why = "; ".join(f"GPU {', '.join(indexes)}: {reason}" for reason, indexes in alike.items())
        raise DeviceError(f'no GPU here can do "{mechanism}": {why}')
    for gpu, reason in reasons.items():
        if reason:
            logger.warning("%s (%s) is left out: %s", gpu.name, gpu.uuid, reason)
    return found


def _mps(gpu: Gpu, cuda: tuple[int, ...], *, starts_mps: bool) -> str:
    if gpu.mig:
        return "MIG is on; its instances are for the backend mig"
    if float(gpu.capability) < 7:
        return f"it needs Volta or newer (compute capability 7.0; this is {gpu.capability})"
    if cuda < (11, 5):
        return f"its limits of memory need a driver for CUDA 11.5 (this one is for {_dotted(cuda)})"
    if starts_mps and shutil.which(CONTROL) is None:
        return f"there is no `{CONTROL}`; it comes with the driver (in Debian's packages: nvidia-cuda-mps)"
    return _mode(gpu)


def _green(gpu: Gpu, cuda: tuple[int, ...]) -> str:
    if gpu.mig:
        return "MIG is on; its instances are for the backend mig"
    if cuda < (12, 5):
        return f"it needs a driver for CUDA 12.5 (this one is for {_dotted(cuda)})"
    for package in ("cuda.bindings", "torch"):
        try:
            there = find_spec(package) is not None
        except ModuleNotFoundError:  # not even `cuda`, where others of NVIDIA's packages are, too
            there = False
        if not there:
            return f"it needs the Python package {package!r}; install `cotenant[gpu]`"
    return _mode(gpu)


def _mode(gpu: Gpu) -> str:
    nvml = nvml_session()
    with nvml_errors(f"the GPU {gpu.uuid}"):
        mode = optional_reading(nvml, lambda: nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return f"its compute mode prohibits all contexts; `sudo nvidia-smi -i {gpu.index} -c DEFAULT` allows them"
    if mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and (there := gpu_processes(gpu.uuid)):
        return f"its compute mode lets one process in, and {there[0].pid} ({there[0].name}) is there; end it"
    return ""


def _mig(gpu: Gpu) -> str:
    if not gpu.mig:
        nvml = nvml_session()
        with nvml_errors(f"the GPU {gpu.uuid}"):
            mode = optional_reading(nvml, lambda: nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
        if mode is None:
            return "this GPU, or its driver, has no MIG"
        if mode[1] == nvml.NVML_DEVICE_MIG_ENABLE:
            return f"MIG will be on after a reset; `sudo nvidia-smi -i {gpu.index} --gpu-reset` does that"
        return f"MIG is off; `sudo nvidia-smi -i {gpu.index} -mig 1` turns it on, with nothing running on the GPU"
    if not gpu.instances:
        return "MIG is on, without an instance; let the server make them with `mig = { create = true }`"
    return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
