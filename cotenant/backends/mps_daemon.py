"""The control daemon of NVIDIA's Multi-Process Service for one GPU: start it, ask how it is, end it.

A daemon starts a server, which owns the GPU's context; each process that computes is a client of it. Every GPU has a
daemon of its own: where one served two, a fault on one also kept new clients off the other (NVIDIA's forum, 238139).

Commands, states and lines of the logs are those of NVIDIA's manual (docs.nvidia.com/deploy/mps: "Legacy MPS v2
Interface", "MPS v3 Interface", "Architecture", "Appendix: Logging"). None of this has run on hardware yet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec

from cotenant.backends.nvidia import CONTROL, Gpu
from cotenant.core.identity import LaneId
from cotenant.errors import DeviceError

Protocol = Literal[2, 3]

SERVER = "nvidia-cuda-mps-server"
STATIC = (
    13010  # the control program's version from which on multiprocessors can be given to clients for good: CUDA 13.1
)
PATIENCE = 30.0  # seconds for a server to come up: without the persistence daemon the GPU is woken up first
ANSWER = 5.0  # seconds for the control program to answer
LINGER = 2.0  # seconds for processes to end once they were told
ASK = 5.0  # seconds after which a server is asked how it is, even if it has logged nothing
SETTLE = 0.1
_POLL = 0.01

_PREFIX = "cotenant-mps-"
_LONGEST = 107  # bytes of the path of a socket
_NAME = "cotenant"  # of the server, where servers have names
_DEFAULTS = (Path("/tmp/nvidia-mps"), Path("/run/nvidia-mps"))  # noqa: S108  where clients look unless told
_STAMP = re.compile(r"^\[[^]]*\]\s*")
_CLIENT = re.compile(r"\{(?:PID: )?(\d+), (?:Context ID: )?\d+\} is INACTIVE")
_PARTITION = re.compile(r"\b(?:GPU|MIG)-[\w-]+/\S+")


class MpsProcess(msgspec.Struct, frozen=True):
    """A daemon or a server that runs here. pipe: its directory of pipes, None where it has the default one. devices:
    those that it shows its clients; None: all, or it is another user's and does not say."""

    pid: int
    name: str
    pipe: Path | None
    devices: tuple[str, ...] | None

    def sees(self, gpu: Gpu) -> bool:
        return self.devices is None or any(
            device == str(gpu.index) or (device.startswith("GPU-") and gpu.uuid.startswith(device))
            for device in self.devices
        )


def mps_processes() -> Iterator[MpsProcess]:
    """The daemons and servers of MPS, of whatever user, but without those that only ask a daemon something."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        name = Path(words[0]).name
        if name != SERVER and not (name == CONTROL and {"-d", "-f", "--daemon", "--foreground"} & set(words)):
            continue
        variables = {}
        with contextlib.suppress(OSError):
            environ = (folder / "environ").read_bytes().decode(errors="replace")
            variables = dict(entry.split("=", 1) for entry in environ.split("\0") if "=" in entry)
        pipe, devices = variables.get("CUDA_MPS_PIPE_DIRECTORY"), variables.get("CUDA_VISIBLE_DEVICES")
        yield MpsProcess(
            int(folder.name),
            name,
            Path(pipe) if pipe else None,
            None if devices is None else tuple(device.strip() for device in devices.split(",")),
        )


def is_alive(pid: int) -> bool:
    """It runs; one that has ended, and that its parent has not asked about, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in (b"Z", b"X")


def occupying_daemon(gpu: Gpu) -> str:
    """By which daemon; empty where there is none."""
    found = [it for it in mps_processes() if it.name == CONTROL]
    for it in found:
        if it.sees(gpu):
            where = f" (its pipes are in {it.pipe})" if it.pipe else ""
            so = f"CUDA_MPS_PIPE_DIRECTORY={it.pipe} " if it.pipe else ""
            return (
                f"the MPS control daemon {it.pid}{where} has this GPU; end it with `echo quit | {so}{CONTROL}`, or let"
                " it show other GPUs only, with CUDA_VISIBLE_DEVICES"
            )
    named = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    for pipe in (*([Path(named)] if named else []), *_DEFAULTS):
        if not any((it.pipe or _DEFAULTS[0]) == pipe for it in found) and _answers(pipe / "control"):
            return (
                f"an MPS control daemon that is not of this container answers at {pipe}; end it, or start this"
                " container without that folder"
            )
    return ""


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:  # as clients connect, says strace
        connection.settimeout(ANSWER)
        try:
            connection.connect(str(path))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE  # somebody listens, to sockets of another type
    return True


