"""What stands for NVIDIA's `nvidia-cuda-mps-control` where there is no driver: one script, which is the control
program, its daemon, and a client of it.

    -d [-S] [-p 3]     a daemon, which goes on in the background
    -v, -q, -h         as the real one
    MODULE VERB …      commands of protocol 3
    client             connects as the CUDA library does, prints what it is told, and stays until its input ends
    otherwise          commands of protocol 2, from the standard input

Its words are those of NVIDIA's manual (see cotenant/backends/mps_daemon.py). A server is a process of its own that does
nothing. How it is, is told by the variable COTENANT_FAKE_MPS, some of: `version=13000` (13010 and more have static
partitions, 13040 and more have protocol 3), `sms=132`, `refuse=TEXT` (servers end at once, and log that), `deaf` (it
does not heed `quit`, nor SIGTERM), `silent` (no server ever comes up). The command `fault PID` is the fake's own: that
client has met a fatal error; 0: nobody knows which. It imports little, for it is started some hundred times in a run of
the tests.
"""

# pathlib takes longer to import than the rest of this.
# ruff: noqa: PTH103, PTH108, PTH110, PTH123, PTH211

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen
    from typing import NoReturn

PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
LOG = os.environ.get("CUDA_MPS_LOG_DIRECTORY", PIPE)
TOLD = {word.partition("=")[0]: word.partition("=")[2] for word in os.environ.get("COTENANT_FAKE_MPS", "").split(",")}
VERSION = int(TOLD.get("version", 13000))
SMS = int(TOLD.get("sms", 132))
CHUNK = 8
INVALID = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"


def main(words: list[str]) -> int:
    options = {"-d", "-f", "-S", "-v", "-q", "-h", "-p"}
    if words[:1] == ["client"]:
        return client()
    if not words:
        return forward([line.split() for line in sys.stdin if line.strip()])
    if words[0] not in options:
        return forward([words])
    if ("-p" in words and VERSION < 13040) or ("-S" in words and VERSION < 13010):
        return say(1, f"invalid option; usage: nvidia-cuda-mps-control [{' | '.join(sorted(options))}]")
    if "-v" in words:
        return say(0, f"CUDA MPS Control binary version: {VERSION}")
    if "-q" in words:
        return forward([["quit"]])
    return start(words)


def say(status: int, text: str) -> int:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    return status


def forward(commands: list[list[str]]) -> int:
    for words in commands:
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"{PIPE}/control")
        except OSError:
            return say(1, "Cannot find MPS control daemon process")
        connection.sendall(" ".join(words).encode() + b"\n")
        answer = connection.makefile("rb").read().decode()
        status, _, text = answer.partition("\n")
        sys.stdout.write(text)
        if status != "0":
            return 1
    return 0


def client() -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{PIPE}/control")
    limits = (os.environ.get(f"CUDA_MPS_{name}", "-") for name in ("ACTIVE_THREAD_PERCENTAGE", "SM_PARTITION"))
    connection.sendall(f"client {os.getpid()} {os.getuid()} {' '.join(limits)}\n".encode())
    replies = connection.makefile()
    say(0, replies.readline().strip())
    sys.stdin.read()
    return 0


