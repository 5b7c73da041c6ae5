"""What NVML says of a card, held against what CUDA says of it and against what a process does there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cotenant.backends import nvidia
from cotenant.backends.nvidia import DeviceWatch, Gpu
from cotenant.errors import DeviceError

pytestmark = pytest.mark.gpu

Figure = Callable[..., None]

HELD = 512 << 20  # bytes

# In a process of its own: CUDA sees the one GPU that it is shown. Then it holds memory until its input ends.
PROGRAM = f"""
import json, sys
from cuda.bindings import driver as cuda
def done(code, *rest):
    assert int(code) == 0, code
    return rest[0] if rest else None
Attribute = cuda.CUdevice_attribute
done(*cuda.cuInit(0))
device = done(*cuda.cuDeviceGet(0))
def asked(name):
    return int(done(*cuda.cuDeviceGetAttribute(getattr(Attribute, "CU_DEVICE_ATTRIBUTE_" + name), device)))
capability = [asked("COMPUTE_CAPABILITY_MAJOR"), asked("COMPUTE_CAPABILITY_MINOR")]
memory = int(done(*cuda.cuDeviceTotalMem(device)))
done(*cuda.cuCtxSetCurrent(done(*cuda.cuDevicePrimaryCtxRetain(device))))
held = done(*cuda.cuMemAlloc({HELD}))
print(json.dumps([asked("MULTIPROCESSOR_COUNT"), capability, memory]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def gpus() -> tuple[Gpu, ...]:
    try:
        found = tuple(gpu for gpu in nvidia.select_gpus(nvidia.list_gpus()) if not gpu.mig)
    except DeviceError as error:
        pytest.skip(str(error))
    return found or pytest.skip("needs a GPU without MIG")


def test_gpu_reading_and_processes_agree_with_cuda(gpus: tuple[Gpu, ...], figure: Figure) -> None:
    for gpu in gpus:
        before = nvidia.gpu_reading(gpu.uuid)
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder:
            assert holder.stdout is not None and holder.stdin is not None
            multiprocessors, capability, memory = json.loads(holder.stdout.readline())
            during, there = nvidia.gpu_reading(gpu.uuid), nvidia.gpu_processes(gpu.uuid)
            holder.stdin.close()
        figure(
            gpu=gpu.name,
            multiprocessors=[gpu.multiprocessors, multiprocessors],
            memory=[gpu.memory, memory],
            held=[before.memory, during.memory],
            processes=[[process.pid, process.name, process.memory] for process in there],
            can=nvidia.available_sharing_modes(gpu),
        )
        assert (gpu.multiprocessors, gpu.capability) == (multiprocessors, ".".join(map(str, capability)))
        assert 0.95 * gpu.memory <= memory <= gpu.memory  # the driver keeps some
        assert before.memory is not None and during.memory is not None
        assert during.memory - before.memory >= HELD
        assert holder.pid in {process.pid for process in there}


def test_gpu_reading_has_no_missing_value(gpus: tuple[Gpu, ...], figure: Figure) -> None:
    for gpu in gpus:
        reading = nvidia.gpu_reading(gpu.uuid)
        figure(gpu=gpu.name, driver=nvidia.driver_version(), reading=str(reading))
        assert None not in (
            reading.memory,
            reading.utilisation,
            reading.bandwidth,
            reading.power,
            reading.clock,
            reading.temperature,
        )


def test_device_watch_is_cheap_and_finds_no_lost_gpu(gpus: tuple[Gpu, ...], figure: Figure) -> None:
    watch = DeviceWatch(nvidia.gpus_by_device(gpus))
    begun = time.perf_counter()
    lost = watch.lost()
    took = time.perf_counter() - begun
    watch.close()
    figure(seconds=took, lost=lost)
    assert lost == {}
    assert took < nvidia.LOOK
