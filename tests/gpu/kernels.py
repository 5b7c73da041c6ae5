"""Two kernels on the first GPU that this process sees, compiled by NVRTC and started through cuda-bindings: which
multiprocessors blocks ran on, and work that only computes. See kernels.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = Path(__file__).with_name("kernels.cu")
THREADS = 256  # of a block
MOST = 1024  # multiprocessors of any GPU, and more


class Kernels:
    """The GPU's primary context is current to this thread, as PyTorch has it."""

    def __init__(self) -> None:
        _checked(driver.cuInit(0))
        self._device = _checked(driver.cuDeviceGet(0))
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(self._device))))
        attributes = driver.CUdevice_attribute
        self.multiprocessors = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        major = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self._module = _checked(driver.cuModuleLoadData(_compiled(f"sm_{major}{minor}")))
        self._where = _checked(driver.cuModuleGetFunction(self._module, b"where"))
        self._compute = _checked(driver.cuModuleGetFunction(self._module, b"compute"))
        self._out = _checked(driver.cuMemAlloc(4))
        self._begun, self._ended = (_checked(driver.cuEventCreate(0)) for _ in range(2))

    def where(self, *streams: int) -> list[set[int]]:
        """The multiprocessors that blocks ran on, of as many blocks on each stream, at once, as fill the device."""
        found = [_checked(driver.cuMemAlloc(4 * MOST)) for _ in streams]
        for memory in found:
            _checked(driver.cuMemsetD32(memory, 0, MOST))
        _checked(driver.cuCtxSynchronize())  # these were on no stream of ours
        for stream, memory in zip(streams, found, strict=True):
            self.start_where(stream, memory)
        for stream in streams:
            _checked(driver.cuStreamSynchronize(stream))
        return [self.taken(memory) for memory in found]

    def recorded_where(self, record: int, launch: int) -> set[int]:
        """The same, of a kernel that is recorded as a graph on one stream and launched on another."""
        memory = _checked(driver.cuMemAlloc(4 * MOST))
        _checked(driver.cuMemsetD32(memory, 0, MOST))
        _checked(driver.cuCtxSynchronize())
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _checked(driver.cuStreamBeginCapture(record, mode))
        self.start_where(record, memory)
        graph = _checked(driver.cuGraphInstantiate(_checked(driver.cuStreamEndCapture(record)), 0))
        _checked(driver.cuGraphLaunch(graph, launch))
        _checked(driver.cuStreamSynchronize(launch))
        return self.taken(memory)

    def start_where(self, stream: int, memory: Any) -> None:
        blocks = 16 * self.multiprocessors
        self._start(self._where, blocks, stream, (int(memory), 200_000), (ctypes.c_void_p, ctypes.c_longlong))

    def taken(self, memory: Any) -> set[int]:
        """The multiprocessors that left a mark there."""
        blocks = np.zeros(MOST, np.uint32)
        _checked(driver.cuMemcpyDtoH(blocks.ctypes.data, memory, blocks.nbytes))
        _checked(driver.cuMemFree(memory))
        return set(np.flatnonzero(blocks).tolist())

    def seconds(self, stream: int, beside: Callable[[], None] | None = None) -> float:
        """What work takes that is as much for each stream; the device's own clock. beside: what starts first."""
        if beside:
            beside()
        _checked(driver.cuEventRecord(self._begun, stream))
        self.start_compute(stream)
        _checked(driver.cuEventRecord(self._ended, stream))
        _checked(driver.cuStreamSynchronize(stream))
        return float(_checked(driver.cuEventElapsedTime(self._begun, self._ended))) / 1e3

    def start_compute(self, stream: int, times: int = 1) -> None:
        """Blocks are short and many, so that the last round of them, which fills no partition, is little of it all."""
        blocks = 400 * self.multiprocessors
        for _ in range(times):
            self._start(self._compute, blocks, stream, (int(self._out), 2000), (ctypes.c_void_p, ctypes.c_int))

    def wait(self, stream: int) -> None:
        _checked(driver.cuStreamSynchronize(stream))

    def free(self) -> int:
        """Bytes of the device that nobody has."""
        return int(_checked(driver.cuMemGetInfo())[0])

    def _start(self, kernel: Any, blocks: int, stream: int, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        _checked(driver.cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, (values, types), 0))

    def _attribute(self, which: Any) -> int:
        return int(_checked(driver.cuDeviceGetAttribute(which, self._device)))


def _compiled(architecture: str) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernels.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode()]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{SOURCE.name}: {log.decode()}")
    code_of = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code_of))
    return bytes(code_of)


def _checked(answer: tuple[Any, ...]) -> Any:
    code, *results = answer
    if int(code):
        raise RuntimeError(f"the driver answers {code.name}")
    return results[0] if len(results) == 1 else results
