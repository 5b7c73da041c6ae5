"""Read the GPUs of this machine: what they are, how they are cut, and how much they are used."""

from __future__ import annotations

import logging

import msgspec

from cotenant.backends.nvidia import Gpu, GpuReading, gpu_processes, gpu_reading, list_gpus
from cotenant.errors import DeviceError
from cotenant.k8s.pods.inventory import DeviceReport, InstanceReport

logger = logging.getLogger(__name__)


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU was found to be and to do. name: of the product. processes: that compute on it, as far as they are
    seen from here. used: bytes taken, by UUID of the GPU and of its MIG instances."""

    report: DeviceReport
    name: str
    utilisation: float | None
    bandwidth: float | None
    power: float | None
    processes: int
    used: dict[str, int]


def read_devices(*, recut: bool = False) -> tuple[DeviceReading, ...]:
    """Read all GPUs; one that does not answer is left out, and logged. recut: those with MIG may be cut anew while
    nobody uses them. Raises DeviceError without a driver."""
    found = []
    for gpu in list_gpus():
        try:
            found.append(_reading(gpu, recut=recut))
        except DeviceError as error:
            logger.warning("%s is left out: %s", gpu.uuid, error)
    return tuple(found)


def _reading(gpu: Gpu, *, recut: bool) -> DeviceReading:
    now: GpuReading = gpu_reading(gpu.uuid)
    used = {gpu.uuid: now.memory} | {one.uuid: gpu_reading(one.uuid).memory for one in gpu.instances}
    return DeviceReading(
        report=DeviceReport(
            uuid=gpu.uuid,
            kind=gpu.kind,
            memory=gpu.memory,
            mig=gpu.mig,
            recut=recut and gpu.mig,
            instances=tuple(
                InstanceReport(uuid=one.uuid, profile=one.profile, share=one.share, memory=one.memory)
                for one in gpu.instances
            ),
        ),
        name=gpu.name,
        utilisation=now.utilisation,
        bandwidth=now.bandwidth,
        power=now.power,
        processes=len(gpu_processes(gpu.uuid)),
        used={uuid: memory for uuid, memory in used.items() if memory is not None},
    )
