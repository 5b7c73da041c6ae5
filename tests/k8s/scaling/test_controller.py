"""Both controllers together: what Prometheus has becomes pods, whatever fails, hangs or is killed in between."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cotenant.control.scaling.hetsev import GreedyScaling
from cotenant.control.scaling.provisioning import InstanceScaler, Provision
from cotenant.core.profile import write_profiles
from cotenant.errors import InstanceError, PrometheusError
from cotenant.k8s.client import ApiClient
from cotenant.k8s.scaling.client import InstanceClient
from cotenant.k8s.scaling.controller import Metrics, ScalingController
from cotenant.k8s.scaling.observed import Observed
from tests.control.scaling.test_provisioning import V100, problem
from tests.k8s.api_double import ApiDouble
from tests.k8s.eventually import eventually
from tests.k8s.play import play
from tests.k8s.pods.test_command import write_kubeconfig
from tests.k8s.scaling.prometheus_server import pages, scraping
from tests.k8s.scaling.test_instances import serving, template
from tests.k8s.scaling.test_observed import Server, repository

INTERVAL = 15.0


class Repository:
    """What Prometheus would say. None: it does not answer."""

    def __init__(self, rates: dict[str, float] | None) -> None:
        self.rates = rates

    async def read(self) -> Observed:
        if self.rates is None:
            raise PrometheusError("away", 0)
        return Observed(rates=self.rates)


class Lossy(InstanceClient):
    """Requests are carried out, and the answer is lost."""

    async def provision(self, wanted: Provision) -> bool:
        await super().provision(wanted)
        raise InstanceError("lost")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += INTERVAL
        return self.now


def controller(metrics: Metrics, client: InstanceClient, rates: dict[str, float] | None = None) -> ScalingController:
    scaler = InstanceScaler(problem(V100, rates=rates or {"a": 0.0}), GreedyScaling(share=500, cool_down=2 * INTERVAL))
    return ScalingController(scaler, metrics, client, Clock(), INTERVAL)


def pods(api: ApiDouble) -> list[str]:
    return sorted(each["metadata"]["name"] for each in api.objects("pods"))


def serve_all(api: ApiDouble) -> None:
    """Let each pod become ready."""
    for each in api.objects("pods"):
        api.put("pods", each | {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}})


def no_node_has_room(api: ApiDouble) -> None:
    """Let the one pod that there is find no node."""
    (pod,) = api.objects("pods")
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    api.put("pods", pod | {"status": {"phase": "Pending", "conditions": [full]}})


@asynccontextmanager
async def started(client: ApiClient, kind: type[InstanceClient] = InstanceClient) -> AsyncIterator[InstanceClient]:
    async with serving(client) as address:
        asking = kind(address)
        try:
            yield asking
        finally:
            await asking.close()


class Scene(msgspec.Struct):
    """What a scenario has: an API with a template of model a, and an instance controller of it."""

    api: ApiDouble
    asking: InstanceClient
    metrics: Repository

    def controller(self) -> ScalingController:
        """Return a fresh scaling controller."""
        return controller(self.metrics, self.asking)


def scale(
    scenario: Callable[[Scene], Awaitable[None]],
    rate: float,
    kind: type[InstanceClient] = InstanceClient,
    *,
    templates: bool = True,
    seconds: float = 60.0,
) -> None:
    """Play a scenario in which Prometheus says that model a is asked at a rate."""

    async def main(api: ApiDouble, client: ApiClient) -> None:
        if templates:
            api.put("podtemplates", template("a", "a"))
        async with started(client, kind) as asking:
            await scenario(Scene(api, asking, Repository({"a": rate})))

    play(main, seconds)


def test_rates_become_pods_and_pods_go_when_rates_fall() -> None:
    async def scenario(scene: Scene) -> None:
        scaling = scene.controller()
        await scaling.step()
        assert pods(scene.api) == ["a-v100-0", "a-v100-1"]
        written = len(scene.api.writes)
        await scaling.step()  # they are on their way
        assert len(scene.api.writes) == written
        serve_all(scene.api)
        scene.metrics.rates = {"a": 10.0}
        for _ in range(3):
            await scaling.step()
        assert pods(scene.api) == ["a-v100-0"]

    scale(scenario, 150.0)


def test_prometheus_away_leaves_all_as_it_is_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(scene: Scene) -> None:
        scaling = scene.controller()
        await scaling.step()
        serve_all(scene.api)
        silences: tuple[dict[str, float] | None, ...] = (None, {})  # it does not answer; it has no data
        for scene.metrics.rates in silences:
            for _ in range(9):
                assert await scaling.step() == []
        assert len(pods(scene.api)) == 2
        assert caplog.text.count("rates are not known, instances stay as they are: away") == 1

    with caplog.at_level(logging.WARNING):
        scale(scenario, 150.0)


def test_request_that_fails_is_asked_again_and_carried_out_once() -> None:
    async def scenario(scene: Scene) -> None:
        scaling = scene.controller()
        with scene.api.failing(500, "POST"):
            assert len(await scaling.step()) == 2
        assert pods(scene.api) == []
        with scene.api.away():
            assert await scaling.step() == []  # what there is, is not known
        await scaling.step()
        assert pods(scene.api) == ["a-v100-0", "a-v100-1"]

    scale(scenario, 150.0)


def test_request_that_hangs_holds_up_no_other() -> None:
    class Hanging(InstanceClient):
        """The first of two instances is made once the second one is."""

        def __init__(self, address: str) -> None:
            super().__init__(address)
            self.second = asyncio.Event()

        async def provision(self, wanted: Provision) -> bool:
            if wanted.name == "a-v100-0":
                await self.second.wait()
            made = await super().provision(wanted)
            if wanted.name == "a-v100-1":
                self.second.set()
            return made

    async def scenario(scene: Scene) -> None:
        assert len(await scene.controller().step()) == 2
        assert pods(scene.api) == ["a-v100-0", "a-v100-1"]

    scale(scenario, 150.0, Hanging, seconds=20.0)


def test_instance_that_is_there_already_is_not_said_to_be_one_more(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(scene: Scene) -> None:
        await asyncio.gather(*(scene.controller().step() for _ in range(2)))
        assert caplog.text.count("one more on v100") == 2 == len(pods(scene.api))

    with caplog.at_level(logging.INFO):
        scale(scenario, 150.0)


def test_fault_of_an_instance_that_comes_again_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(scene: Scene) -> None:
        scaling = scene.controller()
        for _ in range(2):
            await scaling.step()
            no_node_has_room(scene.api)
            await scaling.step()
            await scene.asking.release("a-v100-0")
        assert caplog.text.count("instance a-v100-0 is stuck: 0/3 nodes") == 2

    with caplog.at_level(logging.WARNING):
        scale(scenario, 50.0)


def test_answer_that_is_lost_makes_no_second_instance() -> None:
    async def scenario(scene: Scene) -> None:
        for _ in range(3):
            await scene.controller().step()  # each time a fresh one
        assert pods(scene.api) == ["a-v100-0", "a-v100-1"]

    scale(scenario, 150.0, Lossy)


def test_two_scaling_controllers_at_once_make_what_one_makes() -> None:
    async def scenario(scene: Scene) -> None:
        await asyncio.gather(*(scene.controller().step() for _ in range(2)))
        assert pods(scene.api) == [f"a-v100-{n}" for n in range(5)]

    scale(scenario, 350.0)


def test_what_keeps_an_instance_from_serving_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(scene: Scene) -> None:
        scaling = scene.controller()
        for _ in range(3):
            await scaling.step()
        assert caplog.text.count("a-v100-0: model 'a' has no PodTemplate for 'v100'") == 1
        scene.api.put("podtemplates", template("a", "a"))
        await scaling.step()
        no_node_has_room(scene.api)
        for _ in range(3):
            await scaling.step()
        assert caplog.text.count("instance a-v100-0 is stuck: 0/3 nodes") == 1
        assert pods(scene.api) == ["a-v100-0"]

    with caplog.at_level(logging.WARNING):
        scale(scenario, 50.0, templates=False)


def test_requests_that_a_real_prometheus_counts_become_pods(tmp_path: Path) -> None:
    """All of the way: the metrics of a server, scraped; the rate, decided upon; the request over gRPC; the pod."""

    async def main(api: ApiDouble, client: ApiClient) -> None:
        api.put("podtemplates", template("resnet", "resnet"))
        async with (
            started(client) as asking,
            pages({"server": Server().page}) as target,
            scraping(tmp_path, {"server": (target, "server")}) as source,
        ):
            scaling = controller(repository(source), asking, {"resnet": 0.0})

            async def provisioned() -> list[str]:
                await scaling.step()
                return pods(api)

            assert await eventually(provisioned) == ["resnet-v100-0"]

    play(main, 100.0)


PROBLEM = """
profiles = ["profiles.csv"]
[[models]]
name = "a"
slo = "31ms"
rate = 100
[[devices]]
kind = "v100"
count = 4
cuts = [50, 100]
"""


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cotenant", *arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


async def line(of: asyncio.subprocess.Process) -> Any:
    assert of.stdout is not None
    text = b""
    while not text.rstrip().endswith(b"}"):
        more = await of.stdout.readline()
        assert more, "it ended"
        text += more
    return json.loads(text)


@asynccontextmanager
async def telling(rates: dict[str, float]) -> AsyncIterator[str]:
    """A Prometheus that knows the rates of models, and of nothing else."""

    async def answer(request: web.Request) -> web.Response:
        asked = rates if "cotenant_requests_total" in request.query["query"] else {}
        series = [{"metric": {"model": model}, "value": [1, str(rate)]} for model, rate in asked.items()]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": series}})

    app = web.Application()
    app.router.add_get("/api/v1/query", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_commands_go_on_after_either_is_killed(tmp_path: Path) -> None:
    known = problem(V100, rates={"a": 100.0})
    (tmp_path / "profiles.csv").write_text(write_profiles(list(known.profiles.values())))
    (tmp_path / "problem.toml").write_text(PROBLEM)

    async def main(api: ApiDouble, client: ApiClient) -> None:
        api.put("podtemplates", template("a", "a"))
        kubeconfig = write_kubeconfig(tmp_path, api.url)
        rates: dict[str, float] = {}
        async with telling(rates) as url, AsyncExitStack() as stack:
            keeping = (f"--kubeconfig={kubeconfig}", "--json")
            first = await stack.enter_async_context(process("instance-controller", "--port=0", *keeping))
            port = (await line(first))["address"].rpartition(":")[2]
            scaling = (
                *("scaling-controller", str(tmp_path / "problem.toml"), f"--prometheus={url}"),
                *(f"--instances=127.0.0.1:{port}", "--interval=100ms", "--cool-down=300ms"),
            )
            one = await stack.enter_async_context(process(*scaling))
            await eventually(lambda: len(pods(api)) == 2)  # as the problem's rate takes
            first.kill()
            rates["a"] = 250.0
            second = await stack.enter_async_context(process("instance-controller", f"--port={port}", *keeping))
            await line(second)
            await eventually(lambda: len(pods(api)) == 4)
            one.kill()
            await one.wait()
            serve_all(api)
            rates["a"] = 100.0
            other = await stack.enter_async_context(process(*scaling))
            await eventually(lambda: len(pods(api)) == 2)
            for each in (other, second):
                each.send_signal(signal.SIGTERM)
                assert await each.wait() == 0

    play(main, 120.0)
