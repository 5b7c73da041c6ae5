"""Query NVIDIA's driver through NVML; errors say what to do about them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cotenant.errors import DeviceError

_T = TypeVar("_T")

# What the driver says has to be done before anything runs again (NVML's GPU recovery action); draining can wait.
NEEDED = {
    1: "it needs a reset; `sudo nvidia-smi --gpu-reset` does that",
    2: "its machine has to be restarted",
    6: "its bus has to be reset",
    7: "its machine has to be restarted",
}


@functools.cache
def nvml_session() -> Any:
    """Return pynvml, connected to the driver until this process ends. Raises DeviceError."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise DeviceError("NVIDIA GPUs need nvidia-ml-py; install `cotenant[gpu]`") from None
    with nvml_errors(""):
        pynvml.nvmlInit()
    return pynvml


@contextlib.contextmanager
def nvml_errors(what: str) -> Iterator[None]:
    """Turn an NVML error within the block into a DeviceError about `what`."""
    import pynvml

    try:
        yield
    except pynvml.NVMLError as error:
        raise DeviceError(f"{what}: {nvml_error_text(pynvml, error)}".removeprefix(": ")) from None


def nvml_error_text(nvml: Any, error: Any) -> str:
    """Return the reason of an NVML error, with the remedy."""
    known = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
            "no NVIDIA driver was found (there is no libnvidia-ml.so.1); install it, in a container start that with "
            '`--gpus all`, or serve on the CPU with backend = "cpu"'
        ),
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: (
            "NVIDIA's driver is installed, but not loaded; run `sudo modprobe nvidia`, and see `nvidia-smi` for details"
        ),
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "NVIDIA's driver was updated while an older one is still loaded; restart the machine"
        ),
        nvml.NVML_ERROR_NO_PERMISSION: (
            "this user may not query NVIDIA's driver for that; run as root, or change the permissions of /dev/nvidia*"
        ),
        nvml.NVML_ERROR_GPU_IS_LOST: "it is off the bus, or cannot be reached; reset it, or restart the machine",
        nvml.NVML_ERROR_RESET_REQUIRED: NEEDED[1],
        nvml.NVML_ERROR_IN_USE: "it is still in use by a process",
        nvml.NVML_ERROR_NOT_FOUND: "it does not exist; `nvidia-smi -L` lists the devices",
    }
    return known.get(error.value, f"NVIDIA's driver says: {error}")


def optional_reading(nvml: Any, ask: Callable[[], _T]) -> _T | None:
    """Return what a query answers; None if this GPU, driver or user does not get it."""
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
