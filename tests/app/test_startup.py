"""What a server does from its first open port until it is ready."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
from pathlib import Path

import msgspec
import pytest

from cotenant.app import lifecycle
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.lifecycle import running
from cotenant.app.profile_source import KnownProfiles, ProfileSource
from cotenant.app.startup import Prepared, prepare_deployment
from cotenant.backends.cpu import Cpu
from cotenant.cli.status import status_view
from cotenant.config import Settings, read_profiles_file
from cotenant.control.rate_forecast import HoltWintersOptions
from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError
from cotenant.live.profile_corrections import ProfileCorrections
from cotenant.live.server import Server
from cotenant.live.status import Status
from cotenant.profiling.machine_load import MachineLoad
from cotenant.worker.repository import Entry
from tests.app.test_server_state import settings_of
from tests.cli.program import Program
from tests.render.plans import shown

BUSY = MachineLoad(used=2.0, processors=2, slowdown=2.0)


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def test_controller_gets_what_the_settings_say(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), headroom=1.4, forecast=HoltWintersOptions())
    adaptation = lifecycle._adaptation(settings, ProfileCorrections(), lambda: settings.planner)
    assert adaptation is not None
    assert (adaptation.controller.headroom, adaptation.controller.forecast) == (1.4, HoltWintersOptions())
    fixed = msgspec.structs.replace(settings, adapt=False)
    assert lifecycle._adaptation(fixed, ProfileCorrections(), lambda: fixed.planner) is None


def test_port_in_use_is_an_error_before_anything_is_prepared(tmp_path: Path) -> None:
    async def prepare(builder: DeploymentBuilder) -> Prepared:
        raise AssertionError("prepared")

    async def main(settings: Settings) -> None:
        async with running(settings, Cpu(), prepare):
            raise AssertionError("running")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = msgspec.structs.replace(settings_of(tmp_path), http_port=port)
        with pytest.raises(ConfigError, match=rf"cannot serve HTTP on 127\.0\.0\.1:{port}"):
            asyncio.run(main(settings))


def test_demo_with_a_port_in_use_fails_before_it_builds_anything(program: Program, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refusal = program.refuses("demo", "-r", "zoo", "--http-port", "0", "--grpc-port", str(port))
    assert refusal.startswith(f"cannot serve gRPC on 127.0.0.1:{port}: ") and not (folder / "zoo").exists()


def test_server_is_live_and_says_how_far_it_is_while_it_prepares(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), http_port=free_port(), adapt=False)
    port = settings.http_port
    infer = ("POST", "/v2/models/identity/infer", b'{"inputs": []}')

    async def main() -> None:
        seen: dict[str, tuple[int, str]] = {}

        async def prepare(builder: DeploymentBuilder) -> Prepared:
            builder.progress("identity", 0, 4, 1, 2)
            for name, request in (
                ("live", ("GET", "/v2/health/live")),
                ("ready", ("GET", "/v2/health/ready")),
                ("status", ("GET", "/cotenant/status")),
                ("page", ("GET", "/")),
                ("metrics", ("GET", "/metrics")),
                ("index", ("POST", "/v2/repository/index")),
                ("infer", infer),
            ):
                seen[name] = await asyncio.to_thread(ask, port, *request)
            return await prepare_deployment(builder)

        async with running(settings, Cpu(), prepare):
            assert seen["live"][0] == 200
            assert seen["ready"][0] == 400
            assert json.loads(seen["ready"][1])["error"] == (
                "the server is not ready: profiling identity, model 1 of 2"
            )
            status = json.loads(seen["status"][1])
            assert (status["ready"], status["startup"]) == (False, "profiling identity, model 1 of 2")
            told = shown(status_view(msgspec.json.decode(seen["status"][1], type=Status)))
            assert "starting: profiling identity, model 1 of 2" in told
            assert {name: seen[name][0] for name in ("page", "metrics", "index")} == dict.fromkeys(
                ("page", "metrics", "index"), 200
            )
            assert seen["infer"][0] == 503 and "the server is starting: profiling identity" in seen["infer"][1]
            assert await asyncio.to_thread(ask, port, "GET", "/v2/health/ready") == (200, '{"ready":true}')
            assert json.loads((await asyncio.to_thread(ask, port, "GET", "/cotenant/status"))[1])["startup"] == ""

    asyncio.run(main())


def test_start_tells_each_of_its_steps_and_what_is_prepared_later_is_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), adapt=False)
    told: list[str] = []
    hear = Server.starting

    def starting(server: Server, how_far: str) -> None:
        hear(server, how_far)
        told.append(server.startup())

    monkeypatch.setattr(Server, "starting", starting)

    async def main() -> None:
        builders: list[DeploymentBuilder] = []

        async def prepare(builder: DeploymentBuilder) -> Prepared:
            builders.append(builder)
            return await prepare_deployment(builder)

        async with running(settings, Cpu(), prepare) as server:
            assert told == ["reading the models", "planning", "starting the workers", ""]
            builders[0].progress("another", 0, 4, 1, 1)
            await builders[0].describe()
            assert set(told[4:]) == {""} and (await server.status()).ready

    asyncio.run(main())


def test_repository_index_of_a_server_that_starts_lists_its_models(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), http_port=free_port(), adapt=False)

    async def index() -> dict[str, tuple[str, str]]:
        status, text = await asyncio.to_thread(ask, settings.http_port, "POST", "/v2/repository/index")
        assert status == 200
        return {entry["name"]: (entry["state"], entry.get("reason", "")) for entry in json.loads(text)}

    async def main() -> None:
        seen: list[dict[str, tuple[str, str]]] = []

        async def prepare(builder: DeploymentBuilder) -> Prepared:
            seen.append(await index())
            described = await builder.describe()
            builder.progress("identity", 0, 4, 1, 2)
            seen.append(await index())
            watching.append(asyncio.create_task(watch()))
            return Prepared(await builder.planned(described))

        states: list[str] = []
        watching: list[asyncio.Task[None]] = []

        async def watch() -> None:
            """See the state of a model until it is ready: while workers start, too."""
            while "READY" not in states:
                states.append((await index())["identity"][0])

        async with running(settings, Cpu(), prepare):
            await watching[0]
            first, then, last = *seen, await index()
        assert set(states) == {"LOADING", "READY"}
        how_far = "profiling identity, model 1 of 2"
        assert first == {}
        assert {name: then[name] for name in ("identity", "lookup")} == dict.fromkeys(
            ("identity", "lookup"), ("LOADING", how_far)
        )
        assert then["broken"][0] == last["broken"][0] == "UNAVAILABLE" and "no ONNX model" in then["broken"][1]
        assert last["identity"] == ("READY", "")

    asyncio.run(main())


def test_failed_preparation_leaves_no_port_open(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tmp_path), http_port=free_port())

    async def prepare(builder: DeploymentBuilder) -> Prepared:
        raise ConfigError("no")

    async def main() -> None:
        async with running(settings, Cpu(), prepare):
            raise AssertionError("running")

    with pytest.raises(ConfigError, match=r"^no$"):
        asyncio.run(main())
    with pytest.raises(ConnectionRefusedError):
        ask(settings.http_port, "GET", "/v2/health/live")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings that give no profiles; they were measured earlier."""
    given = settings_of(tmp_path)
    assert given.profiles is not None
    profiles = read_profiles_file(given.profiles)

    async def look_up(source: ProfileSource, entry: Entry, given: Profiles) -> KnownProfiles:
        return KnownProfiles(known={"cpu": profiles[entry.name, "cpu"]}, missing=())

    monkeypatch.setattr(ProfileSource, "look_up", look_up)
    return msgspec.structs.replace(given, profiles=None)


