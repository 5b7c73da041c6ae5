"""How models change while serving: by request (with a configuration of its own), with the repository, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import cotenant
from cotenant.app import repository_poller
from cotenant.app.serving import BackgroundServer
from cotenant.errors import ConfigError, ForbiddenError
from tests.cli.conftest import SERVE
from tests.cli.program import Program, until
from tests.live.deployment import csv, repository
from tests.worker import graphs

ROW = np.full((1, 16), 0.25, dtype=np.float32)
PAIR = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 16 ] }
ensemble_scheduling { step {
  model_name: "identity" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


@pytest.fixture
def served(folder: Path) -> Path:
    """The repository of the settings, which tests may change."""
    (folder / "models").unlink()
    (folder / "profiles.csv").write_text(csv(("identity", "lookup", "other")))
    root = repository(folder / "models")
    (root / "lookup" / "config.pbtxt").write_text('model_warmup { inputs { key: "x" value { dims: [2] } } }\n')
    settings(folder, "")
    return root


def settings(folder: Path, text: str) -> None:
    """Settings of which no model must be there."""
    path = folder / "serve.toml"
    head = SERVE.partition("[[models]]")[0]
    path.write_text(f"{head}{text}\n[[models]]\nname = 'identity'\nslo = '30s'\nrate = 20\n")


Client = Any  # of HTTP or gRPC: untyped both
Connect = Callable[[BackgroundServer], tuple[Client, Any]]


@pytest.fixture(params=["http", "grpc"])
def connect(request: pytest.FixtureRequest) -> Connect:
    def connected(server: BackgroundServer) -> tuple[Client, Any]:
        if request.param == "http":
            return triton_http.InferenceServerClient(server.addresses.http), triton_http
        return triton_grpc.InferenceServerClient(server.addresses.grpc), triton_grpc

    return connected


def ask(client: Client, module: Any, rows: int) -> Any:
    given = module.InferInput("x", (rows, 16), "FP32")
    given.set_data_from_numpy(np.repeat(ROW, rows, 0))
    return client.infer("identity", [given]).as_numpy("y")


def config_of(client: Client) -> dict[str, Any]:
    config = client.get_model_config("identity")
    if isinstance(config, dict):
        return config
    return {"max_batch_size": config.config.max_batch_size}


def test_load_with_a_configuration_stands_for_the_repositorys_until_the_next_load(
    served: Path, connect: Connect
) -> None:
    with cotenant.serve("serve.toml") as server:
        client, module = connect(server)
        client.load_model("identity", config=json.dumps({"max_batch_size": 2}))
        assert config_of(client)["max_batch_size"] == 2
        assert ask(client, module, 2).shape == (2, 16)
        with pytest.raises(InferenceServerException, match="has 3 rows, but model 'identity' takes 1 to 2"):
            ask(client, module, 3)
        client.load_model("lookup")
        assert config_of(client)["max_batch_size"] == 2, "what others load does not touch it"
        client.load_model("identity")
        assert config_of(client)["max_batch_size"] == 32
        assert ask(client, module, 3).shape == (3, 16)
        client.close()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "the config of the request to load 'identity': "),
        ('{"max_batch": 2}', 'no field named "max_batch"'),
        ('{"name": "other"}', "name 'other' in the folder 'identity'"),
        ('{"sequence_batching": {}}', "sequence_batching is not supported"),
        ('{"default_model_filename": "../../lookup/1/model.onnx"}', "is not the name of a file"),
        ('{"max_batch_size": 4, "platform": "tensorflow_graphdef"}', "unsupported platform"),
        ('{"input": [{"name": "nothing"}]}', "input 'nothing' is not in model.onnx"),
    ],
)
def test_load_with_a_wrong_configuration_fails_and_changes_nothing(
    served: Path, connect: Connect, config: str, reason: str
) -> None:
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        client, module = connect(server)
        with pytest.raises(InferenceServerException, match="failed to load 'identity'") as failure:
            client.load_model("identity", config=config)
        assert reason in str(failure.value)
        assert config_of(client)["max_batch_size"] == 32
        assert ask(client, module, 3).shape == (3, 16)
        client.close()


def test_load_with_files_is_refused(served: Path, connect: Connect) -> None:
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        client, module = connect(server)
        content = (served / "identity" / "1" / "model.onnx").read_bytes()
        with pytest.raises(InferenceServerException, match="load takes no files; models come from the repository"):
            client.load_model("other", config="{}", files={"file:1/model.onnx": content})
        assert not (served / "other").exists()
        assert ask(client, module, 1).shape == (1, 16)
        client.close()


def test_unload_with_dependents_takes_out_the_models_of_an_ensemble(served: Path) -> None:
    (served / "pair" / "1").mkdir(parents=True)
    (served / "pair" / "config.pbtxt").write_text(PAIR)
    with cotenant.serve("serve.toml") as server:
        client = triton_http.InferenceServerClient(server.addresses.http)
        assert client.is_model_ready("pair")
        client.unload_model("pair")
        assert not client.is_model_ready("pair") and client.is_model_ready("identity")
        client.load_model("pair")
        client.unload_model("pair", unload_dependents=True)
        assert not client.is_model_ready("pair") and not client.is_model_ready("identity")
        assert client.is_model_ready("lookup")
        client.close()


def test_load_brings_back_no_other_model_that_was_unloaded(served: Path) -> None:
    (served / "pair" / "1").mkdir(parents=True)
    (served / "pair" / "config.pbtxt").write_text(PAIR)
    with cotenant.serve("serve.toml") as server:
        client = triton_http.InferenceServerClient(server.addresses.http)
        client.unload_model("lookup")
        client.unload_model("identity")  # which `pair` cannot do without
        client.load_model("lookup")
        assert client.is_model_ready("lookup")
        assert not client.is_model_ready("identity") and not client.is_model_ready("pair")
        reasons = index(client)
        assert reasons["identity"] == "unloaded" and reasons["pair"] == "identity: unloaded"
        client.load_model("identity")
        assert client.is_model_ready("identity") and client.is_model_ready("pair")
        client.unload_model("identity")
        client.load_model("pair")
        assert client.is_model_ready("identity") and client.is_model_ready("pair")
        client.close()


def test_explicit_mode_begins_with_the_named_models_or_none(folder: Path, served: Path) -> None:
    settings(folder, 'load_models = ["lookup"]')
    with cotenant.serve("serve.toml") as server:
        states = {model.name: (model.state, model.reason) for model in server.status().models}
        assert states["lookup"] == ("READY", "") and states["identity"] == ("UNAVAILABLE", "not loaded")
    settings(folder, "load_models = []")
    with cotenant.serve("serve.toml") as server:
        client = triton_http.InferenceServerClient(server.addresses.http)
        assert client.is_server_ready()
        assert {entry["name"]: entry["state"] for entry in client.get_model_repository_index()} == dict.fromkeys(
            ("broken", "identity", "lookup"), "UNAVAILABLE"
        )
        with pytest.raises(InferenceServerException, match="model 'identity' cannot be served: not loaded"):
            ask(client, triton_http, 1)
        client.load_model("identity")
        assert ask(client, triton_http, 1).tolist() == ROW.tolist()
        client.close()


def test_mode_none_loads_and_unloads_nothing(folder: Path, served: Path) -> None:
    settings(folder, 'model_control_mode = "none"')
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        client = triton_http.InferenceServerClient(server.addresses.http)
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match='model_control_mode = "none"'):
                change("identity")
        with pytest.raises(ForbiddenError, match="restart the server"):
            server.load("lookup")
        assert ask(client, triton_http, 1).tolist() == ROW.tolist()
        client.close()


def test_mode_poll_follows_the_repository(folder: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository_poller, "SETTLED", 0.05)
    settings(folder, 'model_control_mode = "poll"\nrepository_poll_interval = "50ms"')
    with cotenant.serve("serve.toml", models=["identity"]) as server:
        client = triton_http.InferenceServerClient(server.addresses.http)

        def ready(name: str) -> bool:
            return bool(client.is_model_ready(name))

        with pytest.raises(InferenceServerException, match="models follow the repository"):
            client.load_model("lookup")
        # A new model.
        shutil.copytree(served / "identity", folder / "copy")
        (folder / "copy").rename(served / "other")
        until(lambda: ready("other"))
        # Another file of the same version: its answers, without a restart.
        graphs.mean(served / "identity" / "1" / "model.onnx")
        until(lambda: ask(client, triton_http, 1).shape == (1, 1))
        # One that is none costs nothing that is served, and does not come back by itself.
        (served / "identity" / "1" / "model.onnx").write_bytes(b"this is no model")
        graphs.mean(served / "other" / "1" / "model.onnx")
        until(lambda: client.get_model_metadata("other")["outputs"][0]["shape"] == [-1, 1])
        assert ask(client, triton_http, 1).shape == (1, 1)
        # Gone, and gone from the server.
        shutil.rmtree(served / "other")
        until(lambda: not ready("other"))
        until(lambda: "other" not in index(client))
        # A new one that fails says why.
        (served / "other" / "1").mkdir(parents=True)
        (served / "other" / "1" / "model.onnx").write_bytes(b"this is no model")
        until(lambda: "no ONNX model" in index(client).get("other", ""))
        (served / "other" / "1" / "model.onnx").write_bytes((served / "lookup" / "1" / "model.onnx").read_bytes())
        (served / "other" / "config.pbtxt").write_text((served / "lookup" / "config.pbtxt").read_text())
        until(lambda: ready("other") and not index(client)["other"])
        # A new configuration is a change, too.
        graphs.identity(served / "identity" / "1" / "model.onnx")
        (served / "identity" / "config.pbtxt").write_text("max_batch_size: 3")
        until(lambda: client.get_model_config("identity")["max_batch_size"] == 3)
        assert ask(client, triton_http, 3).shape == (3, 16)
        client.close()


def index(client: Client) -> dict[str, str]:
    """The models of the repository index, with the reason where one does not serve."""
    return {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}


def test_models_to_begin_with_need_the_explicit_mode(folder: Path, served: Path, program: Program) -> None:
    settings(folder, 'model_control_mode = "poll"\nload_models = ["lookup"]')
    with pytest.raises(ConfigError, match=r'^load_models: with model_control_mode = "poll" all models'):
        cotenant.serve("serve.toml").__enter__()
    settings(folder, 'model_control_mode = "often"')
    with pytest.raises(
        ConfigError, match="model_control_mode: 'often' is unknown; use 'explicit' or 'kubernetes' or 'none'"
    ):
        cotenant.serve("serve.toml").__enter__()
    settings(folder, "")
    said = program.refuses("serve", "serve.toml", "--model-control-mode", "none", "--load-model", "lookup")
    assert said.startswith('load_models: with model_control_mode = "none" all models')
