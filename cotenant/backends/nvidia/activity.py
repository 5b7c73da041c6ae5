"""Read the current activity of a GPU and the processes that use it."""

from __future__ import annotations

import msgspec

from cotenant.backends.nvidia.nvml import nvml_errors, nvml_session, optional_reading


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the current activity of a GPU; None for what it does not report.

    memory: bytes in use. utilisation, bandwidth: fraction of the last sampling period in which a kernel ran, or memory
    was accessed. power: watts. clock: of the SMs, MHz. temperature: °C.
    """

    memory: int | None
    utilisation: float | None
    bandwidth: float | None
    power: float | None
    clock: int | None
    temperature: int | None


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a compute process on a GPU.

    name: empty if this user may not see it. memory: bytes on the GPU; None if the driver does not tell. instance: MIG
    instance, if any.
    """

    pid: int
    name: str
    memory: int | None
    instance: int | None


def gpu_reading(uuid: str) -> GpuReading:
    """Read a GPU, or a MIG instance, which reports little but its memory."""
    nvml = nvml_session()
    with nvml_errors(f"the GPU {uuid}"):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        rates = optional_reading(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return GpuReading(
            memory=optional_reading(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            utilisation=None if rates is None else rates.gpu / 100,
            bandwidth=None if rates is None else rates.memory / 100,
            power=optional_reading(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            clock=optional_reading(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            temperature=optional_reading(
                nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        )


def gpu_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the compute processes on a GPU that are visible here; in a container, only its own."""
    nvml = nvml_session()
    with nvml_errors(f"the GPU {uuid}"):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        none = 0xFFFFFFFF
        return tuple(
            GpuProcess(
                pid=process.pid,
                name=optional_reading(nvml, lambda pid=process.pid: nvml.nvmlSystemGetProcessName(pid)) or "",  # type: ignore[misc]
                memory=process.usedGpuMemory,
                instance=None if process.gpuInstanceId == none else process.gpuInstanceId,
            )
            for process in optional_reading(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        )
