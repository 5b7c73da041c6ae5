"""NVIDIA's GPUs as NVML shows them: which there are, what they do, what they can, and whether they are still there.

NVML opens no CUDA context and takes no memory of a device, so a server may ask at any time. Everything raises
DeviceError with the way out where there is no driver, or one that does not answer. GPUs are told by their UUID, which
is what CUDA_VISIBLE_DEVICES takes; an index depends on who looks.
"""

from __future__ import annotations

from cotenant.backends.nvidia.activity import Process, Reading, processes, readings
from cotenant.backends.nvidia.cards import (
    Gpu,
    Instance,
    apart,
    chosen,
    driver,
    gpus,
    instances,
    kinds,
    named,
    profiles,
    size,
)
from cotenant.backends.nvidia.nvml import asking, session, words
from cotenant.backends.nvidia.watch import HUNG, LOOK, SILENT, WATCH, Watch
from cotenant.backends.nvidia.ways import CONTROL, able, mechanisms

__all__ = [
    "CONTROL",
    "HUNG",
    "LOOK",
    "SILENT",
    "WATCH",
    "Gpu",
    "Instance",
    "Process",
    "Reading",
    "Watch",
    "able",
    "apart",
    "asking",
    "chosen",
    "driver",
    "gpus",
    "instances",
    "kinds",
    "mechanisms",
    "named",
    "processes",
    "profiles",
    "readings",
    "session",
    "size",
    "words",
]
