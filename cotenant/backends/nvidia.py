"""NVIDIA's GPUs as NVML shows them: which there are, what they do, what they can, and whether they are still there.

NVML opens no CUDA context and takes no memory of a device, so a server may ask at any time. Everything raises
DeviceError with the way out where there is no driver, or one that does not answer. GPUs are told by their UUID, which
is what CUDA_VISIBLE_DEVICES takes; an index depends on who looks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

from cotenant.core.model import Kind
from cotenant.core.plan import device_name
from cotenant.core.units import WHOLE
from cotenant.errors import DeviceError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CONTROL = "nvidia-cuda-mps-control"  # the program that MPS is run with
WATCH = "cotenant-gpus"  # the name of threads that look whether all GPUs are there
LOOK = 0.25  # seconds between two of their looks
HUNG = 5.0  # seconds after which a driver that does not answer counts as lost
SILENT = "NVIDIA's driver does not answer; `nvidia-smi` and the kernel's log say more"

# CUDA cores of one multiprocessor, by compute capability (CUDA C++ programming guide, "Compute Capabilities").
_CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64} | dict.fromkeys(
    [(8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)], 128
)

# After these nothing runs on the GPU until somebody resets it (NVIDIA, "Analyzing Xid errors with the Xid catalog":
# those of an A100 or H100 whose immediate action is a reset or a restart). The others end a program, or warn.
FATAL = {
    46: "it stopped processing, and did not stop when told",
    62: "its controller halted",
    64: "a broken row of its memory could not be replaced",
    79: "it has fallen off the bus",
    95: "an error of its memory was not contained",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "an error of its memory was not recovered",
    143: "it could not be initialised",
}

# What the driver says has to be done before anything runs again (NVML's GPU recovery action); draining can wait.
_NEEDED = {
    1: "it needs a reset; `sudo nvidia-smi --gpu-reset` does that",
    2: "its machine has to be restarted",
    6: "its bus has to be reset",
    7: "its machine has to be restarted",
}


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance with all of its compute.

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
    instances: tuple[Instance, ...] = ()


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU does now; None where it does not say. memory: bytes in use. utilisation, bandwidth: the fraction of
    the last moments in which a kernel ran, or in which memory was read or written. power: watts. clock: of the
    multiprocessors, MHz. temperature: °C."""

    memory: int | None
    utilisation: float | None
    bandwidth: float | None
    power: float | None
    clock: int | None
    temperature: int | None


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that computes on a GPU. name: empty where this user may not see it. memory: bytes on the GPU, None
    where the driver does not say. instance: of MIG, if any."""

    pid: int
    name: str
    memory: int | None
    instance: int | None


def gpus() -> tuple[Gpu, ...]:
    """Those of this machine, or of this container, in the order of their place on the bus. One that does not answer is
    left out, and the log says so."""
    nvml = session()
    with asking("the GPUs of this machine"):
        count = nvml.nvmlDeviceGetCount()
    found = []
    for index in range(count):
        try:
            found.append(_gpu(nvml, index))
        except nvml.NVMLError as error:
            logger.warning("GPU %d is left out: %s", index, words(nvml, error))
    return apart(found, {gpu.uuid: [one.profile for one in gpu.instances] for gpu in found})


def driver() -> tuple[str, str]:
    """The versions of the driver and of the newest CUDA that it knows, such as ``580.95.05`` and ``13.0``."""
    nvml = session()
    with asking("the version of the driver"):
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return nvml.nvmlSystemGetDriverVersion(), f"{number // 1000}.{number % 1000 // 10}"


def readings(uuid: str) -> Reading:
    """Of a GPU, or of a MIG instance, of which little is known but its memory."""
    nvml = session()
    with asking(f"the GPU {uuid}"):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        rates = _known(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return Reading(
            memory=_known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            utilisation=None if rates is None else rates.gpu / 100,
            bandwidth=None if rates is None else rates.memory / 100,
            power=_known(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            clock=_known(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            temperature=_known(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )


def processes(uuid: str) -> tuple[Process, ...]:
    """Those that compute on a GPU now, and that this process may see: from within a container, those of it."""
    nvml = session()
    with asking(f"the GPU {uuid}"):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        none = 0xFFFFFFFF
        return tuple(
            Process(
                pid=it.pid,
                name=_known(nvml, lambda pid=it.pid: nvml.nvmlSystemGetProcessName(pid)) or "",  # type: ignore[misc]
                memory=it.usedGpuMemory,
                instance=None if it.gpuInstanceId == none else it.gpuInstanceId,
            )
            for it in _known(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
        )


def mechanisms(gpu: Gpu) -> dict[str, str]:
    """Each way to cut it: empty where it can be cut so here, else why not."""
    cuda = tuple(int(part) for part in driver()[1].split("."))
    return {"mps": _mps(gpu, cuda), "green": _green(gpu, cuda), "mig": _mig(gpu)}


def able(some: Sequence[Gpu], mechanism: str) -> tuple[Gpu, ...]:
    """Those that can be cut in that way here; the log tells the others. Raises DeviceError where there is none."""
    reasons = {gpu: mechanisms(gpu)[mechanism] for gpu in some}
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


def chosen(every: Sequence[Gpu], wanted: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """Those with these indexes or UUIDs (or beginnings of one); by default those in CUDA_VISIBLE_DEVICES, or all. By
    the UUID of an instance of MIG, a GPU with no others."""
    place = "gpu.devices"
    if not wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return tuple(every)
        place = "CUDA_VISIBLE_DEVICES"
        wanted = [text.strip() for text in visible.split(",")]
        if wanted[0] in ("", "-1"):
            raise DeviceError("CUDA_VISIBLE_DEVICES hides all GPUs; unset it, or name some")
    found: dict[Gpu, set[str]] = {}  # GPU → its instances that are meant
    for text in wanted:
        matching = [gpu for gpu in every if _meant(gpu, text)]
        if len(matching) != 1:
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in every) or "none"
            what = "several GPUs begin with" if matching else "no GPU"
            raise DeviceError(f"{place}: {what} {text!r}; there is {there}")
        (gpu,) = matching
        parts = {one.uuid for one in gpu.instances}
        found.setdefault(gpu, set()).update({text} if text in parts else parts)
    return tuple(
        msgspec.structs.replace(gpu, instances=tuple(one for one in gpu.instances if one.uuid in parts))
        for gpu, parts in found.items()
    )


def _meant(gpu: Gpu, text: str) -> bool:
    if text.isdecimal():
        return gpu.index == int(text)
    return (text.startswith("GPU-") and gpu.uuid.startswith(text)) or text in {one.uuid for one in gpu.instances}


def apart(some: Sequence[Gpu], cuts: Mapping[str, Sequence[str]]) -> tuple[Gpu, ...]:
    """With kinds by which GPUs of one product differ that are cut differently. cuts: profiles by the GPU's UUID."""
    pieces = {uuid: Counter(profiles) for uuid, profiles in cuts.items()}
    found = []
    for gpu in some:
        if any(pieces[other.uuid] != pieces[gpu.uuid] for other in some if other.kind == gpu.kind):
            cut = "-".join(f"{n}x{name}" if n > 1 else name for name, n in sorted(pieces[gpu.uuid].items())[::-1])
            gpu = msgspec.structs.replace(gpu, kind=f"{gpu.kind}-{cut or 'uncut'}")
        found.append(gpu)
    return tuple(found)


