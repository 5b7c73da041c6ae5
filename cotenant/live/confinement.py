"""Confine worker processes: an environment without the server's secrets, a limit of memory, and the first place in line
when the system runs out of it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cotenant.worker.background import LOWEST_PRIORITY

# What programs, Python, numeric libraries and drivers of GPUs read. Nothing else of the server's environment is passed.
_NAMES = frozenset(
    ("HF_HOME", "HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV")
)
_PREFIXES = (
    "COTENANT_", "CUBLAS_", "CUDA", "CUDNN_", "DYLD_", "GOMP_", "KMP_", "LC_", "LD_", "MALLOC_", "MKL_", "NCCL_",
    "NVIDIA_", "OMP_", "ONNX", "OPENBLAS_", "ORT_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "XDG_",
)  # fmt: skip
_SECRET = ("CREDENTIAL", "PASSWORD", "SECRET", "TOKEN")

# One thread per core: a numeric library that started threads of its own would exceed the share. No thread spins while
# it waits: spinning would use up CPU time of the share.
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# Of 1000: without memory the system ends a worker, which is replaced, rather than the server; and first one that nobody
# waits for.
_OOM_SCORE = 500
_BACKGROUND_OOM_SCORE = 1000


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """Say how a worker process is confined. memory: bytes of its own that it may have; None: no limit. environment:
    variables that it gets besides the usual ones. background: it runs, for all its life, in processor time that nobody
    else wants."""

    memory: int | None = None
    environment: tuple[str, ...] = ()
    background: bool = False

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a worker, of that of the server."""
        passed = {name: value for name, value in environ.items() if name in self.environment or _is_passed(name)}
        return {**passed, **_THREADS}

    def apply(self, pid: int) -> None:
        """Confine a process that was just started. Without effect on systems other than Linux."""
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # it has exited already
            score = _BACKGROUND_OOM_SCORE if self.background else _OOM_SCORE
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))
        if self.background:
            _put_into_background(pid)
        if self.memory is not None:
            # Of private data, unlike RLIMIT_AS: what a driver reserves but does not use, the arena and files are free.
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_DATA, (self.memory, self.memory))


def _put_into_background(pid: int) -> None:
    """Let a process that was just started run in processor time that nobody else wants: threads that it is yet to
    create inherit that. Where a sandbox forbids it, at the lowest priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _is_passed(name: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRET)
