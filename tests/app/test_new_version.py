"""A new version of a model beside one that is served."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest

import cotenant
from cotenant.app import deployment_builder
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.serving import BackgroundServer
from cotenant.backends.cpu import Cpu
from cotenant.errors import FailedError
from tests.cli.program import until
from tests.live.deployment import csv, repository

ROW = np.full((1, 16), 0.25, dtype=np.float32)


@pytest.fixture
def served(folder: Path) -> Path:
    """The repository of the settings, which tests may change."""
    (folder / "models").unlink()
    path = folder / "serve.toml"
    path.write_text(path.read_text().replace('"2s"', '"30s"'))
    return repository(folder / "models")


class Caller:
    """Ask without a pause, within the block; every answer is the old version's or the new one's."""

    def __init__(self, server: BackgroundServer) -> None:
        self.answers: list[float] = []
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.answers.append(float(self._server.infer("identity", {"x": ROW})["y"].sum()))

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def told(server: BackgroundServer, model: str = "identity") -> str:
    """Return state and reason of a model, as its status has them."""
    return next(f"{each.state}: {each.reason}" for each in server.status().models if each.name == model)


def test_new_version_that_fails_to_load_is_kept_out_and_the_old_one_serves_on(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cotenant.serve("serve.toml") as server, Caller(server) as caller:
        (served / "identity" / "2").mkdir()
        (served / "identity" / "2" / "model.onnx").write_bytes(b"this is no model")
        with pytest.raises(FailedError, match=r"^failed to load 'identity': .*2/model.onnx: no ONNX model"):
            server.load("identity")
        assert server.deployment.offered["identity"].info.version == "1"
        assert told(server).startswith("READY: served as before, since it could not be loaded again: ")
        rows = server.status().rows(server.deployment.plan)
        assert "2/model.onnx: no ONNX model" in told(server) and told(server).removeprefix("READY: ") in rows[0]
        with monkeypatch.context() as patch:
            patch.setattr(deployment_builder, "plan_problem", lambda *_, **__: 1 / 0)
            with pytest.raises(FailedError, match="ZeroDivisionError"):
                server.load("lookup")
        assert told(server, "lookup").endswith(": ZeroDivisionError: division by zero")
        server.reload()  # which looks at all models again
        assert "2/model.onnx: no ONNX model" in told(server) and told(server, "lookup") == "READY: "
        shutil.rmtree(served / "identity" / "2")
        server.load("identity")
        assert told(server) == "READY: "
        seen = len(caller.answers)
        until(lambda: len(caller.answers) >= seen + 5)
    assert set(caller.answers) == {4.0}


def test_new_version_takes_over_without_a_request_lost(served: Path) -> None:
    with cotenant.serve("serve.toml") as server, Caller(server) as caller:
        (served / "identity" / "2").mkdir()
        (served / "identity" / "2" / "model.onnx").write_bytes((served / "identity" / "1" / "model.onnx").read_bytes())
        server.load("identity")
        assert server.deployment.offered["identity"].info.version == "2"
    assert set(caller.answers) == {4.0}


def test_version_before_is_back_by_a_load_that_names_it(served: Path) -> None:
    with cotenant.serve("serve.toml") as server:
        url = f"http://{server.addresses.http}/v2"

        def load(**parameters: str) -> None:
            body = msgspec.json.encode({"parameters": parameters})
            urllib.request.urlopen(f"{url}/repository/models/identity/load", body).close()  # noqa: S310

        (served / "identity" / "2").mkdir()
        (served / "identity" / "2" / "model.onnx").write_bytes((served / "identity" / "1" / "model.onnx").read_bytes())
        load()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/models/identity/versions/1")  # noqa: S310
        said = "version '1' of model 'identity' is not served; one version is at a time, now 2"
        assert refused.value.code == 404 and said in refused.value.read().decode()
        load(config=json.dumps({"version_policy": {"specific": {"versions": [1]}}}))
        assert server.deployment.offered["identity"].info.version == "1"
        load()
        assert server.deployment.offered["identity"].info.version == "2"


def test_two_versions_are_served_side_by_side_as_two_models(served: Path) -> None:
    """The second is a folder with a link into the first."""
    (served / "identity-old").mkdir()
    (served / "identity-old" / "1").symlink_to(Path("..") / "identity" / "1")
    (served / "identity" / "2").mkdir()
    (served / "identity" / "2" / "model.onnx").write_bytes((served / "identity" / "1" / "model.onnx").read_bytes())
    Path("profiles.csv").write_text(csv(("identity", "identity-old", "lookup")))
    with cotenant.serve("serve.toml", models=["identity", "identity-old"]) as server:
        versions = {name: offered.info.version for name, offered in server.deployment.offered.items()}
        assert versions == {"identity": "2", "identity-old": "1"}
        for name in versions:
            assert float(server.infer(name, {"x": ROW})["y"].sum()) == 4.0


def test_versions_that_could_be_served_besides_are_named_in_the_log(
    served: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (served / "identity" / "config.pbtxt").write_text("version_policy { all { } }")
    for version in ("2", "10"):
        (served / "identity" / version).mkdir()
        (served / "identity" / version / "model.onnx").write_bytes((served / "identity/1/model.onnx").read_bytes())
    builder = DeploymentBuilder(cotenant.read_settings("serve.toml"), Cpu())
    for _ in range(2):
        deployment = asyncio.run(builder.describe())
    assert deployment.offered["identity"].info.version == "10"
    said = [record.message for record in caplog.records if "version" in record.message]
    assert said == [
        "identity: ignored in its configuration: version_policy: one version is served at a time, 10; 1, 2 could be too"
    ]
