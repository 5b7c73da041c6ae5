"""A whole server over nodes that are processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest

import cotenant
from cotenant.app import nodes as nodes_module
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import running
from cotenant.app.nodes import following_nodes
from cotenant.app.reloader import Reloader
from cotenant.app.serving import BackgroundServer
from cotenant.app.startup import Prepared, prepare_deployment
from cotenant.backends.none import NoDevices
from cotenant.config import read_settings
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.controller_status import ControllerStatus
from cotenant.core.model import Kind
from cotenant.errors import ConfigError
from cotenant.live.adaptation_driver import PERIOD
from cotenant.live.deployment import Deployment, nothing_yet
from cotenant.live.nodes.cluster import Cluster
from cotenant.live.nodes.node import NodeSettings
from cotenant.live.nodes.registry import Nodes
from tests.cli.program import Program, until

ROW = np.arange(16, dtype=np.float32).reshape(1, 16)
PATIENCE = 60.0

# A whole device takes 110 ms for two rows: for 150/s as many devices are needed as there are.
PROFILES = "model,kind,share_pct,batch,latency_ms,memory_mib\n" + "".join(
    f"identity,cpu,{share},{batch},{1000 / share * (9 + batch):g},100\n" for share in (50, 100) for batch in (1, 2)
)
SETTINGS = """
backend = "none"
model_repository = "models"
profiles = "profiles.csv"
state = "state.sqlite"
load_models = ["identity"]
adapt = {adapt}
http_port = 0
grpc_port = 0
metrics_port = 0

[[models]]
name = "identity"
slo = "30s"
rate = 150