def prepared(settings: Settings) -> Prepared:
    return asyncio.run(prepare_deployment(DeploymentBuilder(settings, Cpu())))


def test_server_on_a_busy_machine_plans_for_slower_batches_and_says_so(
    measured: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cotenant.app.startup.measure_load", lambda: BUSY)
    start = prepared(measured)
    assert start.deployment.slowdowns == {"identity": 2.0, "lookup": 2.0}
    assert not start.deployment.plan.unserved
    assert "other programs use 2.0 of 2 processors; batches take 2.0 x as profiled" in caplog.text


def test_busy_machine_does_not_cost_a_model_its_place(
    measured: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cotenant.app.startup.measure_load", lambda: msgspec.structs.replace(BUSY, slowdown=1e4))
    caplog.set_level(logging.WARNING)
    start = prepared(measured)
    assert start.deployment.slowdowns == {} and not start.deployment.plan.unserved
    assert "no share left would keep the targets of identity, lookup beside them" in caplog.text


def test_target_that_no_machine_keeps_is_not_blamed_on_other_programs(
    measured: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cotenant.app.startup.measure_load", lambda: BUSY)
    impossible = [
        msgspec.structs.replace(model, slo=1e-6 if model.name == "lookup" else model.slo) for model in measured.models
    ]
    start = prepared(msgspec.structs.replace(measured, models=tuple(impossible)))
    assert start.deployment.slowdowns == {"identity": 2.0, "lookup": 2.0}
    assert start.deployment.plan.unserved.keys() == {"lookup"}
    assert "batches take 2.0 x as profiled" in caplog.text and "beside them" not in caplog.text


def test_given_profiles_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.app.startup.measure_load", lambda: BUSY)
    assert prepared(settings_of(tmp_path)).deployment.slowdowns == {}