def control_version() -> int:
    """Of the control program: 13010 is that of CUDA 13.1. 0 where it does not say."""
    try:
        ran = subprocess.run(
            [CONTROL, "-v"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = re.search(rb"\b\d{5}\b", ran.stdout + ran.stderr)
    return int(number[0]) if number else 0


class DaemonFolder:
    """A private folder for daemons, locked for as long as this process lives. Whoever makes the next one finds what was
    left by a process that was killed: ends the daemons in it, and removes it."""

    def __init__(self, directory: Path | None = None) -> None:
        root = Path(tempfile.gettempdir()) if directory is None else directory
        try:
            _sweep(root)
            while True:
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # only this user may look into it
                self._lock = _locked(self.folder / "lock", "x")
                if self._lock and (self.folder / "lock").exists():
                    break  # else another process has just taken it for an old one
        except OSError as error:
            raise DeviceError(
                f"no folder for MPS can be made in {root}: {error.strerror}; name another with `directory`"
            ) from None
        control = self.folder / "00" / "pipe" / _NAME / "control_privileged"
        if len(os.fsencode(control)) > _LONGEST:
            self.remove()
            raise DeviceError(f"{root} is too long a name for the sockets of MPS; name a shorter one with `directory`")

    def remove(self) -> None:
        """End what runs in it, and leave nothing."""
        _end(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock:
            self._lock.close()


def _sweep(root: Path) -> None:
    for folder in root.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and (lock := _locked(folder / "lock", "r+")):
                _end(folder)
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()


def _locked(path: Path, mode: str) -> IO[str] | None:
    """The file, locked until it is closed or this process ends; None where another process has it locked."""
    file = path.open(mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _end(folder: Path) -> None:
    """All daemons and servers in this folder, whether they listen or not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = _within(folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if _gone(pids):
            return


def _within(folder: Path) -> list[int]:
    """Daemons and servers that have their pipes below a folder: as they say, or as it says."""
    written = set()
    for file in folder.rglob(f"{CONTROL}.pid"):
        with contextlib.suppress(OSError, ValueError):
            written.add(int(file.read_text()))
    return [it.pid for it in mps_processes() if it.pid in written or (it.pipe and it.pipe.is_relative_to(folder))]


def _gone(pids: list[int]) -> bool:
    """Wait a moment until they are."""
    deadline = time.monotonic() + LINGER
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


class StaticPartition(msgspec.Struct, frozen=True):
    """Multiprocessors that clients have for themselves. id: what they find in CUDA_MPS_SM_PARTITION. name: ours."""

    id: str
    name: str
    chunks: int


class MpsDaemon:
    """Of one GPU. folder: its own. static: its clients get multiprocessors for themselves, which they do not share."""

    def __init__(self, folder: Path, uuid: str, *, protocol: Protocol = 2, static: bool = False) -> None:
        self.folder = folder
        self._server = 0  # process number
        self._daemon = 0
        self._uuid = uuid
        self._protocol = protocol
        self._static = static
        self._pipe = folder / "pipe"  # where clients find the server
        self._told = 0  # bytes of the server's log that were looked at
        self._due = 0.0  # when the server is to be asked, even if it logs nothing

    @property
    def client(self) -> dict[str, str]:
        """The environment that makes a process a client."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            # A number would be taken among the devices that the server shows, of which there is one.
            "CUDA_VISIBLE_DEVICES": self._uuid,
        }

    def start(self) -> None:
        """And its server. Raises DeviceError, and leaves nothing that runs, where it does not come up."""
        for name in ("pipe", "log"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(mode=0o700, parents=True)
        self._pipe, self._told, self._due = self.folder / "pipe", 0, 0.0
        try:
            self._launch()
            self._await()
        except DeviceError:
            _end(self.folder)
            raise

    def stop(self) -> None:
        """And its server, and whatever clients do there."""
        with contextlib.suppress(DeviceError):
            if is_alive(self._daemon):
                self._run("-q") if self._protocol == 3 else self._ask(f"quit -t {LINGER:.0f}")
                _gone([self._daemon, self._server])
        _end(self.folder)

    def health_error(self, clients: Mapping[LaneId, int]) -> str:
        """Why nothing can run there, and for whose fault; empty where all is well. clients: processes by what they are
        called, which may change meanwhile.

        The server is asked only when it has logged something, and every few seconds: a daemon logs each question.
        """
        if reason := self._ended():
            return reason
        lines = self._news()
        if not lines and time.monotonic() < self._due:
            return ""
        self._due = time.monotonic() + ASK
        try:
            state = self._state()
        except DeviceError as error:
            return self._ended() or str(error)
        if "FAULT" not in state.upper():
            return ""
        time.sleep(SETTLE)  # it may be writing down whose fault it was
        return _fault(lines + self._news(), {pid: name for name, pid in list(clients.items())})

    def _ended(self) -> str:
        if not is_alive(self._daemon):
            return f"its MPS control daemon ended{self._words('control.log')}"
        if not is_alive(self._server):
            return f"its MPS server ended{self._words('control.log')}"
        return ""

    def carve(self, chunks: int) -> StaticPartition:
        """Multiprocessors for clients to come. Raises DeviceError where not as many are free."""
        name = f"p{time.monotonic_ns()}"
        try:
            if self._protocol == 3:
                said = self._ask(f"sm-partition create {name} --server={_NAME} --device={self._uuid} --chunks={chunks}")
            else:
                said = self._ask(f"sm_partition add {self._uuid} {chunks}")
        except DeviceError as error:
            said = str(error)
        found = _PARTITION.search(said)
        if found is None:
            raise DeviceError(
                f"MPS gives no partition of {chunks} chunks of multiprocessors on {self._uuid}: {_line(said)};"
                " a static partition stays taken until its worker has ended"
            )
        return StaticPartition(found[0], name, chunks)

    def uncarve(self, partition: StaticPartition) -> None:
        """Once its clients have ended."""
        with contextlib.suppress(DeviceError):  # the daemon is gone, and all partitions with it
            if self._protocol == 3:
                self._ask(f"sm-partition delete {partition.name} --server={_NAME} --device={self._uuid}")
            else:
                self._ask(f"sm_partition rm {self._uuid} {partition.id.partition('/')[2]}")

    def _launch(self) -> None:
        flags = ["-p", "3"] if self._protocol == 3 else ["-S"] if self._static else []
        with (self.folder / "log" / "start.log").open("wb") as said:  # a pipe would stay open for as long as the daemon
            try:
                code = subprocess.run(
                    [CONTROL, "-d", *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=self._environment(),
                    timeout=PATIENCE,
                    check=False,
                ).returncode
            except OSError as error:
                raise DeviceError(
                    f"`{CONTROL}` cannot be run: {error.strerror}; it comes with NVIDIA's driver"
                ) from None
            except subprocess.TimeoutExpired:
                raise DeviceError(
                    f"`{CONTROL} -d` does not come back for {PATIENCE:g} s; is the driver alive?"
                ) from None
        if code:
            what = " ".join([CONTROL, "-d", *flags])
            raise DeviceError(
                f"MPS does not start on {self._uuid}: `{what}` ended with status {code}"
                f"{self._words('start.log', 'control.log')}"
            )

    def _await(self) -> None:
        """Until there is a server that takes clients."""
        deadline = time.monotonic() + PATIENCE
        begun, refused = False, ""
        while True:
            try:
                if not begun:
                    self._begin()
                    begun = True
                if self._ready():
                    return
            except DeviceError as error:  # it does not listen yet, or says why not
                refused = f": {error}"
            ended = "exited with status" in self._read("control.log")
            if ended or time.monotonic() > deadline:
                what = "its server ended" if ended else f"it has no server after {PATIENCE:g} s"
                raise DeviceError(
                    f"MPS does not start on {self._uuid}: {what}"
                    f"{self._words('server.log', 'control.log') or refused}; in a container, MPS needs the rights of a"
                    " user that may use the GPU, and shared memory"
                )
            time.sleep(_POLL)

    def _begin(self) -> None:
        """Have the daemon start a server."""
        if self._protocol == 3:
            self._ask(f"server create {_NAME} --uid={os.getuid()} --allowed-devices={self._uuid}")
        else:
            self._ask(f"start_server -uid {os.getuid()}")

    def _ready(self) -> bool:
        if self._protocol == 3:
            pids = self._ask(f"server get {_NAME} pid").split()
            self._pipe = Path(self._ask(f"server get {_NAME} pipe-directory").strip() or self._pipe)
        else:
            pids = self._ask("get_server_list").split()
        self._server = next((int(pid) for pid in pids if pid.isdecimal()), 0)
        if not self._server:
            return False
        self._daemon = next((pid for pid in _within(self.folder) if pid != self._server), 0)
        # A control program that is too old to know states still logs this.
        logged = f"NEW SERVER {self._server}: Ready" in self._read("control.log")
        return logged or re.search(r"\b(ACTIVE|READY)\b", self._state().upper()) is not None

    def _state(self) -> str:
        if self._protocol == 3:
            return self._ask(f"server get {_NAME} status").strip()
        return self._ask(f"get_server_status {self._server}").strip()

    def _ask(self, command: str) -> str:
        """What the daemon answers. Raises DeviceError where it does not."""
        if self._protocol == 3:
            return self._run(*command.split())
        return self._run(said=command)

    def _run(self, *words: str, said: str = "") -> str:
        try:
            ran = subprocess.run(
                [CONTROL, *words],
                input=said + "\n",
                capture_output=True,
                text=True,
                env=self._environment(),
                timeout=ANSWER,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            raise DeviceError(f"the MPS control daemon of {self._uuid} does not answer") from None
        if ran.returncode:
            raise DeviceError(f"the MPS control daemon of {self._uuid} answers: {_line(ran.stdout + ran.stderr)}")
        return ran.stdout

    def _environment(self) -> dict[str, str]:
        """What an operator has set for clients would limit all of ours."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        return kept | {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            "CUDA_MPS_PROTOCOL_VERSION": str(self._protocol),
            "CUDA_VISIBLE_DEVICES": self._uuid,
        }

    def _news(self) -> list[str]:
        """Whole lines that the server has logged since the last call."""
        try:
            with self._path("server.log").open("rb") as file:
                file.seek(self._told)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._told += len(whole)
        return whole.decode(errors="replace").splitlines()

    def _words(self, *logs: str) -> str:
        """The last line of the first of these logs that holds any, as the end of a sentence."""
        for name in logs:
            if lines := self._read(name).splitlines():
                return f": {_STAMP.sub('', lines[-1]).rstrip('.')}"
        return ""

    def _read(self, name: str) -> str:
        try:
            return self._path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def _path(self, name: str) -> Path:
        inner = _NAME if self._protocol == 3 and name == "server.log" else ""
        return self.folder / "log" / inner / name


def _fault(lines: list[str], clients: Mapping[int, str]) -> str:
    """lines: what the server has logged of it. clients: names of processes. A fatal error ends all of them; of some
    errors it says whose they were."""
    ended = {int(pid) for line in lines for pid in _CLIENT.findall(line)}
    blamed = [
        name
        for pid, name in clients.items()
        if any(re.search(rf"fault\b.*\b{pid}\b|\b{pid}\b.*fault", line, re.IGNORECASE) for line in lines)
    ]
    if blamed:
        return f"its MPS server met a fatal error of the GPU, caused by {' or '.join(blamed)}"
    names = sorted(clients.get(pid, f"process {pid}") for pid in ended)
    return f"its MPS server met a fatal error of the GPU, caused by one of {', '.join(names) or 'its clients'}"


def _line(said: str) -> str:
    return " ".join(said.split()) or "nothing"