def named(some: Iterable[Gpu]) -> dict[str, Gpu]:
    """By the names that they have as devices of a fleet: those of a kind are numbered."""
    count: Counter[str] = Counter()
    names = {}
    for gpu in some:
        names[device_name(gpu.kind, count[gpu.kind])] = gpu
        count[gpu.kind] += 1
    return names


def kinds(some: Iterable[Gpu], cuts: Callable[[Gpu], tuple[int, ...]] = lambda gpu: (WHOLE,)) -> tuple[Kind, ...]:
    """The kinds of these GPUs, each with as many devices as there are. cuts: the legal shares of one, in ‰."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in some:
        groups.setdefault(gpu.kind, []).append(gpu)
    return tuple(
        Kind(name=name, count=len(group), memory=min(gpu.memory for gpu in group), cuts=cuts(group[0]))
        for name, group in groups.items()
    )


def size(some: Iterable[Gpu]) -> str:
    """What these are, in words that change when they do."""
    version, cuda = driver()
    cards = sorted({f"{gpu.name}, {gpu.multiprocessors} multiprocessors" for gpu in some})
    return f"{'; '.join(cards)}; driver {version}, CUDA {cuda}"


class Watch:
    """Says which of some devices are lost: gone from the bus, in need of a reset, or after a fatal Xid.

    A thread asks the driver, since that may hang when a GPU is lost; `lost` never waits for longer than its first look.
    A fatal Xid counts until this process ends. What comes back of itself is there again.
    """

    def __init__(self, devices: Mapping[str, Gpu]) -> None:
        """devices: by their names, as `named` gives them."""
        self._devices = dict(devices)
        self._lost: dict[str, str] = {}
        self._broken: dict[str, str] = {}  # device → after which Xid, and what it means
        self._begun = math.inf  # when the look that is under way began
        self._looked = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def lost(self) -> dict[str, str]:
        """Device name → why nothing can run on it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=WATCH, daemon=True)
            self._thread.start()
            self._looked.wait(HUNG)
        if time.monotonic() - self._begun > HUNG:
            return dict.fromkeys(self._devices, SILENT)
        return dict(self._lost)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(HUNG)

    def _run(self) -> None:
        self._begun = time.monotonic()
        nvml = session()
        events = self._register(nvml)
        while not self._closed.wait(LOOK if self._looked.is_set() else 0.0):
            self._begun = time.monotonic()
            if events is not None:
                self._listen(nvml, events)
            self._lost = {
                name: reason
                for name, gpu in self._devices.items()
                if (reason := self._broken.get(name) or _gone(nvml, gpu.uuid))
            }
            self._looked.set()
            self._begun = math.inf
        if events is not None:
            with contextlib.suppress(nvml.NVMLError):  # the driver went before
                nvml.nvmlEventSetFree(events)

    def _register(self, nvml: Any) -> Any:
        """A set of events that gets the devices' Xids; None where the driver offers none."""
        events = None
        for gpu in self._devices.values():
            with contextlib.suppress(nvml.NVMLError):  # such a device is only asked whether it is there
                events = events or nvml.nvmlEventSetCreate()
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _listen(self, nvml: Any, events: Any) -> None:
        """Take the events that have come in."""
        names = {gpu.uuid: name for name, gpu in self._devices.items()}
        with contextlib.suppress(nvml.NVMLError):  # a timeout: there are no more
            while True:
                event = nvml.nvmlEventSetWait(events, 0)
                name = names[nvml.nvmlDeviceGetUUID(event.device)]
                xid = int(event.eventData)
                logger.warning("%s reports Xid %d%s", name, xid, f": {FATAL[xid]}" if xid in FATAL else "")
                if xid in FATAL:
                    self._broken[name] = f"Xid {xid}, {FATAL[xid]}; reset it, then start the server again"


