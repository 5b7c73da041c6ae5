"""List GPUs, name them as devices, and select some of them."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotenant.backends.nvidia.nvml import nvml_error_text, nvml_errors, nvml_session, optional_reading
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.errors import DeviceError

logger = logging.getLogger(__name__)

# CUDA cores of one multiprocessor, by compute capability (CUDA C++ programming guide, "Compute Capabilities").
_CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64} | dict.fromkeys(
    [(8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], 128
)


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a MIG instance with all of its compute slices.

    id: of the GPU instance, on its GPU. profile: such as ``3g.71gb``. share: its slices of those of the GPU, in ‰,
    rounded down. memory: bytes.
    """

    uuid: str
    id: int
    profile: str
    share: int
    memory: int
    multiprocessors: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """kind: the name that its kind of devices has, such as ``h200``, and ``h200-mig`` where MIG is on.

    memory: bytes. multiprocessors: 0 where the driver does not say. capability: such as ``9.0``. instances: where MIG
    is on, those that it is cut into, by their place on it.
    """

    index: int
    uuid: str
    name: str
    kind: str
    memory: int
    multiprocessors: int
    capability: str
    mig: bool = False
    instances: tuple[MigInstance, ...] = ()


def _log_left_out(index: int, reason: str) -> None:
    logger.warning("GPU %d is left out: %s", index, reason)


def list_gpus(left_out: Callable[[int, str], None] = _log_left_out) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine or container in bus order, without those that do not answer. left_out: called
    with the index of each of these and the reason; logs it unless told otherwise."""
    nvml = nvml_session()
    with nvml_errors("the GPUs of this machine"):
        count = nvml.nvmlDeviceGetCount()
    gpus = []
    for index in range(count):
        try:
            gpus.append(_gpu(nvml, index))
        except nvml.NVMLError as error:
            left_out(index, nvml_error_text(nvml, error))
    return with_distinct_kinds(gpus, {gpu.uuid: [one.profile for one in gpu.instances] for gpu in gpus})


def driver_version() -> tuple[str, str]:
    """Return the versions of the driver and of the newest CUDA that it supports, such as ``580.95.05`` and ``13.0``."""
    nvml = nvml_session()
    with nvml_errors("the version of the driver"):
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return nvml.nvmlSystemGetDriverVersion(), f"{number // 1000}.{number % 1000 // 10}"


def select_gpus(every: Sequence[Gpu], wanted: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """Select GPUs by index or UUID (or a prefix of it); by default those in CUDA_VISIBLE_DEVICES, or all. The UUID of
    a MIG instance selects its GPU with that instance only."""
    place = "gpu.devices"
    if not wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return tuple(every)
        place = "CUDA_VISIBLE_DEVICES"
        wanted = [text.strip() for text in visible.split(",")]
        if wanted[0] in ("", "-1"):
            raise DeviceError("CUDA_VISIBLE_DEVICES hides all GPUs; unset it, or name some")
    meant: dict[Gpu, set[str]] = {}  # GPU → its instances that are meant
    for text in wanted:
        matching = [gpu for gpu in every if _meant(gpu, text)]
        if len(matching) != 1:
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in every) or "none"
            what = "several GPUs begin with" if matching else "no GPU"
            raise DeviceError(f"{place}: {what} {text!r}; available: {there}")
        (gpu,) = matching
        parts = {one.uuid for one in gpu.instances}
        meant.setdefault(gpu, set()).update({text} if text in parts else parts)
    return tuple(
        msgspec.structs.replace(gpu, instances=tuple(one for one in gpu.instances if one.uuid in parts))
        for gpu, parts in meant.items()
    )


def _meant(gpu: Gpu, text: str) -> bool:
    if text.isdecimal():
        return gpu.index == int(text)
    return (text.startswith("GPU-") and gpu.uuid.startswith(text)) or text in {one.uuid for one in gpu.instances}


def with_distinct_kinds(some: Sequence[Gpu], cuts: Mapping[str, Sequence[str]]) -> tuple[Gpu, ...]:
    """Give GPUs of one product with different instances different kinds. cuts: instance profiles by the GPU's UUID."""
    pieces = {uuid: Counter(profiles) for uuid, profiles in cuts.items()}
    distinct = []
    for gpu in some:
        if any(pieces[other.uuid] != pieces[gpu.uuid] for other in some if other.kind == gpu.kind):
            cut = "-".join(f"{n}x{name}" if n > 1 else name for name, n in sorted(pieces[gpu.uuid].items())[::-1])
            gpu = msgspec.structs.replace(gpu, kind=f"{gpu.kind}-{cut or 'uncut'}")
        distinct.append(gpu)
    return tuple(distinct)


