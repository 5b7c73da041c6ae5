"""A fake NVIDIA driver: two C libraries under the names of the real ones, so that the real bindings run over them.

`fitted` gives the environment of a process that is to find them; `loaded` has them in this one. What the machine has
is said by variables that the libraries read when they are initialised:

    COTENANT_FAKE_GPUS      its GPUs, as in "h200,h200" or "a100-80gb-mig=3g.40gb+2g.20gb"; machine.h has the products
    COTENANT_FAKE_DRIVER    versions of driver and CUDA, "580.95.05/13.0" unless said
    COTENANT_FAKE_SALT      a number that UUIDs have in them, for GPUs of one run of the tests alone
    COTENANT_FAKE_STATE     a file that is read again at every call, with a line for each thing that has happened
                            (`lost 0`: the GPU with that index is gone; `reset 0`: it needs one; `xid 0 79`; `process 0
                            PID BYTES [INSTANCE]`: computes there; `mode 0 2`: its compute mode; `action 0 1`: how it
                            wants to be recovered; `mig 0`: MIG will be on; `error NAME CODE`: that function of
                            NVML answers that)
"""

from __future__ import annotations

import _ctypes
import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cotenant.backends import nvidia

LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1", "nvrtc.c": "libnvrtc.so.13"}


@functools.cache
def built() -> Path:
    """The folder with both libraries, made once for each run of the tests. Skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler named cc, to build the fake NVIDIA driver")
    folder = Path(tempfile.mkdtemp(prefix="cotenant-driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for source, name in LIBRARIES.items():
        path = Path(__file__).with_name(source)
        if path.exists():
            options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{name}", "-o", str(folder / name)]
            subprocess.run([compiler, *options, str(path)], check=True)
    return folder


def fitted(gpus: str, *, driver: str = "", state: Path | None = None) -> dict[str, str]:
    """What is to be added to the environment of a process that is to see these GPUs."""
    known = os.environ.get("LD_LIBRARY_PATH")
    variables = {
        "LD_LIBRARY_PATH": os.pathsep.join([str(built()), *([known] if known else [])]),
        # cuda-bindings looks for the compiler that a PyTorch with CUDA brings along first, unless one is there already.
        "LD_PRELOAD": str(built() / LIBRARIES["nvrtc.c"]),
        "COTENANT_FAKE_GPUS": gpus,
    }
    if driver:
        variables["COTENANT_FAKE_DRIVER"] = driver
    if state is not None:
        variables["COTENANT_FAKE_STATE"] = str(state)
    return variables


@contextmanager
def loaded(gpus: str, *, driver: str = "", state: Path | None = None) -> Iterator[None]:
    """This process sees these GPUs through NVML, as long as the context lasts. NVML is found because a library of its
    name is there already. Close every `Watch` before: while one asks, the library stays where it is."""
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py, of cotenant[gpu]")
    library = ctypes.CDLL(str(built() / "libnvidia-ml.so.1"))
    nvidia.nvml_session.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fitted(gpus, driver=driver, state=state).items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        try:
            yield
        finally:
            handles = [library._handle]
            if pynvml.nvmlLib is not None:
                pynvml.nvmlShutdown()
                handles.append(pynvml.nvmlLib._handle)
            pynvml.nvmlLib = None
            pynvml._nvmlGetFunctionPointer_cache.clear()
            nvidia.nvml_session.cache_clear()
            if not any(thread.name == nvidia.WATCH for thread in threading.enumerate()):
                for handle in handles:
                    _ctypes.dlclose(handle)