def _gone(nvml: Any, uuid: str) -> str:
    """Why this GPU cannot be used now; empty where it can."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        _known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        action = _known(
            nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
        )
    except nvml.NVMLError as error:
        return words(nvml, error)
    if action is None or action.nvmlReturn != nvml.NVML_SUCCESS:  # a driver that does not know of such actions
        return ""
    return _NEEDED.get(action.value.uiVal, "")


@functools.cache
def session() -> Any:
    """pynvml, connected to the driver until this process ends."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise DeviceError("NVIDIA GPUs need nvidia-ml-py; install `cotenant[gpu]`") from None
    with asking(""):
        pynvml.nvmlInit()
    return pynvml


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Turn the driver's refusal to tell or do that into DeviceError."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        raise DeviceError(f"{what}: {words(pynvml, error)}".removeprefix(": ")) from None


def words(nvml: Any, error: Any) -> str:
    """Why the driver refused, and the way out."""
    known = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
            "no NVIDIA driver was found (there is no libnvidia-ml.so.1); install it, in a container start that with "
            '`--gpus all`, or serve on the CPU with backend = "cpu"'
        ),
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: (
            "NVIDIA's driver is installed, but not loaded; `sudo modprobe nvidia` loads it, and `nvidia-smi` says more"
        ),
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "NVIDIA's driver was updated while an older one is still loaded; restart the machine"
        ),
        nvml.NVML_ERROR_NO_PERMISSION: (
            "this user may not ask NVIDIA's driver that; run as root, or see to the rights of /dev/nvidia*"
        ),
        nvml.NVML_ERROR_GPU_IS_LOST: "it is off the bus, or cannot be reached; reset it, or restart the machine",
        nvml.NVML_ERROR_RESET_REQUIRED: _NEEDED[1],
        nvml.NVML_ERROR_IN_USE: "somebody still computes on it",
        nvml.NVML_ERROR_NOT_FOUND: "it is not there; `nvidia-smi -L` lists what is",
    }
    return known.get(error.value, f"NVIDIA's driver says: {error}")