def gpus_by_device(some: Iterable[Gpu]) -> dict[DeviceId, Gpu]:
    """Return GPUs by their device ids: those of a kind are numbered."""
    count: Counter[str] = Counter()
    names = {}
    for gpu in some:
        names[DeviceId(gpu.kind, count[gpu.kind])] = gpu
        count[gpu.kind] += 1
    return names


def device_kinds(
    some: Iterable[Gpu], cuts: Callable[[Gpu], tuple[int, ...]] = lambda gpu: (WHOLE,)
) -> tuple[Kind, ...]:
    """Return the kinds of these GPUs with their counts. cuts: legal shares of a GPU, in ‰."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in some:
        groups.setdefault(gpu.kind, []).append(gpu)
    return tuple(
        Kind(name=name, count=len(group), memory=min(gpu.memory for gpu in group), cuts=cuts(group[0]))
        for name, group in groups.items()
    )


def capacity_fingerprint(some: Iterable[Gpu]) -> str:
    """Describe these GPUs, in words that change when they do."""
    version, cuda = driver_version()
    cards = sorted({f"{gpu.name}, {gpu.multiprocessors} multiprocessors" for gpu in some})
    return f"{'; '.join(cards)}; driver {version}, CUDA {cuda}"


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    mode = optional_reading(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    mig = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
    memory = optional_reading(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total) or 0
    if mig:  # with MIG on, only root may query the whole GPU
        offered = mig_profiles(nvml, handle)
        memory = memory or max((info.memorySizeMB << 20 for info in offered), default=0)
        multiprocessors = max((info.multiprocessorCount for info in offered), default=0)
    else:
        cores = optional_reading(nvml, lambda: nvml.nvmlDeviceGetNumGpuCores(handle)) or 0
        multiprocessors = cores // _CORES.get(tuple(capability), cores + 1)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=name,
        kind=_slug(name) + ("-mig" if mig else ""),
        memory=memory,
        multiprocessors=multiprocessors,
        capability=".".join(map(str, capability)),
        mig=mig,
        instances=tuple(mig_instances(nvml, handle)) if mig else (),
    )


def mig_profiles(nvml: Any, handle: Any) -> list[Any]:
    """Return the instance profiles of a GPU with MIG, as NVML describes them."""
    every = range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT)

    def read(number: int) -> Any:
        return optional_reading(nvml, lambda: nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number))

    found = [read(number) for number in every]
    return [info for info in found if info is not None]


def mig_instances(nvml: Any, handle: Any) -> Iterator[MigInstance]:
    """Return the instances of a GPU, without those whose compute is divided."""
    slices = max((info.sliceCount for info in mig_profiles(nvml, handle)), default=7)
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        it = optional_reading(nvml, lambda i=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))  # type: ignore[misc]
        if it is None:
            continue
        attributes = nvml.nvmlDeviceGetAttributes(it)
        if attributes.computeInstanceSliceCount == attributes.gpuInstanceSliceCount:
            yield MigInstance(
                uuid=nvml.nvmlDeviceGetUUID(it),
                id=nvml.nvmlDeviceGetGpuInstanceId(it),
                profile=nvml.nvmlDeviceGetName(it).rpartition(" ")[2],
                share=WHOLE * attributes.gpuInstanceSliceCount // slices,
                memory=attributes.memorySizeMB << 20,
                multiprocessors=attributes.multiprocessorCount,
            )


def _slug(name: str) -> str:
    """Return a name as a slug: ``NVIDIA A100-SXM4-80GB`` → ``a100-sxm4-80gb``."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^(NVIDIA|Tesla|\s)+", "", name).lower()).strip("-")
