"""What a reload plans for while the server adapts: its builder is real, the server a stand-in."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import msgspec
import pytest

from cotenant.app import deployment_builder
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.reloader import Reloader
from cotenant.app.serving import serving
from cotenant.app.settings import reading_again, settings_from
from cotenant.backends.fake import Fake
from cotenant.config import Settings
from cotenant.core.profile import write_profiles
from cotenant.errors import ConfigError, WorkerError
from cotenant.live.adaptation import Learnt
from cotenant.live.deployment import Deployment, without_model
from cotenant.live.server import Server
from tests.app.test_deployment_builder import LARGE, measured, settings

NAMES = ("identity", "lookup")
RATES = """
[[models]]
name = "identity"
slo = "1s"
rate = {}
[[models]]
name = "lookup"
slo = "1s"
rate = 20
"""


class AdaptingServer:
    """It has learnt that both models are asked for three times as often as expected, and that batches are slow."""

    def __init__(self, deployment: Deployment, *, adapts: bool) -> None:
        self.deployment = deployment
        self.adapts = adapts
        self.failures: dict[str, str] = {}

    def learnt(self) -> Learnt | None:
        rates = {name: 3 * rate for name, rate in self.deployment.problem.rates.items()}
        slowdowns = {"lookup": 1.5, "unloaded long ago": 2.0}
        return Learnt(plan=self.deployment.plan, rates=rates, slowdowns=slowdowns) if self.adapts else None

    async def apply(self, deployment: Deployment) -> None:
        self.deployment = deployment

    def reloaded(self, error: str = "", failures: Mapping[str, str] = MappingProxyType({})) -> None:
        assert not error
        self.failures = dict(failures)


@pytest.mark.parametrize(
    ("adapts", "rate", "planned", "slowdowns"),
    [
        (True, 10, {"identity": 30.0, "lookup": 60.0}, {"lookup": 1.5}),
        (True, 11, {"identity": 11.0, "lookup": 60.0}, {"lookup": 1.5}),
        (False, 10, {"identity": 10.0, "lookup": 20.0}, {}),
    ],
)
def test_reload_plans_for_what_was_learnt_but_for_rates_that_the_edit_changes(
    folder: Path, adapts: bool, rate: int, planned: dict[str, float], slowdowns: dict[str, float]
) -> None:
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    given = 'profiles = "given.csv"' + RATES
    builder = DeploymentBuilder(settings(folder, given.format(10)), Fake((LARGE,)))
    server = AdaptingServer(asyncio.run(builder.build(NAMES)), adapts=adapts)
    asyncio.run(Reloader(cast(Server, server), builder, builder.settings).reload(settings(folder, given.format(rate))))
    assert server.deployment.problem.rates == pytest.approx(planned)
    assert server.deployment.slowdowns == slowdowns
    assert server.deployment.plan.rates() == pytest.approx(planned)


def test_reload_takes_no_assumed_rate_for_one_that_was_observed(folder: Path) -> None:
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    asked = settings(folder, 'profiles = "given.csv"' + RATES.format(10).replace("rate = 20", ""))
    builder = DeploymentBuilder(asked, Fake((LARGE,)))
    server = AdaptingServer(asyncio.run(builder.build(NAMES)), adapts=True)
    before = server.deployment.problem
    asyncio.run(Reloader(cast(Server, server), builder, asked).reload(asked))
    assert server.deployment.problem.assumed == before.assumed == {"lookup"}
    assert server.deployment.problem.rates == pytest.approx({"identity": 30.0, "lookup": before.rates["lookup"]})


def test_model_that_is_loaded_during_a_reload_gets_no_settings_that_are_rejected(folder: Path) -> None:
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    given = 'profiles = "given.csv"' + RATES
    builder = DeploymentBuilder(settings(folder, given.format(10)), Fake((LARGE,)))
    loaded: list[Deployment] = []

    class RejectingServer(AdaptingServer):
        async def apply(self, deployment: Deployment) -> None:
            loaded.append(await builder.build(["identity"]))
            raise WorkerError("a worker did not start")

        def reloaded(self, error: str = "", failures: Mapping[str, str] = MappingProxyType({})) -> None:
            assert "a worker did not start" in error

    server = RejectingServer(asyncio.run(builder.build(NAMES)), adapts=False)
    reloader = Reloader(cast(Server, server), builder, builder.settings)
    with pytest.raises(WorkerError):
        asyncio.run(reloader.reload(settings(folder, given.format(40))))
    (deployment,) = loaded
    assert deployment.problem.rates == {"identity": 10.0}


class ChangingServer(AdaptingServer):
    async def change(self, changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> None:
        self.deployment = await changed(self.deployment)


@pytest.mark.parametrize("mode", ["explicit", "poll", "none"])
def test_plan_for_other_devices_keeps_the_models_that_are_served_whatever_has_become_of_their_files(
    folder: Path, mode: str
) -> None:
    shutil.copytree((folder / "models").resolve(), folder / "changing")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in (*NAMES, "new")]))
    text = f'profiles = "given.csv"\nmodel_control_mode = "{mode}"' + RATES.format(10)
    given = msgspec.structs.replace(settings(folder, text), model_repository=folder / "changing")
    builder = DeploymentBuilder(given, Fake((LARGE,)))
    server = ChangingServer(asyncio.run(builder.build()), adapts=True)
    before = server.deployment.offered
    (folder / "changing" / "identity" / "1" / "model.onnx").write_bytes(b"half of a copy")
    shutil.rmtree(folder / "changing" / "lookup")
    shutil.copytree((folder / "models").resolve() / "identity", folder / "changing" / "new")
    asyncio.run(Reloader(cast(Server, server), builder, given).replan("nodes have joined or left"))
    assert server.deployment.offered == before
    assert server.deployment.plan.rates() == pytest.approx({"identity": 30.0, "lookup": 60.0})
    assert server.deployment.slowdowns == {"identity": 1.0, "lookup": 1.5}


def test_plan_for_other_devices_is_made_without_a_model_that_has_left_the_repository(folder: Path) -> None:
    shutil.copytree((folder / "models").resolve(), folder / "changing")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    text = 'profiles = "given.csv"\nmodel_control_mode = "poll"' + RATES.format(10)
    given = msgspec.structs.replace(settings(folder, text), model_repository=folder / "changing")
    builder = DeploymentBuilder(given, Fake((LARGE,)))
    server = ChangingServer(asyncio.run(builder.build()), adapts=False)
    shutil.rmtree(folder / "changing" / "lookup")
    server.deployment = without_model(server.deployment, "lookup")
    asyncio.run(Reloader(cast(Server, server), builder, given).replan("nodes have joined or left"))
    assert server.deployment.plan.rates() == pytest.approx({"identity": 10.0})


def test_reload_that_fails_by_a_fault_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    given = settings(folder, 'profiles = "given.csv"' + RATES.format(10))
    builder = DeploymentBuilder(given, Fake((LARGE,)))
    said: list[str] = []

    class Told(AdaptingServer):
        def reloaded(self, error: str = "", failures: Mapping[str, str] = MappingProxyType({})) -> None:
            said.append(error)

    server = Told(asyncio.run(builder.build(NAMES)), adapts=True)
    monkeypatch.setattr(deployment_builder, "plan_problem", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero"):
        asyncio.run(Reloader(cast(Server, server), builder, given).reload())
    assert said == ["reload rejected; keeping the current configuration: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("half", ["a new version", "the version that is served"])
def test_reload_keeps_a_model_that_is_served_and_whose_files_cannot_be_loaded_any_more(folder: Path, half: str) -> None:
    """Such as a version that is half copied when the settings are edited."""
    shutil.copytree((folder / "models").resolve(), folder / "changing")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))

    def given(text: str) -> Settings:
        read = settings(folder, 'profiles = "given.csv"' + text)
        return msgspec.structs.replace(read, model_repository=folder / "changing")

    builder = DeploymentBuilder(given(RATES.format(10)), Fake((LARGE,)))
    server = AdaptingServer(asyncio.run(builder.build()), adapts=True)
    before = server.deployment.offered["identity"]
    broken = folder / "changing" / "identity" / ("2" if half == "a new version" else "1")
    broken.mkdir(exist_ok=True)
    (broken / "model.onnx").write_bytes(b"half of a copy")
    edited = given(RATES.format(40).replace('"1s"', '"2s"'))
    asyncio.run(Reloader(cast(Server, server), builder, builder.settings).reload(edited))
    now = server.deployment.offered["identity"]
    assert (now.entry, now.info, now.model.slo) == (before.entry, before.info, 2.0)
    assert server.deployment.plan.rates() == pytest.approx({"identity": 40.0, "lookup": 60.0})
    assert server.deployment.slowdowns == {"identity": 1.0, "lookup": 1.5}
    assert list(server.failures) == ["identity"] and "model.onnx: no ONNX model" in server.failures["identity"]
    shutil.rmtree(broken)
    if half == "a new version":
        asyncio.run(Reloader(cast(Server, server), builder, builder.settings).reload(edited))
        assert server.failures == {} and server.deployment.offered["identity"].entry == before.entry


def test_reload_of_another_repository_takes_no_model_of_the_one_before(folder: Path) -> None:
    shutil.copytree((folder / "models").resolve(), folder / "other")
    (folder / "other" / "identity" / "1" / "model.onnx").write_bytes(b"half of a copy")
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    given = settings(folder, 'profiles = "given.csv"' + RATES.format(10))
    builder = DeploymentBuilder(given, Fake((LARGE,)))
    server = AdaptingServer(asyncio.run(builder.build()), adapts=True)
    other = msgspec.structs.replace(given, model_repository=folder / "other")
    asyncio.run(Reloader(cast(Server, server), builder, given).reload(other))
    assert "identity" in server.deployment.broken and server.failures == {}
    assert server.deployment.plan.rates() == pytest.approx({"lookup": 60.0})


def test_fault_of_what_hears_of_a_reload_is_logged_and_rejects_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "given.csv").write_text(write_profiles([measured(name, LARGE, 0.001) for name in NAMES]))
    given = 'profiles = "given.csv"' + RATES
    builder = DeploymentBuilder(settings(folder, given.format(10)), Fake((LARGE,)))
    server = AdaptingServer(asyncio.run(builder.build(NAMES)), adapts=False)

    def faulty(current: Settings) -> None:
        raise ZeroDivisionError("a fault of ours")

    reloader = Reloader(cast(Server, server), builder, builder.settings, on_reload=faulty)
    asyncio.run(reloader.reload(settings(folder, given.format(11))))
    assert server.deployment.problem.rates["identity"] == builder.settings.models[0].rate == 11
    assert "a fault of ours" in caplog.text


def test_reload_of_a_settings_file_that_became_a_folder_names_the_folder(folder: Path) -> None:
    async def main() -> None:
        async with serving("serve.toml") as server:
            before = server.deployment.plan
            Path("serve.toml").rename("kept.toml")
            Path("serve.toml").mkdir()
            with pytest.raises(ConfigError, match=r"^serve\.toml: is a folder now; put the settings file back$"):
                await server.reload()
            assert (await server.status()).reload_error.endswith(": is a folder now; put the settings file back")
            assert server.deployment.plan == before
            Path("serve.toml").rmdir()
            Path("kept.toml").rename("serve.toml")
            await server.reload()

    asyncio.run(main())


def test_folder_of_models_is_read_again_as_one(folder: Path) -> None:
    assert reading_again("models", lambda: settings_from("models"))() == settings_from("models")