def start(words: list[str]) -> int:
    lock = os.open(f"{PIPE}/control_lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return say(1, "An instance of this daemon is already running")
    if os.path.exists(f"{PIPE}/control"):
        os.unlink(f"{PIPE}/control")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{PIPE}/control")
    listener.listen(64)
    os.mkfifo(f"{PIPE}/log")
    if "-d" in words and os.fork():
        return 0
    os.setsid()
    with open(f"{PIPE}/nvidia-cuda-mps-control.pid", "w") as file:
        file.write(str(os.getpid()))
    protocol = 3 if "-p" in words else 2
    return Daemon(listener, protocol=protocol, static="-S" in words or protocol == 3).serve()


class Daemon:
    def __init__(self, listener: socket.socket, *, protocol: int, static: bool) -> None:
        import selectors

        self.listener = listener
        self.protocol = protocol
        self.static = static
        self.server: Popen[bytes] | None = None
        self.name = ""  # of the server, in protocol 3
        self.state = "INITIALIZING"
        self.clients: dict[socket.socket, int] = {}  # connection → process number
        self.partitions: dict[str, int] = {}  # id → chunks
        self.made = 0
        self.selector = selectors.DefaultSelector()
        self.readable = selectors.EVENT_READ
        self.selector.register(listener, self.readable)
        self.log("control", f"Starting control daemon using socket {PIPE}/control")
        self.log("control", f"CUDA MPS Control binary version: {VERSION}")

    def serve(self) -> NoReturn:
        if "deaf" in TOLD:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            for key, _ in self.selector.select(0.02):
                if not isinstance(key.fileobj, socket.socket):
                    continue
                if key.fileobj is self.listener:
                    self.accept(self.listener.accept()[0])
                else:
                    self.leave(key.fileobj)
            if self.server is not None and self.server.poll() is not None:
                self.log("control", f"Server {self.server.pid} exited with status {self.server.returncode}")
                self.server = None
                for connection in list(self.clients):
                    self.leave(connection)

    def accept(self, connection: socket.socket) -> None:
        self.log("control", "Accepting connection...")
        words = connection.makefile("rb").readline().decode().split()
        if words[:1] == ["client"]:
            self.join(connection, *words[1:])
            return
        known = [words[0]] if self.protocol == 2 or words[0] in ("quit", "fault") else words[:2]
        command = getattr(self, "do_" + "_".join(known).replace("-", "_"), None)
        status, text = command(*words[len(known) :]) if command else (1, f"Invalid command: {' '.join(words)}")
        with connection:
            connection.sendall(f"{status}\n{text}\n".encode())
        if words[0] == "quit" and status == 0 and "deaf" not in TOLD:
            if self.server:
                self.server.kill()
                self.server.wait()
                self.log("control", f"Server {self.server.pid} exited with status 0")
            self.log("control", "Exit")
            os._exit(0)

    def join(self, connection: socket.socket, pid: str, uid: str, percentage: str, partition: str) -> None:
        if self.server is None:
            self.launch()
        refusal = ""
        if self.state != "ACTIVE":
            refusal = "CUDA_ERROR_MPS_SERVER_NOT_READY"
        elif partition not in self.partitions and self.protocol == 2 and self.static:
            refusal = INVALID
        connection.sendall(f"{refusal or 'CUDA_SUCCESS'} {percentage} {partition}\n".encode())
        if not refusal:
            self.clients[connection] = int(pid)
            self.selector.register(connection, self.readable)
            self.log("server", f"Client {{PID: {pid}, Context ID: 0}} connected")
            self.log("server", f"status of client {{PID: {pid}, Context ID: 1}} is ACTIVE")

    def leave(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        pid = self.clients.pop(connection)
        self.log("server", f"Client {{PID: {pid}, Context ID: 1}} exit")
        if self.state == "FAULT" and not self.clients:
            self.log("server", "Destroy server context on device 0")
            self.log("server", "Creating server context on device 0")
            self.state = "ACTIVE"

    def launch(self) -> None:
        from subprocess import Popen

        if "silent" in TOLD:
            return
        # Other servers' clients would stay connected to them through what this one inherits.
        self.server = Popen(
            ["/bin/bash", "-c", "exec -a nvidia-cuda-mps-server sleep infinity"], start_new_session=True
        )
        self.log("control", f"Starting new server {self.server.pid} for user {os.getuid()}")
        if "refuse" in TOLD:
            self.log("server", "MPS server failed to start")
            self.log("server", TOLD["refuse"])
            self.server.kill()
            return
        self.log("server", "Creating server context on device 0 (NVIDIA H200)")
        self.log("server", "Server has started")
        self.log("control", f"NEW SERVER {self.server.pid}: Ready")
        self.state = "ACTIVE"

    def log(self, which: str, text: str) -> None:
        from time import strftime

        stamp = strftime("%Y-%m-%d %H:%M:%S.000")
        pid = self.server.pid if which == "server" and self.server else os.getpid()
        folder = f"{LOG}/{self.name}" if which == "server" and self.name else LOG
        with open(f"{folder}/{which}.log", "a") as file:
            file.write(f"[{stamp} {which.capitalize():7} {pid:5}] {text}\n")

    # Protocol 2.

    def do_start_server(self, flag: str, uid: str) -> tuple[int, str]:
        if self.server is not None:
            return 0, "server already exists"
        self.launch()
        return 0, ""

    def do_get_server_list(self) -> tuple[int, str]:
        return 0, str(self.server.pid) if self.server else ""

    def do_get_server_status(self, pid: str) -> tuple[int, str]:
        if self.server is None or pid != str(self.server.pid):
            return 0, f"Server {pid} not found"
        return 0, self.state

    def do_get_client_list(self, pid: str) -> tuple[int, str]:
        return 0, "\n".join(map(str, self.clients.values()))

    def do_quit(self, *options: str) -> tuple[int, str]:
        return 0, ""

    def do_fault(self, pid: str) -> tuple[int, str]:
        pids = list(self.clients.values())
        self.state = "FAULT"
        self.log("server", "Server is handling a fatal GPU error.")
        if pid != "0":  # it is known for errors in memory; how the real one puts it, the manual does not say
            self.log("server", f"Fatal memory fault was triggered by client {{PID: {pid}, Context ID: 1}}")
        for one in pids:
            self.log("server", f"status of client {{PID: {one}, Context ID: 1}} is INACTIVE")
        self.log("server", "The following devices")
        self.log("server", "0")
        self.log("server", "The following clients have a sticky error set:")
        for one in pids:
            self.log("server", str(one))
        return 0, ""

    def do_sm_partition(self, what: str, device: str, value: str) -> tuple[int, str]:
        if not self.static:
            return 0, "Static partitioning is not enabled"
        if what == "add":
            made = self.carve(device, int(value))
            failed = f"Failed to fulfill the requested SM partition of {value} chunks, error {INVALID}"
            return 0, f"Partition {made} created" if made else failed
        return 0, "" if self.partitions.pop(f"{device}/{value}", None) else f"No partition {value}"

    def carve(self, device: str, chunks: int) -> str:
        if sum(self.partitions.values()) + chunks > SMS // CHUNK:
            return ""
        self.made += 1
        made = f"{device}/D{self.made}x{os.getpid()}AAAAAAAAAAAAAAAAAAAAAAAAAA"
        self.partitions[made] = chunks
        return made

    # Protocol 3.

    def do_server_create(self, name: str, *options: str) -> tuple[int, str]:
        os.makedirs(f"{LOG}/{name}", exist_ok=True)
        os.makedirs(f"{PIPE}/{name}", exist_ok=True)
        os.symlink(f"{PIPE}/control", f"{PIPE}/{name}/control")
        self.name = name
        self.launch()
        return 0, f"Server '{name}' created"

    def do_server_get(self, name: str, field: str) -> tuple[int, str]:
        if name != self.name:
            return 1, f"No server '{name}'"
        state = {"ACTIVE": "Ready", "FAULT": "Fault"}.get(self.state, "Initializing")
        pid = str(self.server.pid) if self.server else "-"
        return 0, {"pid": pid, "status": state, "pipe-directory": f"{PIPE}/{name}"}[field]

    def do_sm_partition_create(self, name: str, *options: str) -> tuple[int, str]:
        given = {option.partition("=")[0].lstrip("-"): option.partition("=")[2] for option in options}
        made = self.carve(given["device"], int(given["chunks"]))
        if not made:
            return 1, f"not enough free chunks for {given['chunks']}, error {INVALID}"
        self.partitions[name] = self.partitions.pop(made)
        sms = int(given["chunks"]) * CHUNK
        return 0, (
            f"SM partition '{name}' created on device {given['device']} (sm-count={sms})\nCUDA_MPS_SM_PARTITION={made}"
        )

    def do_sm_partition_delete(self, name: str, *options: str) -> tuple[int, str]:
        return 0, "" if self.partitions.pop(name, None) else f"no partition '{name}'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
