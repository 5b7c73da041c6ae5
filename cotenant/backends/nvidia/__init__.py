"""Query NVIDIA's GPUs by NVML: which there are, their activity, their capabilities, and whether they are lost.

NVML opens no CUDA context and takes no memory of a device, so a server may ask at any time. Everything raises
DeviceError with the way out where there is no driver, or one that does not answer. GPUs are told by their UUID, which
is what CUDA_VISIBLE_DEVICES takes; an index depends on who looks.
"""

from __future__ import annotations

from cotenant.backends.nvidia.activity import GpuProcess, GpuReading, gpu_processes, gpu_reading
from cotenant.backends.nvidia.cards import (
    Gpu,
    MigInstance,
    capacity_fingerprint,
    device_kinds,
    driver_version,
    gpus_by_device,
    list_gpus,
    mig_instances,
    mig_profiles,
    select_gpus,
    with_distinct_kinds,
)
from cotenant.backends.nvidia.nvml import nvml_error_text, nvml_errors, nvml_session, optional_reading
from cotenant.backends.nvidia.sharing_modes import CONTROL, available_sharing_modes, select_shareable
from cotenant.backends.nvidia.watch import HUNG, LOOK, SILENT, WATCH, DeviceWatch

__all__ = [
    "CONTROL",
    "HUNG",
    "LOOK",
    "SILENT",
    "WATCH",
    "DeviceWatch",
    "Gpu",
    "GpuProcess",
    "GpuReading",
    "MigInstance",
    "available_sharing_modes",
    "capacity_fingerprint",
    "device_kinds",
    "driver_version",
    "gpu_processes",
    "gpu_reading",
    "gpus_by_device",
    "list_gpus",
    "mig_instances",
    "mig_profiles",
    "nvml_error_text",
    "nvml_errors",
    "nvml_session",
    "optional_reading",
    "select_gpus",
    "select_shareable",
    "with_distinct_kinds",
]
