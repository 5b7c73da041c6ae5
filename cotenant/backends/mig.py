"""Use MIG instances, found by UUID: partitions in hardware with their own SMs, cache and memory.

The instances of a GPU are its geometry, and plans use exactly those. Partitioning is the operator's job: instances are
created only with `create`, and only on GPUs without any, one per lane and from the end of the GPU, so that a plan's
instances fit if the largest come first. They are destroyed with their lane. Existing instances are never destroyed by
this backend, and one on which others compute is not used. `cut_gpu` cuts an idle GPU anew, for whoever may.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cotenant.backends import Launch, nvidia, sibling_of
from cotenant.backends.nvidia import Gpu, nvml_error_text, nvml_errors, nvml_session
from cotenant.core import mig
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE, show_share
from cotenant.errors import DeviceError

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"(?:MIG )?(\d+g\.\d+gb)")  # others, such as 1g.18gb+me, have media engines, useless for serving


class _Part(msgspec.Struct):
    """Hold an instance at run time. made: handles of its compute and GPU instance, if it was created here."""

    uuid: str
    profile: str
    share: int
    memory: int
    lanes: set[LaneId]
    made: tuple[Any, Any] | None = None


class Mig:
    name = "mig"
    divides = False

    def __init__(self, gpus: Sequence[Gpu], *, create: bool = False) -> None:
        """create: create instances on GPUs that have none. GPUs without MIG or usable instances are left out. Raises
        DeviceError if none is left."""
        reasons = {gpu: "" if create and gpu.mig else nvidia.available_sharing_modes(gpu)["mig"] for gpu in gpus}
        usable = {gpu: _free(gpu) for gpu, reason in reasons.items() if not reason}
        for gpu, parts in usable.items():
            if gpu.instances and not parts:
                reasons[gpu] = "others compute on all of its instances"
        for gpu, reason in reasons.items():
            if reason:
                logger.warning("%s (%s) is left out: %s", gpu.name, gpu.uuid, reason)
        usable = {gpu: parts for gpu, parts in usable.items() if not reasons[gpu]}
        if not usable:
            why = f"{gpus[0].name} ({gpus[0].uuid}): {reasons[gpus[0]]}" if gpus else "this machine has no NVIDIA GPU"
            raise DeviceError(f'backend = "mig" finds no GPU to use: {why}')
        self._geometries = {gpu.uuid: _geometry(gpu, parts) for gpu, parts in usable.items()}
        own = {gpu.uuid: parts for gpu, parts in usable.items()}
        cuts = {uuid: [part.profile for part in parts] for uuid, parts in own.items()}
        self._gpus = nvidia.gpus_by_device(nvidia.with_distinct_kinds(list(usable), cuts))
        self._parts = {name: own[gpu.uuid] for name, gpu in self._gpus.items()}
        self._watch = nvidia.DeviceWatch(self._gpus)
        self._end = weakref.finalize(self, _end, self._watch, self._parts)  # also when this process exits

    def fleet(self) -> tuple[Kind, ...]:
        whole = {gpu.kind: self._geometries[gpu.uuid] for gpu in self._gpus.values()}
        return tuple(
            msgspec.structs.replace(
                kind,
                memory=max(instance.memory for instance in mig.instances(whole[kind.name])),
                cuts=mig.instance_shares(whole[kind.name]),
                geometry=whole[kind.name],
            )
            for kind in nvidia.device_kinds(self._gpus.values())
        )

    def capacity_fingerprint(self) -> str:
        return nvidia.capacity_fingerprint(self._gpus.values())

    def isolation(self) -> str:
        return "MIG instances: SMs, cache and memory separated in hardware"

    def hardware_ids(self) -> tuple[str, ...]:
        return ()  # others may have other instances of a GPU; those in use are left out

    def with_ceilings(self) -> Mig:
        return self

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        """Assign the instance of the partition's other worker, or else a free one of that share, the one with the most
        memory, or create one.

        Raises DeviceError if there is none.
        """
        device = lane.device
        if device not in self._gpus:
            raise DeviceError(f"lane {lane!r}: there is no device {device!r}; available: {', '.join(self._gpus)}")
        fitting = sorted((p for p in self._parts[device] if p.share == share), key=lambda part: -part.memory)
        part = next((part for part in fitting if sibling_of(lane, part.lanes) is not None), None)
        if part is None:
            part = next((part for part in fitting if not part.lanes), None)
        if part is None and not self._gpus[device].instances:
            part = self._make(device, share)
        if part is None:
            part = next((part for part in fitting if part.lanes <= set(leaving)), None)
        if part is None:
            cut = ", ".join(part.profile for part in self._parts[device]) or "nothing"
            raise DeviceError(
                f"{device} has no free MIG instance of {show_share(share)}, and no room for one; it is cut into {cut}"
            )
        part.lanes.add(lane)
        return Launch(env={"CUDA_VISIBLE_DEVICES": part.uuid}, cuda=True)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        raise DeviceError(f"{self.name}: a share needs a worker of its own: {', '.join(shares)}")

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        pass

    def close(self, lane: LaneId) -> None:
        for parts in self._parts.values():
            for part in [part for part in parts if lane in part.lanes]:
                part.lanes.remove(lane)
                if part.made and not part.lanes and _destroyed(part):
                    parts.remove(part)

    def stop(self) -> None:
        """Destroy the instances that were created here."""
        self._end()

    def open_job(self, device: DeviceId) -> Launch:
        raise DeviceError(f"{device}: every MIG instance is a partition's, which leaves none to a job")

    def lost(self) -> dict[DeviceId, str]:
        return self._watch.lost()

    def _make(self, device: DeviceId, share: int) -> _Part | None:
        """Create an instance; None if there is no room."""
        nvml = nvml_session()
        with nvml_errors(f"a MIG instance of {show_share(share)} on {device}"):
            handle = nvml.nvmlDeviceGetHandleByUUID(self._gpus[device].uuid)
            info = _offered(nvml, handle).get(share)
            if info is None or (whole := _placed(nvml, handle, info)) is None:
                return None
            try:
                compute = _with_compute(nvml, whole, info.sliceCount)
            except nvml.NVMLError:
                nvml.nvmlGpuInstanceDestroy(whole)
                raise
            number = nvml.nvmlGpuInstanceGetInfo(whole).id
            instance = next(one for one in nvidia.mig_instances(nvml, handle) if one.id == number)
        part = _Part(instance.uuid, instance.profile, share, instance.memory, set(), (compute, whole))
        self._parts[device].append(part)
        return part


def _end(watch: nvidia.DeviceWatch, parts: dict[DeviceId, list[_Part]]) -> None:
    """Destroy the instances that were created here."""
    watch.close()
    for part in [part for some in parts.values() for part in some if part.made]:
        _destroyed(part)


def _free(gpu: Gpu) -> list[_Part]:
    """Return the instances without processes."""
    free = []
    for each in gpu.instances:
        if others := nvidia.gpu_processes(each.uuid):
            other, name = others[0], others[0].name or "a process"
            logger.warning("%s of %s is left out: %s (%d) computes there", each.profile, gpu.uuid, name, other.pid)
        else:
            free.append(_Part(each.uuid, each.profile, each.share, each.memory, set()))
    return free


def _geometry(gpu: Gpu, parts: Iterable[_Part]) -> str:
    """Return the GPU's geometry: its instances or, if it has none, those that it can have."""
    if gpu.instances:
        return mig.fixed_geometry((part.profile, part.share, part.memory) for part in parts)
    nvml = nvml_session()
    with nvml_errors(f"what {gpu.uuid} can be cut into"):
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        offered = _offered(nvml, handle)
        return mig.geometry_name(
            mig.Instance(
                _name(info), share, info.memorySizeMB << 20, places[0].size, tuple(each.start for each in places)
            )
            for share, info in offered.items()
            if (places := _placements(nvml, handle, info))
        )


