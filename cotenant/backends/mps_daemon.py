"""Start, query and stop the control daemon of NVIDIA's Multi-Process Service for one GPU.

A daemon starts a server, which owns the GPU's context; each process that computes is a client of it. Every GPU has its
own daemon: where one served two, a fault on one also kept new clients off the other (NVIDIA's forum, 238139).

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
STATIC = 13010  # first version of the control program with static partitions: CUDA 13.1
PATIENCE = 30.0  # seconds for a server to start; without the persistence daemon the GPU has to initialise first
ANSWER = 5.0  # seconds for the control program to answer
LINGER = 2.0  # seconds for processes to exit after a signal
ASK = 5.0  # seconds after which a server is queried even if it has logged nothing
SETTLE = 0.1
_POLL = 0.01

_PREFIX = "cotenant-mps-"
_MAX_SOCKET_PATH = 107  # bytes
_NAME = "cotenant"  # of the server, in protocols with named servers
_DEFAULTS = (Path("/tmp/nvidia-mps"), Path("/run/nvidia-mps"))  # noqa: S108  where clients look by default
_STAMP = re.compile(r"^\[[^]]*\]\s*")
_CLIENT = re.compile(r"\{(?:PID: )?(\d+), (?:Context ID: )?\d+\} is INACTIVE")
_PARTITION = re.compile(r"\b(?:GPU|MIG)-[\w-]+/\S+")


class MpsProcess(msgspec.Struct, frozen=True):
    """Describe a running MPS daemon or server.

    pipe: its pipe directory; None: the default. devices: those visible to its clients; None: all, or unknown because it
    is another user's.
    """

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
    """Return the daemons and servers of MPS, of any user, but without control clients."""
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
    """Return whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in (b"Z", b"X")


def occupying_daemon(gpu: Gpu) -> str:
    """Describe the foreign daemon that controls a GPU, with the remedy; empty if there is none."""
    daemons = [process for process in mps_processes() if process.name == CONTROL]
    for daemon in daemons:
        if daemon.sees(gpu):
            where = f" (its pipes are in {daemon.pipe})" if daemon.pipe else ""
            environment = f"CUDA_MPS_PIPE_DIRECTORY={daemon.pipe} " if daemon.pipe else ""
            return (
                f"the MPS control daemon {daemon.pid}{where} has this GPU; end it with"
                f" `echo quit | {environment}{CONTROL}`, or let"
                " it show other GPUs only, with CUDA_VISIBLE_DEVICES"
            )
    named = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    for pipe in (*([Path(named)] if named else []), *_DEFAULTS):
        if not any((daemon.pipe or _DEFAULTS[0]) == pipe for daemon in daemons) and _answers(pipe / "control"):
            return (
                f"an MPS control daemon that is not of this container answers at {pipe}; end it, or start this"
                " container without that folder"
            )
    return ""


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:  # as clients connect, according to strace
        connection.settimeout(ANSWER)
        try:
            connection.connect(str(path))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE  # there is a listener, with another socket type
    return True


