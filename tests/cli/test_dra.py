"""`cotenant dra` as a node runs it: a process of its own with a fake NVIDIA driver, an API server's double and a
kubelet of the tests' own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import PATIENCE, Program, started
from tests.driver.build import fitted
from tests.k8s.api_double import ApiDouble, api_double
from tests.k8s.dra.kubelet import Kubelet
from tests.k8s.dra.published import check_slice
from tests.k8s.dra.samples import GIB, claim
from tests.k8s.dra.test_planned_claims import pod
from tests.k8s.eventually import eventually
from tests.k8s.test_client import KUBECONFIG


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="dra-") as name:
        yield Path(name)


@contextmanager
def running(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = started(folder, "dra", *arguments, f"--kubeconfig={folder / 'config'}", env=env)
    try:
        yield process
    finally:
        with process:
            process.kill()


async def up(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait until a driver says that it is up."""
    assert process.stdout is not None and process.stderr is not None
    line = await asyncio.to_thread(process.stdout.readline)
    assert line, process.stderr.read()
    said: dict[str, Any] = json.loads(line)
    return said


async def ended(process: subprocess.Popen[str]) -> str:
    _, said = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
    assert "Traceback" not in said, said
    return said


def with_server(folder: Path, scenario: Callable[[ApiDouble], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(120), api_double() as api:
            (folder / "config").write_text(KUBECONFIG.format(server=api.url))
            await scenario(api)

    asyncio.run(run())


def test_driver_that_is_killed_goes_on_where_it_was(short: Path) -> None:
    kubelet = Kubelet(short)
    state = short / "state"
    state.touch()
    arguments = (
        "driver",
        "--node=node-a",
        f"--kubelet-directory={kubelet.folder}",
        f"--cdi-directory={kubelet.cdi}",
        "--interval=100ms",
        "--json",
    )

    async def scenario(api: ApiDouble) -> None:
        api.put("nodes", {"metadata": {"name": "node-a"}})
        env = fitted("h200,h200", state=state)
        with running(short, *arguments, env=env) as process:
            said = await up(process)
            assert said["node"] == "node-a" and len(said["devices"]) == 2
            await kubelet.register()
            (published,) = await eventually(lambda: api.objects("resourceslices"))
            check_slice(published)
            names = [each["name"] for each in published["spec"]["devices"]]
            assert names == said["devices"]
            used = {"request": "share", "pool": "node-a", "device": names[0]}
            made = api.put("resourceclaims", claim("a", result_of(used, "600")))
            before = await kubelet.prepare(made)
            assert kubelet.container(before["a"])[0]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
            process.kill()
            await ended(process)
        with running(short, *arguments, env=env) as process:
            await up(process)
            await kubelet.register()
            assert await kubelet.prepare(made) == before
            other = api.put("resourceclaims", claim("b", result_of(used, "600")))
            assert "60 % of device" in (await kubelet.prepare(other))["b"]
            state.write_text("reset 0\n")
            await eventually(lambda: len(api.objects("resourceslices")[0]["spec"]["devices"]) == 1)
            assert api.objects("resourceslices")[0]["spec"]["pool"]["generation"] == 2
            assert await kubelet.unprepare(made) == {"a": ""}
            process.send_signal(signal.SIGTERM)
            await ended(process)
            assert process.returncode == 0
        assert list((kubelet.folder / "plugins_registry").iterdir()) == []
        assert sum("resourceslices" in each for each in api.writes) == 2

    def result_of(used: dict[str, Any], share: str) -> dict[str, Any]:
        capacity = {"share": share, "memory": str(GIB)}
        return {**used, "driver": "cotenant.dev", "consumedCapacity": capacity}

    with_server(short, scenario)


def test_claims_are_created_until_the_command_is_stopped(short: Path) -> None:
    async def scenario(api: ApiDouble) -> None:
        api.put("pods", pod("a", by="share-a"))
        with running(short, "claims") as process:
            await eventually(
                lambda: [each["metadata"]["name"] for each in api.objects("resourceclaims")] == ["share-a"]
            )
            process.send_signal(signal.SIGTERM)
            await ended(process)
            assert process.returncode == 0

    with_server(short, scenario)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "--node: the name of this node is missing; in a pod, set NODE_NAME from spec.nodeName"),
        (["--node=a", "--mps-pipe-directory=pipe"], "--mps-pipe-directory: 'pipe' is not absolute"),
        (["--node=a", "--kubeconfig=nowhere"], "no API server of Kubernetes to ask"),
    ],
)
def test_driver_that_cannot_start_says_why(
    program: Program, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    assert program.refuses("dra", "driver", *arguments).startswith(why)
