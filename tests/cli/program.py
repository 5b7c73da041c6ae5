"""The program as users run it: in this process where only what it says matters, as a process of its own else."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cotenant.cli import main
from cotenant.core.plan import Plan

PATIENCE = 60.0
COMMAND = [sys.executable, "-m", "cotenant"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Program:
    """Runs commands in this process, in a folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str | Path) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["cotenant", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code is None or isinstance(end.value.code, int)
        return Said(end.value.code or 0, *self._capsys.readouterr())

    def refuses(self, *arguments: str | Path) -> str:
        """The one line in which it says why it does not do it."""
        said = self(*arguments)
        assert (said.code, said.out) == (1, "")
        line, end = said.err.removesuffix("\n"), said.err[-1:]
        assert line.startswith("error: ") and "\n" not in line and end == "\n", said.err
        return line.removeprefix("error: ")


class Served(NamedTuple):
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    address: str
    plan: Plan
    workers: list[int]

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE)
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, content)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text else None

    def works(self) -> bool:
        """Whether `identity` answers."""
        given = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
        status, answer = self.ask("POST", "/v2/models/identity/infer", {"inputs": [given]})
        return status == 200 and answer["outputs"][0]["data"] == [0.5] * 16

    def end(self, *signals: int) -> Said:
        """Send these, one when the other has been noticed, and wait. All its workers must be gone."""
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err, err
        until(lambda: not any(alive(pid) for pid in self.workers))
        return Said(self.process.returncode, out, err)


def environment(**changes: str) -> dict[str, str]:
    """Ours, without what would hide that output is not flushed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | changes


def started(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment(**(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """`cotenant serve --json` of the settings in a folder; killed afterwards if it still runs."""
    process = started(folder, "serve", "serve.toml", "--json", *arguments)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        up = json.loads(line)
        yield Served(process, up["addresses"]["http"], Plan.from_json(json.dumps(up["plan"])), workers_of(process.pid))
    finally:
        with process:
            process.kill()


def workers_of(parent: int) -> list[int]:
    """The workers and front ends that a process has started; pytest itself may have children of another kind."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            program = (stat.parent / "cmdline").read_bytes()
            if int(fields[1]) == parent and (b"cotenant.worker." in program or b"cotenant.app.http_process" in program):
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


INTERRUPT, TERMINATE, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