[cluster]
patience = "1s"
"""
NODE = '[[nodes]]\nname = "{name}"\naddress = "{address}"\n'


class NodeProcess:
    """`cotenant node` on loopback. port: 0 for any."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "node.toml").write_text(f'warm_workers = 0\n[node]\nport = {port}\ncache = "cache"\n')
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cotenant", "node", str(folder / "node.toml"), "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = str(json.loads(self.process.stdout.readline())["address"])

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=PATIENCE)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Starts a node by its name, and again."""
    started: list[NodeProcess] = []

    def start(name: str, port: int = 0) -> NodeProcess:
        started.append(NodeProcess(folder / name, port))
        return started[-1]

    yield start
    for node in started:
        if node.process.poll() is None:
            node.end()


def write_settings(folder: Path, nodes: dict[str, str], *, adapt: bool = False) -> Path:
    (folder / "profiles.csv").write_text(PROFILES)
    path = folder / "cluster.toml"
    listed = "".join(NODE.format(name=name, address=address) for name, address in nodes.items())
    path.write_text(SETTINGS.format(adapt=str(adapt).lower()) + listed)
    return path


def states(server: BackgroundServer) -> dict[str, str]:
    return {str(worker.lane.device): worker.state for worker in server.status().workers}


def test_node_that_is_killed_under_load_costs_no_request(folder: Path, start: Callable[..., NodeProcess]) -> None:
    one, two = start("one"), start("two")
    settings = write_settings(folder, {"node-a": one.address, "node-b": two.address})
    with cotenant.serve(settings) as server:
        assert states(server) == {"node-a/cpu-0": "ready", "node-b/cpu-0": "ready"}
        answers: list[list[float]] = []
        failures: list[Exception] = []
        stop = threading.Event()

        def ask(number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                row = ROW + number * 1000 + count
                try:
                    got = server.infer("identity", {"x": row})["y"]
                except Exception as error:  # noqa: BLE001  # each of them is what the test is about
                    failures.append(error)
                else:
                    answers.append([float(got[0][0]), float(row[0][0])])

        callers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for caller in callers:
            caller.start()
        until(lambda: len(answers) > 50)
        two.end()
        until(lambda: states(server)["node-b/cpu-0"] == "lost")
        seen = len(answers)
        until(lambda: len(answers) > seen + 50)
        three = start("two", two.port)  # the same again, which has the models
        assert three.address == two.address
        until(lambda: states(server)["node-b/cpu-0"] == "ready")
        stop.set()
        for caller in callers:
            caller.join()
        assert not failures
        assert all(got == wanted for got, wanted in answers)
        status = server.status()
        assert status.statistics["identity"].outcomes["served"] == len(answers)
        with urllib.request.urlopen(f"http://{server.addresses.metrics}/metrics") as metrics:
            told = metrics.read().decode()
        assert 'device="node-b/cpu-0"' in told
        assert 'cotenant_node_up{node="node-a"} 1.0' in told
        assert 'cotenant_node_sessions_total{node="node-b"} 2.0' in told
        assert [(node.name, node.up, node.sessions, node.devices) for node in status.nodes] == [
            ("node-a", True, 1, {"cpu": 1}),
            ("node-b", True, 2, {"cpu": 1}),
        ]
        assert status.nodes[0].round_trip > 0


@pytest.mark.parametrize(
    "starting",
    [
        pytest.param(False, id="while it serves"),
        pytest.param(True, id="while the first plan is made", marks=pytest.mark.slow),
    ],
)
def test_node_that_answers_late_joins(
    folder: Path, start: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch, *, starting: bool
) -> None:
    # Nothing is offered: after a cool-down one device would do, however late the other comes on a busy machine.
    patient = partial(ControllerOptions, cooldown=10 * PATIENCE)
    monkeypatch.setattr("cotenant.app.settings.ControllerOptions", patient)
    one = start("one")
    two = start("two")
    two.end()
    settings = read_settings(write_settings(folder, {"node-a": one.address, "node-b": two.address}, adapt=True))
    both = {"node-a/cpu-0", "node-b/cpu-0"}
    replan = Reloader.replan

    async def prepare(builder: DeploymentBuilder) -> Prepared:
        prepared = await prepare_deployment(builder)
        assert {kind.name for kind in prepared.deployment.available} == {"node-a/cpu"}
        if starting:
            await asyncio.to_thread(start, "two", two.port)
            async with asyncio.timeout(PATIENCE):
                while len(builder.available()) < len(both):
                    await asyncio.sleep(0.05)
        return prepared

    async def scenario() -> None:
        async with running(settings, NoDevices(), prepare) as server:

            def controller() -> ControllerStatus:
                adaptation = server._server._adaptation
                assert adaptation is not None and adaptation._adapting is not None
                return adaptation._adapting.controller.status()

            async def replan_last(reloader: Reloader, reason: str) -> None:
                """Plan anew once the controller has heard of all devices, and has done what it does then."""
                await asyncio.sleep(2 * PERIOD)
                while controller().activity != "watching":
                    await asyncio.sleep(0.05)
                await replan(reloader, reason)

            monkeypatch.setattr(Reloader, "replan", replan_last)
            if not starting:
                await asyncio.to_thread(start, "two", two.port)
            async with asyncio.timeout(PATIENCE):
                while {device.id for device in server.deployment.plan.devices} != both:
                    await asyncio.sleep(0.05)
                while set(controller().devices) != both:
                    await asyncio.sleep(0.05)
            assert (await server.infer("identity", {"x": ROW}))["y"].tolist() == ROW.tolist()

    asyncio.run(scenario())


def test_discovered_nodes_are_planned_for_and_removed_ones_are_not(
    folder: Path, start: Callable[..., NodeProcess]
) -> None:
    one, two = start("one"), start("two")
    settings = read_settings(write_settings(folder, {"node-a": one.address}))
    found: list[Nodes] = []

    @asynccontextmanager
    async def discovery(nodes: Nodes) -> AsyncIterator[None]:
        found.append(nodes)
        yield

    async def scenario() -> None:
        async with running(settings, NoDevices(), discovery=discovery) as server:
            (nodes,) = found
            nodes.add("node-b", two.address)

            async def planned(*devices: str) -> None:
                async with asyncio.timeout(PATIENCE):
                    while {str(device.id) for device in server.deployment.plan.devices} != set(devices):
                        await asyncio.sleep(0.05)

            await planned("node-a/cpu-0", "node-b/cpu-0")
            nodes.remove("node-a")
            await planned("node-b/cpu-0")
            assert (await server.infer("identity", {"x": ROW}))["y"].tolist() == ROW.tolist()

    asyncio.run(scenario())


def test_node_that_joins_leaves_models_that_callers_have_loaded_and_unloaded(
    folder: Path, start: Callable[..., NodeProcess]
) -> None:
    one, two = start("one"), start("two")
    path = write_settings(folder, {"node-a": one.address})
    with (folder / "profiles.csv").open("a") as profiles:
        profiles.write("".join(f"lookup,cpu,{share},1,{200 / share:g},100\n" for share in (50, 100)))
    settings = read_settings(path)
    found: list[Nodes] = []

    @asynccontextmanager
    async def discovery(nodes: Nodes) -> AsyncIterator[None]:
        found.append(nodes)
        yield

    async def scenario() -> None:
        async with running(settings, NoDevices(), discovery=discovery) as server:
            await server.unload("identity")
            await server.load("lookup")
            before = server.deployment
            found[0].add("node-b", two.address)
            async with asyncio.timeout(PATIENCE):
                while server.deployment is before:
                    await asyncio.sleep(0.05)
            assert {kind.name for kind in server.deployment.problem.fleet} == {"node-a/cpu", "node-b/cpu"}
            assert set(server.deployment.plan.rates()) == {"lookup"}

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ConfigError("no plan"), ZeroDivisionError("a fault of a planner's")])
def test_plan_for_nodes_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(nodes_module, "SETTLE", 0.0)
    monkeypatch.setattr(nodes_module, "RETRY", 0.01)
    kind = Kind(name="node-a/cpu", count=1)
    plans = iter([False, True])
    fleets: list[tuple[Kind, ...]] = []  # planned for, in order
    planned = asyncio.Event()
    builder = mock.Mock(available=lambda: (kind,))
    server = mock.Mock(deployment=nothing_yet())

    async def replan(reason: str) -> None:
        fleets.append(builder.available())
        if not next(plans):
            raise error
        server.deployment = msgspec.structs.replace(nothing_yet(), available=(kind,))
        planned.set()

    async def scenario() -> None:
        nodes = Nodes(NodeSettings())
        monkeypatch.setattr(nodes, "fleet", lambda: (kind,))
        cluster = Cluster(NoDevices(), nodes)
        async with following_nodes(cluster, server, builder, mock.Mock(replan=replan)), asyncio.timeout(PATIENCE):
            await planned.wait()
            await asyncio.sleep(0)  # a third would find no plan to give

    asyncio.run(scenario())
    assert fleets == [(kind,), (kind,)]


def test_node_that_joined_before_a_rejected_reload_is_planned_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "SETTLE", 0.0)
    path = write_settings(folder, {})
    settings = read_settings(path)
    path.write_text(path.read_text().replace('slo = "30s"', 'slo = "1ms"'))
    impossible = read_settings(path)
    first, second = (Kind(name=f"{node}/cpu", count=1, cuts=(50, 100, 1000)) for node in ("node-a", "node-b"))

    async def scenario() -> None:
        nodes = Nodes(NodeSettings())
        monkeypatch.setattr(nodes, "fleet", lambda: (first,))
        cluster = Cluster(NoDevices(), nodes)
        builder = DeploymentBuilder(settings, cluster)
        server = mock.Mock(deployment=await builder.build(settings.load_models), learnt=lambda: None)
        planned = asyncio.Event()

        async def change(changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> None:
            server.deployment = await changed(server.deployment)
            planned.set()

        server.change = change
        reloader = Reloader(server, builder, settings)
        monkeypatch.setattr(nodes, "fleet", lambda: (first, second))
        with pytest.raises(ConfigError, match="can be served within its target"):
            await reloader.reload(impossible)
        async with following_nodes(cluster, server, builder, reloader), asyncio.timeout(PATIENCE):
            await planned.wait()
        assert server.deployment.problem.fleet == (first, second)

    asyncio.run(scenario())


def test_server_without_devices_does_not_start(folder: Path) -> None:
    write_settings(folder, {})
    with (
        pytest.raises(ConfigError, match=r'^backend = "none": this machine gives no device, and no nodes are listed'),
        cotenant.serve(folder / "cluster.toml"),
    ):
        pass
    write_settings(folder, {"node-a": "127.0.0.1:1"})
    with (
        pytest.raises(ConfigError, match=r'^backend = "none", and no node has answered: node-a cannot be reached'),
        cotenant.serve(folder / "cluster.toml"),
    ):
        pass


def test_listed_node_beyond_this_machine_needs_a_guard(folder: Path) -> None:
    write_settings(folder, {"node-a": "192.0.2.1:8010"})
    with (
        pytest.raises(ConfigError, match=r"^node node-a: 192\.0\.2\.1 can be reached from other machines"),
        cotenant.serve(folder / "cluster.toml"),
    ):
        pass


def test_node_with_a_wrong_token_file_or_address_says_so(folder: Path, program: Program) -> None:
    short = folder / "short"
    short.write_text("short\n")
    for arguments, words in (
        (["--token-file", str(short)], "line 1 is not a token"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, and whoever reaches a node"),  # noqa: S104
        (["--port", "70000"], "--port: 70000 is not a port"),
    ):
        assert words in program.refuses("node", *arguments)
