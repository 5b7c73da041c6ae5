"""Watch for lost GPUs."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from cotenant.backends.nvidia.cards import Gpu
from cotenant.backends.nvidia.nvml import NEEDED, nvml_error_text, nvml_session, optional_reading
from cotenant.core.identity import DeviceId

logger = logging.getLogger(__name__)

WATCH = "cotenant-gpus"  # name of the watching thread
LOOK = 0.25  # seconds between two checks
HUNG = 5.0  # seconds after which a driver that does not answer counts as lost
SILENT = "NVIDIA's driver does not answer; `nvidia-smi` and the kernel log have details"

# After these nothing runs on the GPU until somebody resets it (NVIDIA, "Analyzing Xid errors with the Xid catalog":
# those of an A100 or H100 whose immediate action is a reset or a restart). The others end a program, or warn.
FATAL = {
    46: "it stopped processing, and did not stop on request",
    62: "its controller halted",
    64: "a broken row of its memory could not be replaced",
    79: "it has fallen off the bus",
    95: "an error of its memory was not contained",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "an error of its memory was not recovered",
    143: "it could not be initialised",
}


class DeviceWatch:
    """Report lost devices: off the bus, in need of a reset, or after a fatal Xid.

    A thread asks the driver, since that may hang when a GPU is lost; `lost` never waits for longer than its first look.
    A fatal Xid counts until this process ends. What comes back of itself is there again.
    """

    def __init__(self, devices: Mapping[DeviceId, Gpu]) -> None:
        self._devices = dict(devices)
        self._lost: dict[DeviceId, str] = {}
        self._broken: dict[DeviceId, str] = {}  # device → after which Xid, and what it means
        self._begun = math.inf  # when the running check began
        self._looked = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def lost(self) -> dict[DeviceId, str]:
        """Return the lost devices, each with the reason."""
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
        nvml = nvml_session()
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
        """Return an event set for the devices' Xids; None if the driver offers none."""
        events = None
        for gpu in self._devices.values():
            with contextlib.suppress(nvml.NVMLError):  # such a device is only polled
                events = events or nvml.nvmlEventSetCreate()
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _listen(self, nvml: Any, events: Any) -> None:
        """Process pending events."""
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
    """Return why this GPU cannot be used now; empty if it can."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        optional_reading(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        action = optional_reading(
            nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
        )
    except nvml.NVMLError as error:
        return nvml_error_text(nvml, error)
    if action is None or action.nvmlReturn != nvml.NVML_SUCCESS:  # a driver that does not know of such actions
        return ""
    return NEEDED.get(action.value.uiVal, "")
