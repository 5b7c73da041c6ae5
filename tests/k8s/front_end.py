"""Front ends for tests: in this process, or as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cotenant.app.backend import create_backend
from cotenant.app.running_server import RunningServer
from cotenant.config import read_settings
from cotenant.errors import KubernetesError
from cotenant.k8s.resource import SERVED_MODELS
from cotenant.k8s.serving import on_kubernetes
from tests.k8s.eventually import eventually
from tests.k8s.servers import ApiServer
from tests.live.deployment import csv, repository

SETTINGS = """
{extra}
model_repository = "models"
profiles = "profiles.csv"
model_control_mode = "kubernetes"
repository_poll_interval = "0.2s"
http_port = 0
grpc_port = 0
metrics_port = 0
grace = "1s"
warm_workers = 0
standby_workers = 0
adapt = false

[kubernetes]
lease_duration = "{lease}"
identity = "{identity}"
{kubernetes}
"""


def settings_file(
    folder: Path, identity: str = "front-a", lease: str = "3s", extra: str = "", kubernetes: str = ""
) -> Path:
    """Write the settings of a front end, and the models that it may serve, and return their path."""
    if not (folder / "models").exists():
        repository(folder / "models")
        (folder / "profiles.csv").write_text(csv())
    path = folder / f"{identity}.toml"
    path.write_text(SETTINGS.format(identity=identity, lease=lease, extra=extra, kubernetes=kubernetes))
    return path


@asynccontextmanager
async def front_end(
    api: ApiServer, folder: Path, identity: str = "front-a", *, extra: str = "", kubernetes: str = ""
) -> AsyncIterator[RunningServer]:
    """Run a front end in this process within the block, which begins once it leads. extra, kubernetes: further
    settings."""
    settings = read_settings(settings_file(folder, identity, extra=extra, kubernetes=kubernetes))
    async with on_kubernetes(settings, create_backend(settings), kubeconfig=api.kubeconfig) as server:
        yield server


async def served(server: RunningServer) -> bool:
    """Whether `identity` answers."""
    rows = np.full((1, 16), 0.5, np.float32)
    return bool((await server.infer("identity", {"x": rows}, timeout=30.0))["y"][0, 0] == 0.5)


async def conditions(api: ApiServer, name: str, resource: Any = SERVED_MODELS) -> dict[str, tuple[str, str, str]]:
    """Return status, reason and message of each condition of an object."""
    found = ((await api.client.get(resource, name)).get("status") or {}).get("conditions") or ()
    return {each["type"]: (each["status"], each["reason"], each["message"]) for each in found}


async def becomes(
    api: ApiServer, name: str, status: str, reason: str, type: str = "Ready", resource: Any = SERVED_MODELS
) -> str:
    """Wait until a condition of an object is so, and return its message."""
    last: dict[str, Any] = {}

    async def holds() -> bool:
        nonlocal last
        try:
            last = await conditions(api, name, resource)
        except KubernetesError:
            return False
        return last.get(type, ("", "", ""))[:2] == (status, reason)

    try:
        await eventually(holds)
    except AssertionError:
        raise AssertionError(f"{name}: {type} is not {status} ({reason}): {last}") from None
    return str(last[type][2])


class Process:
    """A front end in a process of its own: `cotenant serve`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 60.0)


@asynccontextmanager
async def process(api: ApiServer, folder: Path, identity: str = "front-a", lease: str = "3s") -> AsyncIterator[Process]:
    """Run `cotenant serve` within the block; it may not lead yet."""
    path, log = settings_file(folder, identity, lease), folder / f"{identity}.log"
    environment = os.environ | {"KUBECONFIG": str(api.kubeconfig), "XDG_CACHE_HOME": str(folder / "cache")}
    with log.open("wb") as out:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cotenant", "serve", str(path), "--json", "--log-level", "info"),
            stdout=out,
            stderr=out,
            env=environment,
        )
    running = Process(started, log)
    try:
        yield running
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


@asynccontextmanager
async def agent(folder: Path, name: str) -> AsyncIterator[str]:
    """Run `cotenant node` within the block, and return its address."""
    path, log = folder / f"agent-{name}.toml", folder / f"agent-{name}.log"
    path.write_text(f'[node]\nport = 0\ncache = "agent-{name}"\n[cpu]\nreserve = "0%"\n')
    with log.open("wb") as err:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cotenant", "node", str(path), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=err,
            env=os.environ | {"XDG_CACHE_HOME": str(folder / f"cache-{name}")},
        )
    try:
        assert started.stdout is not None
        line = await asyncio.wait_for(started.stdout.readline(), 60.0)
        assert line, log.read_text()
        yield str(json.loads(line)["address"])
    finally:
        if started.returncode is None:
            started.terminate()
            await asyncio.wait_for(started.wait(), 30.0)


def addresses(log: str) -> dict[str, str]:
    """Return the addresses that a front end has printed once it was up."""
    for line in log.splitlines():
        if line.startswith('{"addresses"'):
            found: dict[str, str] = json.loads(line)["addresses"]
            return found
    return {}