def _name(info: Any) -> str:
    match = _PLAIN.fullmatch(info.name)
    return match[1] if match else ""


def _offered(nvml: Any, handle: Any) -> dict[int, Any]:
    """Return the instance profiles that can be created, by share; of each share that with the least memory."""
    infos = [info for info in nvidia.mig_profiles(nvml, handle) if _name(info)]
    slices = max((info.sliceCount for info in infos), default=1)
    profiles: dict[int, Any] = {}
    for info in sorted(infos, key=lambda info: info.memorySizeMB):
        profiles.setdefault(WHOLE * info.sliceCount // slices, info)
    return profiles


def _placements(nvml: Any, handle: Any, info: Any) -> list[Any]:
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, None, ctypes.byref(count))
    places = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, places, ctypes.byref(count))
    return list(places[: count.value])


def _placed(nvml: Any, handle: Any, info: Any) -> Any:
    """Create a GPU instance as close to the end of the GPU as possible; None if there is no room."""
    for place in sorted(_placements(nvml, handle, info), key=lambda place: -place.start):
        try:
            return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, info.id, ctypes.byref(place))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_INSUFFICIENT_RESOURCES:
                raise
    return None


def _with_compute(nvml: Any, whole: Any, slices: int) -> Any:
    """Create the compute instance of all slices, without which nothing runs on a GPU instance."""
    shared = nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(whole, number, shared)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            continue
        if info.sliceCount == slices:
            return nvml.nvmlGpuInstanceCreateComputeInstance(whole, info.id)
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)