def control_version() -> int:
    """Return the version of the control program, such as 13010 for CUDA 13.1; 0 if it does not tell."""
    try:
        ran = subprocess.run(
            [CONTROL, "-v"], stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = re.search(rb"\b\d{5}\b", ran.stdout + ran.stderr)
    return int(number[0]) if number else 0


class DaemonFolder:
    """Create a private folder for daemons, locked while this process lives; also end the daemons that a killed process
    left, and remove their folder."""

    def __init__(self, directory: Path | None = None) -> None:
        root = Path(tempfile.gettempdir()) if directory is None else directory
        try:
            _sweep(root)
            while True:
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # readable by this user only
                self._lock = _locked(self.folder / "lock", "x")
                if self._lock and (self.folder / "lock").exists():
                    break  # otherwise another process has just swept it up as stale
        except OSError as error:
            raise DeviceError(
                f"no folder for MPS can be made in {root}: {error.strerror}; name another with `directory`"
            ) from None
        control = self.folder / "00" / "pipe" / _NAME / "control_privileged"
        if len(os.fsencode(control)) > _MAX_SOCKET_PATH:
            self.remove()
            raise DeviceError(f"{root} is too long a name for the sockets of MPS; name a shorter one with `directory`")

    def remove(self) -> None:
        """End the daemons in it and delete it."""
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
    """Open and lock a file until it is closed or this process ends; None if another process holds the lock."""
    file = path.open(mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _end(folder: Path) -> None:
    """End all daemons and servers of a folder, whether they listen or not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = _within(folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if _gone(pids):
            return


def _within(folder: Path) -> list[int]:
    """Return the daemons and servers of a folder, by their environment or by its pid files."""
    recorded = set()
    for file in folder.rglob(f"{CONTROL}.pid"):
        with contextlib.suppress(OSError, ValueError):
            recorded.add(int(file.read_text()))
    return [
        process.pid
        for process in mps_processes()
        if process.pid in recorded or (process.pipe and process.pipe.is_relative_to(folder))
    ]


def _gone(pids: list[int]) -> bool:
    """Wait for processes to exit, for LINGER seconds at most; return whether they did."""
    deadline = time.monotonic() + LINGER
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


class StaticPartition(msgspec.Struct, frozen=True):
    """Describe SMs dedicated to some clients.

    id: their CUDA_MPS_SM_PARTITION. name: chosen here. chunks: of SMs.
    """

    id: str
    name: str
    chunks: int


class MpsDaemon:
    """Control the MPS daemon of one GPU. folder: its private folder. static: clients get dedicated SMs."""

    def __init__(self, folder: Path, uuid: str, *, protocol: Protocol = 2, static: bool = False) -> None:
        self.folder = folder
        self._server = 0  # process id
        self._daemon = 0
        self._uuid = uuid
        self._protocol = protocol
        self._static = static
        self._pipe = folder / "pipe"  # where clients find the server
        self._told = 0  # bytes of the server's log that were read
        self._due = 0.0  # when to query the server even if it logs nothing

    @property
    def client(self) -> dict[str, str]:
        """Return the environment that makes a process a client."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            # An index would count among the devices that the server shows, of which there is one.
            "CUDA_VISIBLE_DEVICES": self._uuid,
        }

    def start(self) -> None:
        """Start the daemon and its server. Raises DeviceError, with nothing left running, if they do not come up."""
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
        """Stop the daemon and its server, whatever clients are doing."""
        with contextlib.suppress(DeviceError):
            if is_alive(self._daemon):
                self._run("-q") if self._protocol == 3 else self._ask(f"quit -t {LINGER:.0f}")
                _gone([self._daemon, self._server])
        _end(self.folder)

    def health_error(self, clients: Mapping[LaneId, int]) -> str:
        """Return why nothing can run there, and which client is at fault; empty where all is well. clients: names by
        process id; they may change meanwhile.

        The server is queried only when it has logged something, and every few seconds: a daemon logs each query.
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
        time.sleep(SETTLE)  # it may be logging whose fault it was
        return _fault(lines + self._news(), {pid: name for name, pid in list(clients.items())})

    def _ended(self) -> str:
        if not is_alive(self._daemon):
            return f"its MPS control daemon ended{self._words('control.log')}"
        if not is_alive(self._server):
            return f"its MPS server ended{self._words('control.log')}"
        return ""

    def carve(self, chunks: int) -> StaticPartition:
        """Reserve SMs for future clients. Raises DeviceError if not enough are free."""
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
        """Release a partition, once its clients have ended."""
        with contextlib.suppress(DeviceError):  # the daemon is gone, with all partitions
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
        """Wait for a server that accepts clients."""
        deadline = time.monotonic() + PATIENCE
        begun, refused = False, ""
        while True:
            try:
                if not begun:
                    self._begin()
                    begun = True
                if self._ready():
                    return
            except DeviceError as error:  # not listening yet, or an error message
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
        """Make the daemon start a server."""
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
        # A control program too old to report states still logs this.
        logged = f"NEW SERVER {self._server}: Ready" in self._read("control.log")
        return logged or re.search(r"\b(ACTIVE|READY)\b", self._state().upper()) is not None

    def _state(self) -> str:
        if self._protocol == 3:
            return self._ask(f"server get {_NAME} status").strip()
        return self._ask(f"get_server_status {self._server}").strip()

    def _ask(self, command: str) -> str:
        """Send a command to the daemon and return its answer. Raises DeviceError if there is none."""
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
        """Return the environment without an operator's settings for clients, which would limit all of ours."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        return kept | {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            "CUDA_MPS_PROTOCOL_VERSION": str(self._protocol),
            "CUDA_VISIBLE_DEVICES": self._uuid,
        }

    def _news(self) -> list[str]:
        """Return the complete lines that the server has logged since the last call."""
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
        """Return the last line of the first of these logs that is not empty, to end a sentence."""
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
    """Describe a fault from the server's log lines. clients: lanes by process id. A fatal error ends all clients; for
    some errors the log names the culprit."""
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
