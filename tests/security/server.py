"""A real server in a process of its own, and callers that speak to its sockets byte by byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from benchmarks.onnx_models import Dims, identity, save
from cotenant.core.profile import Point, Profile, write_profiles
from tests.worker import graphs

PATIENCE = 30.0  # seconds until a caller that gets no answer fails
MODELS = ("identity", "picture", "strings")


class Served:
    """The addresses of a server, and its process. log: the file with what it writes on standard error."""

    def __init__(self, pid: int, addresses: dict[str, str], log: Path) -> None:
        self.pid = pid
        self.http, self.grpc, self.metrics = addresses["http"], addresses["grpc"], addresses["metrics"]
        self.log = log

    def connect(self, address: str = "") -> socket.socket:
        host, port = (address or self.http).split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def ask(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes, and return the status and the body of the first response."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_response(sock)

    def infer(self, model: str, *inputs: dict[str, Any], **more: Any) -> tuple[int, Any]:
        status, body = self.ask(post(f"/v2/models/{model}/infer", json.dumps({"inputs": inputs, **more}).encode()))
        return status, json.loads(body)

    def get(self, path: str) -> tuple[int, bytes]:
        return self.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def serves(self) -> bool:
        """Tell whether each model answers an ordinary request."""
        return all(self.infer(model, ORDINARY[model])[0] == 200 for model in MODELS)

    def resident(self) -> int:
        """Return the bytes of memory that the server's own process holds, those shared with workers included."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu(self) -> float:
        """Return the seconds of processor time that the server's own process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ORDINARY: dict[str, dict[str, Any]] = {
    "identity": {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16},
    "picture": {"name": "x", "shape": [1, 3, 2, 2], "datatype": "FP32", "data": [0.5] * 12},
    "strings": {"name": "x", "shape": [1, 2], "datatype": "BYTES", "data": ["a", "b"]},
}


def post(path: str, body: bytes, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + body


def read_response(sock: socket.socket) -> tuple[int, bytes]:
    """Read one response that has a length. An end without one is status 0."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(1 << 16)
        if not part:
            return 0, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        raise AssertionError("100 Continue was not asked for")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(lengths[0]):
        part = sock.recv(1 << 20)
        assert part, "a response without its end"
        body += part
    return int(head.split()[1]), body


def _picture(path: Path) -> None:
    """y = x, pictures of three planes of any size."""
    shape: Dims = ["n", 3, "h", "w"]
    node = helper.make_node("Identity", ["x"], ["y"])
    save(path, [node], {"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)})


@contextmanager
def served(root: Path, settings: str = "", files: int | None = None) -> Iterator[Served]:
    """Run `cotenant serve` on three models of one row each, `identity`, `picture` and `strings`, in one partition.

    settings: further lines of the settings file. files: how many files the server may open.
    """
    makers: dict[str, Callable[[Path], object]] = {
        "identity": identity,
        "picture": _picture,
        "strings": graphs.strings,
    }
    for model, make in makers.items():
        folder = root / "models" / model / "1"
        folder.mkdir(parents=True)
        make(folder / "model.onnx")
    points = [Point(share=1000, batch=batch, latency=0.001, memory=0) for batch in (1, 4)]
    (root / "profiles.csv").write_text(write_profiles([Profile(model, "cpu", points) for model in makers]))
    entries = "".join(f'[[models]]\nname = "{model}"\nslo = "20s"\nrate = 1\nmax_batch = 4\n' for model in makers)
    head = 'profiles = "profiles.csv"\n' + settings + "\n[cpu]\ncuts = [100]\n"
    (root / "settings.toml").write_text(head + entries)
    ports = [f"--{front}-port=0" for front in ("http", "grpc", "metrics")]
    command = [sys.executable, "-m", "cotenant", "serve", f"{root}/settings.toml", *ports, "--json"]
    if files is not None:
        command = ["prlimit", f"--nofile={files}", *command]
    log = root / "log"
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Served(process.pid, json.loads(line)["addresses"], log)
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(PATIENCE)