def _destroyed(part: _Part) -> bool:
    """Destroy an instance; False while a process is still exiting, when the next lane may use it."""
    assert part.made is not None
    nvml = nvml_session()
    compute, whole = part.made
    try:
        nvml.nvmlComputeInstanceDestroy(compute)
    except nvml.NVMLError as error:
        logger.warning("the MIG instance %s (%s) stays: %s", part.profile, part.uuid, nvml_error_text(nvml, error))
        return False
    with contextlib.suppress(nvml.NVMLError):  # `nvidia-smi mig -dgi` removes what is left
        nvml.nvmlGpuInstanceDestroy(whole)
    return True


def cut_gpu(uuid: str, shares: Sequence[int]) -> None:
    """Cut a GPU into MIG instances of these shares (‰), the largest first, instead of those that it has. They stay when
    this process ends.

    Raises DeviceError where a process computes on it, or the instances do not fit together; what is left then can be
    cut again.
    """
    nvml = nvml_session()
    if processes := nvidia.gpu_processes(uuid):
        raise DeviceError(f"{uuid}: {processes[0].name or 'a process'} ({processes[0].pid}) computes on it")
    with nvml_errors(f"a cut of {uuid}"):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        _clear(nvml, handle)
        offered = _offered(nvml, handle)
        for share in sorted(shares, reverse=True):
            info = offered.get(share)
            if info is None or (whole := _placed(nvml, handle, info)) is None:
                have = ", ".join(show_share(each) for each in offered)
                raise DeviceError(f"{uuid}: no room for a MIG instance of {show_share(share)}; available: {have}")
            _with_compute(nvml, whole, info.sliceCount)


def _clear(nvml: Any, handle: Any) -> None:
    """Destroy all instances of a GPU on which something could compute."""
    every = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    found = [
        nvidia.optional_reading(nvml, lambda i=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))  # type: ignore[misc]
        for index in every
    ]
    parts = [
        (nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part))
        for part in found
        if part is not None
    ]
    wholes = {number: nvml.nvmlDeviceGetGpuInstanceById(handle, number) for number, _ in parts}
    for number, compute in parts:
        nvml.nvmlComputeInstanceDestroy(nvml.nvmlGpuInstanceGetComputeInstanceById(wholes[number], compute))
    for whole in wholes.values():
        nvml.nvmlGpuInstanceDestroy(whole)
