"""Find the GPUs of the node by NVML, without those that are lost."""

from __future__ import annotations

import logging

from cotenant.backends import nvidia
from cotenant.backends.nvidia import DeviceWatch, Gpu, nvml_session
from cotenant.core.identity import DeviceId
from cotenant.k8s.dra.devices import Instance, NodeDevice

logger = logging.getLogger(__name__)


class GpuDiscovery:
    """Look for GPUs again and again, from any thread, one at a time."""

    def __init__(self) -> None:
        self._watches: list[tuple[dict[DeviceId, Gpu], DeviceWatch]] = []
        self._known: dict[str, Gpu] = {}  # by UUID, in the order of discovery
        self._told: dict[str, str] = {}  # GPU → why it is left out

    def look(self) -> tuple[NodeDevice, ...]:
        """Return the GPUs that work. Raises DeviceError where there is no driver, or one that does not answer."""
        lost = self._find_lost()
        reasons: dict[str, str] = {}
        gpus = nvidia.list_gpus(lambda index, reason: reasons.update({str(index): reason}))
        self._watch([gpu for gpu in gpus if not self._is_watched(gpu)])
        lost |= self._find_lost()
        self._tell(reasons | lost)
        here = {gpu.uuid: gpu for gpu in gpus}
        self._known |= here
        # Those that are gone keep their numbers, so that no other takes them.
        named = nvidia.gpus_by_device(self._known.values())
        return tuple(_device(device, gpu) for device, gpu in named.items() if gpu.uuid in here and gpu.uuid not in lost)

    def close(self) -> None:
        """Watch no longer."""
        for _, watch in self._watches:
            watch.close()

    def _is_watched(self, gpu: Gpu) -> bool:
        return any(gpu.uuid == other.uuid for watched, _ in self._watches for other in watched.values())

    def _watch(self, gpus: list[Gpu]) -> None:
        """Watch more GPUs. Those that are watched already stay so: what has become of them is kept there."""
        if gpus:
            named = nvidia.gpus_by_device(gpus)
            self._watches.append((named, DeviceWatch(named)))

    def _tell(self, reasons: dict[str, str]) -> None:
        """Log what has changed: the same is found every few seconds."""
        for gpu, reason in reasons.items():
            if self._told.get(gpu) != reason:
                logger.warning("GPU %s is left out: %s", gpu, reason)
        for gpu in self._told.keys() - reasons.keys():
            logger.info("GPU %s is there again", gpu)
        self._told = reasons

    def _find_lost(self) -> dict[str, str]:
        return {
            watched[device].uuid: reason for watched, watch in self._watches for device, reason in watch.lost().items()
        }


def _device(device: DeviceId, gpu: Gpu) -> NodeDevice:
    reasons = nvidia.available_sharing_modes(gpu, starts_mps=False)  # the daemon of MPS is the node's
    modes = tuple(mode for mode, reason in reasons.items() if not reason)
    instances = tuple(
        Instance(uuid=each.uuid, profile=each.profile, share=each.share, memory=each.memory) for each in gpu.instances
    )
    return NodeDevice(
        uuid=gpu.uuid,
        kind=device.kind,
        index=device.index,
        product=gpu.name,
        memory=gpu.memory,
        modes=modes,
        mig=gpu.mig,
        instances=instances,
        minor=_minor(gpu),
    )


def _minor(gpu: Gpu) -> int | None:
    nvml = nvml_session()
    try:
        return int(nvml.nvmlDeviceGetMinorNumber(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
    except nvml.NVMLError:
        return None
