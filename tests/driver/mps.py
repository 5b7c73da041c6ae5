"""The fake MPS: a `nvidia-cuda-mps-control` for the search path, clients of its daemons, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from cotenant.backends import Launch, nvidia
from cotenant.backends.mps import Mps
from cotenant.backends.mps_daemon import mps_processes
from cotenant.backends.nvidia import CONTROL
from cotenant.core.identity import LaneId
from tests.driver.build import loaded

SCRIPT = Path(__file__).with_name("mps_control.py")


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **told: object) -> None:
    """Put the control program on the search path, for this process and those that it starts. told: how it is, see
    there; True for words without a value."""
    bash = shutil.which("bash")
    if bash is None or not Path("/proc/self/environ").exists():
        pytest.skip("needs bash and /proc, to stand for MPS")
    folder.mkdir(exist_ok=True)
    program = folder / CONTROL
    # Its name among the processes is that of the real one; so Python cannot tell by it where its library is.
    python = f"PYTHONHOME={sys.base_prefix} exec -a {program.name} {os.path.realpath(sys.executable)} -S -s"
    program.write_text(f'#!{bash}\n{python} {SCRIPT} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    words = (name if value is True else f"{name}={value}" for name, value in told.items())
    monkeypatch.setenv("COTENANT_FAKE_MPS", ",".join(words))
    # Daemons are found among all processes: those of another run of these tests have other GPUs.
    monkeypatch.setenv("COTENANT_FAKE_SALT", str(os.getpid()))
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)


class OnProcessor(Mps):
    """Its workers have what clients of MPS have, but run their models on the processor."""

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        return msgspec.structs.replace(super().open(lane, share, leaving), cuda=False)


def on_processor(monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> Mps:
    """Of one GPU, until what is `held` ends."""
    # Beside the system's other temporary folders: the names of pytest's are too long for sockets.
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="mps-")))
    installed(folder / "bin", monkeypatch)
    held.enter_context(loaded("h200"))
    backend = OnProcessor(nvidia.list_gpus(), directory=folder)
    held.callback(backend.stop)
    return backend


class Client:
    """A process that computes, as far as a daemon can tell. said: what it was told when it came."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(SCRIPT), "client"],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout
        self.said = self._process.stdout.readline().split()

    def end(self, number: int = signal.SIGKILL) -> None:
        self._process.send_signal(number)
        self._process.communicate()


@contextlib.contextmanager
def client(env: dict[str, str]) -> Iterator[Client]:
    it = Client(env)
    try:
        yield it
    finally:
        it.end()


def control(env: dict[str, str], command: str) -> str:
    """What the daemon answers that this environment leads to."""
    ran = subprocess.run([CONTROL], input=command, env=os.environ | env, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def left(folder: Path) -> list[int]:
    """Daemons and servers that run with their pipes below a folder."""
    return [it.pid for it in mps_processes() if it.pipe and it.pipe.is_relative_to(folder)]


def cleared(folder: Path) -> None:
    for pid in left(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