def _known(nvml: Any, ask: Callable[[], _T]) -> _T | None:
    """What the driver answers, or None where this GPU, this driver or this user is not given that."""
    try:
        return ask()
    except nvml.NVMLError as error:
        withheld = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_NOT_FOUND,
        )
        if error.value not in withheld:
            raise
        return None


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    mode = _known(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    mig = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
    memory = _known(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total) or 0
    if mig:  # then only root is told about the GPU as a whole
        offered = profiles(nvml, handle)
        memory = memory or max((info.memorySizeMB << 20 for info in offered), default=0)
        multiprocessors = max((info.multiprocessorCount for info in offered), default=0)
    else:
        cores = _known(nvml, lambda: nvml.nvmlDeviceGetNumGpuCores(handle)) or 0
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
        instances=tuple(instances(nvml, handle)) if mig else (),
    )


def profiles(nvml: Any, handle: Any) -> list[Any]:
    """What a GPU with MIG can be cut into, as NVML describes it."""
    every = range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
    found = [_known(nvml, lambda n=number: nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, n)) for number in every]  # type: ignore[misc]
    return [info for info in found if info is not None]


def instances(nvml: Any, handle: Any) -> Iterator[Instance]:
    """Those on a GPU now. One whose compute is cut again is left out."""
    slices = max((info.sliceCount for info in profiles(nvml, handle)), default=7)
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        it = _known(nvml, lambda i=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))  # type: ignore[misc]
        if it is None:
            continue
        attributes = nvml.nvmlDeviceGetAttributes(it)
        if attributes.computeInstanceSliceCount == attributes.gpuInstanceSliceCount:
            yield Instance(
                uuid=nvml.nvmlDeviceGetUUID(it),
                id=nvml.nvmlDeviceGetGpuInstanceId(it),
                profile=nvml.nvmlDeviceGetName(it).rpartition(" ")[2],
                share=WHOLE * attributes.gpuInstanceSliceCount // slices,
                memory=attributes.memorySizeMB << 20,
                multiprocessors=attributes.multiprocessorCount,
            )


def _slug(name: str) -> str:
    """``NVIDIA A100-SXM4-80GB`` → ``a100-sxm4-80gb``."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^(NVIDIA|Tesla|\s)+", "", name).lower()).strip("-")


def _mps(gpu: Gpu, cuda: tuple[int, ...]) -> str:
    if gpu.mig:
        return "MIG is on; its instances are for the backend mig"
    if float(gpu.capability) < 7:
        return f"it needs Volta or newer (compute capability 7.0; this is {gpu.capability})"
    if cuda < (11, 5):
        return f"its limits of memory need a driver for CUDA 11.5 (this one is for {_dotted(cuda)})"
    if shutil.which(CONTROL) is None:
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
    nvml = session()
    with asking(f"the GPU {gpu.uuid}"):
        mode = _known(nvml, lambda: nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return f"its compute mode prohibits all contexts; `sudo nvidia-smi -i {gpu.index} -c DEFAULT` allows them"
    if mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and (there := processes(gpu.uuid)):
        return f"its compute mode lets one process in, and {there[0].pid} ({there[0].name}) is there; end it"
    return ""


def _mig(gpu: Gpu) -> str:
    if not gpu.mig:
        nvml = session()
        with asking(f"the GPU {gpu.uuid}"):
            mode = _known(nvml, lambda: nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
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
