"""Ensembles, served for real: stock clients, workers, and what is said of mistakes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import uvloop
from tritonclient.utils import InferenceServerException

from cotenant.app.deployment_builder import DeploymentBuilder, Switched
from cotenant.backends.cpu import Cpu
from cotenant.config import read_settings
from cotenant.control.event_log import replay
from cotenant.core.profile import Point, Profile, write_profiles
from cotenant.core.tensor import Tensor
from cotenant.errors import ConfigError, PlanError
from cotenant.live.deployment import Deployment
from cotenant.live.grpc import GrpcServer
from cotenant.live.http import HttpServer
from cotenant.live.metrics import render
from cotenant.live.oip import InferRequest, InferResponse
from cotenant.live.server import Server
from tests.worker import graphs

PATIENCE = 60.0
# mixed = pixels + copy of them, score = the mean of mixed. Steps stand in no order.
DIAMOND = """
platform: "ensemble"
input [ { name: "pixels" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "mixed" data_type: TYPE_FP32 dims: [ 16 ] }, { name: "score" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "add"
      model_version: -1
      input_map { key: "left" value: "pixels" }
      input_map { key: "right" value: "copy" }
      output_map { key: "total" value: "mixed" }
    },
    {
      model_name: "identity"
      model_version: -1
      input_map { key: "x" value: "pixels" }
      output_map { key: "y" value: "copy" }
    },
    {
      model_name: "mean"
      model_version: 1
      input_map { key: "x" value: "mixed" }
      output_map { key: "y" value: "score" }
    }
  ]
}
"""
MODELS: dict[str, Callable[[Path], object]] = {
    "identity": graphs.identity,
    "add": graphs.sum_of_two,
    "mean": graphs.mean,
}


def profile(model: str) -> Profile:
    """Batches cost little more than rows, so that plans have room for several."""
    points = [
        Point(share=share, batch=batch, latency=(0.004 + 0.0001 * batch) * 1000 / share, memory=64 << 20)
        for share in (1000, 50)
        for batch in (1, 8)
    ]
    return Profile(model, "cpu", points)


def repository(root: Path, config: str = DIAMOND) -> Path:
    for name, make in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        make(root / name / "1" / "model.onnx")
    (root / "diamond" / "1").mkdir(parents=True)
    (root / "diamond" / "config.pbtxt").write_text(config)
    (root.parent / "profiles.csv").write_text(write_profiles([profile(name) for name in MODELS]))
    return root


def builder(root: Path, models: str = "") -> DeploymentBuilder:
    settings = root.parent / "serve.toml"
    settings.write_text(
        f'model_repository = "{root.name}"\nprofiles = "profiles.csv"\nplanner = "elastic"\n'
        f'[[models]]\nname = "diamond"\nslo = "2s"\nrate = 5\n{models}'
    )
    return DeploymentBuilder(read_settings(settings), Cpu())


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, PATIENCE))


@asynccontextmanager
async def started(root: Path, log: io.BytesIO | None = None) -> AsyncIterator[Server]:
    prepared = builder(root)
    server = Server(await prepared.build(), Cpu(), prepared.build, log=log)
    try:
        await server.start()
        yield server
    finally:
        await server.drain(1.0)
        await server.stop(1.0)


def use(client: Any, module: Any) -> None:
    """Every step blocks: in a thread of its own."""
    rows = np.random.default_rng(0).random((3, 16)).astype(np.float32)
    given = module.InferInput("pixels", rows.shape, "FP32")
    given.set_data_from_numpy(rows)
    for _ in range(3):
        result = client.infer("diamond", [given])
        np.testing.assert_allclose(result.as_numpy("mixed"), 2 * rows)
        np.testing.assert_allclose(result.as_numpy("score"), (2 * rows).mean(axis=1, keepdims=True), rtol=1e-5)
    only = client.infer("diamond", [given], outputs=[module.InferRequestedOutput("score")])
    assert only.as_numpy("mixed") is None
    assert client.is_model_ready("diamond")
    with pytest.raises(InferenceServerException, match="unexpected input 'x' for model 'diamond'"):
        client.infer("diamond", [module.InferInput("x", rows.shape, "FP32").set_data_from_numpy(rows)])
    with pytest.raises(InferenceServerException, match=r"'diamond' rejected: identity: it could not be answered"):
        client.infer("diamond", [given], timeout=1)
    client.unload_model("diamond")
    assert not client.is_model_ready("diamond")
    assert client.is_model_ready("identity")
    with pytest.raises(InferenceServerException, match="'diamond' rejected: it is unloaded"):
        client.infer("diamond", [given])
    client.load_model("diamond")
    client.unload_model("mean")
    assert not client.is_model_ready("diamond")
    with pytest.raises(InferenceServerException, match="'diamond' rejected: mean is unloaded"):
        client.infer("diamond", [given])
    client.load_model("mean")
    assert client.infer("diamond", [given]).as_numpy("score").shape == (3, 1)


def test_request_with_more_rows_than_batches_take_goes_through_all_steps(tmp_path: Path) -> None:
    log = io.BytesIO()

    async def main() -> None:
        async with started(repository(tmp_path / "models"), log) as server:
            pixels = np.random.default_rng(0).random((30, 16)).astype(np.float32)
            given = Tensor("pixels", "FP32", pixels.shape, pixels.tobytes())
            answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            server.infer(InferRequest(model="diamond", inputs=(given,)), answered.set_result)
            answer = await answered
            assert isinstance(answer, InferResponse), answer
            outputs = {tensor.name: tensor.array() for tensor in answer.outputs}
            np.testing.assert_allclose(outputs["mixed"], 2 * pixels)
            np.testing.assert_allclose(outputs["score"], (2 * pixels).mean(axis=1, keepdims=True), rtol=1e-5)
            for model in ("diamond", *MODELS):
                assert server.statistics(model)[0]["inference_stats"]["success"]["count"] == 1, model
            assert server._driver.in_flight == 0

    run(main())
    lines = log.getvalue().splitlines()
    assert sum(b'"Split"' in line for line in lines) >= 1
    assert replay(lines).difference == ""


def over_http(client: Any) -> None:
    metadata = client.get_model_metadata("diamond")
    assert metadata == {
        "name": "diamond",
        "versions": ["1"],
        "platform": "ensemble",
        "inputs": [{"name": "pixels", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [
            {"name": "mixed", "datatype": "FP32", "shape": [-1, 16]},
            {"name": "score", "datatype": "FP32", "shape": [-1, 1]},
        ],
    }
    config = client.get_model_config("diamond")
    assert config["platform"] == "ensemble"
    assert config["ensemble_scheduling"]["step"][1]["input_map"] == {"x": "pixels"}
    (counts,) = client.get_inference_statistics("diamond")["model_stats"]
    assert (counts["inference_count"], counts["execution_count"]) == (12, 4)
    assert counts["inference_stats"]["success"]["count"] == 4
    assert client.get_inference_statistics("mean")["model_stats"][0]["inference_stats"]["success"]["count"] == 4
    assert {"name": "diamond", "version": "1", "state": "READY"} in client.get_model_repository_index()


def over_grpc(client: Any) -> None:
    assert [it.name for it in client.get_model_metadata("diamond").outputs] == ["mixed", "score"]
    config = client.get_model_config("diamond").config
    assert [step.model_name for step in config.ensemble_scheduling.step] == ["add", "identity", "mean"]
    assert dict(config.ensemble_scheduling.step[0].input_map) == {"left": "pixels", "right": "copy"}


def test_ensemble_answers_stock_clients_as_a_model_does(tmp_path: Path) -> None:
    log = io.BytesIO()

    async def main() -> None:
        async with started(repository(tmp_path / "models"), log) as server:
            http, rpc = HttpServer(server, status=server.status), GrpcServer(server)
            address = f"127.0.0.1:{await http.listen('127.0.0.1', 0)}"
            grpc_address = f"127.0.0.1:{await rpc.listen('127.0.0.1', 0)}"
            with_http = triton_http.InferenceServerClient(address, network_timeout=PATIENCE)
            with_grpc = triton_grpc.InferenceServerClient(grpc_address)
            try:
                checks: list[Callable[[], None]] = [
                    lambda: first(with_http),
                    lambda: over_http(with_http),
                    lambda: over_grpc(with_grpc),
                    lambda: use(with_http, triton_http),
                    lambda: use(with_grpc, triton_grpc),
                ]
                with ThreadPoolExecutor(1) as thread:  # the HTTP client belongs to the thread that first used it
                    for check in checks:
                        await asyncio.get_running_loop().run_in_executor(thread, check)
                status = {row[0]: row for row in (await server.status()).rows(server.deployment.plan)}
                assert status["diamond"][1:4] == ["READY", "2 s", "5.0"]
                assert 'model="diamond"' in render(server.metrics(), "")[0].decode()
            finally:
                with_http.close()
                with_grpc.close()
                await http.stop(1.0)
                await rpc.stop(1.0)

    run(main())
    replayed = replay(log.getvalue().splitlines())
    assert not replayed.difference
    assert replayed.outcomes["diamond", "served"] > 4


def first(client: Any) -> None:
    """Four requests of three rows."""
    rows = np.ones((3, 16), np.float32)
    given = triton_http.InferInput("pixels", rows.shape, "FP32").set_data_from_numpy(rows)
    for _ in range(4):
        client.infer("diamond", [given])


def test_caller_that_leaves_cancels_all_steps(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(repository(tmp_path / "models")) as server:
            ends: list[Any] = []
            pixels = Tensor("pixels", "FP32", (1, 16), np.ones((1, 16), np.float32).tobytes())
            handle = server.infer(InferRequest(model="diamond", inputs=(pixels,)), ends.append)
            server.cancel(handle)
            assert [type(end).__name__ for end in ends] == ["CancelledError"]
            async with asyncio.timeout(PATIENCE):
                while server._driver.in_flight:
                    await asyncio.sleep(0.01)
            assert len(ends) == 1

    run(main())


def test_ensemble_target_is_split_over_its_steps(tmp_path: Path) -> None:
    async def main() -> Deployment:
        return await builder(
            repository(tmp_path / "models"), '[[models]]\nname = "mean"\nslo = "100ms"\nrate = 2\n'
        ).build()

    deployment = asyncio.run(main())
    assert deployment.problem.objective == "devices", "steps without a rate are asked for by the ensemble alone"
    assert deployment.problem.rates == {"identity": 0.0, "add": 0.0, "mean": 2.0, "diamond": 5.0}
    assert deployment.plan.rates() == pytest.approx({"identity": 5.0, "add": 5.0, "mean": 7.0})
    assert {model.name: model.slo for model in deployment.problem.models} == {"identity": 2.0, "add": 2.0, "mean": 0.1}
    (application,) = deployment.problem.applications
    assert application.length(deployment.plan.split["diamond"]) == pytest.approx(2.0)


@pytest.mark.parametrize("broken", ["add", "diamond"])
def test_reload_keeps_an_ensemble_whose_files_or_those_of_a_step_are_broken(tmp_path: Path, broken: str) -> None:
    root = repository(tmp_path / "models")
    prepared = builder(root)

    async def main() -> tuple[Deployment, Switched]:
        before = await prepared.build()
        if broken == "diamond":
            (root / "diamond" / "config.pbtxt").write_text(DIAMOND.replace("mean", "nobody"))
        else:
            (root / "add" / "1" / "model.onnx").write_bytes(b"half of a copy")
        async with prepared.switched(prepared.settings, before) as switched:
            return before, switched

    before, (now, failures) = asyncio.run(main())
    assert list(failures) == [broken]
    assert {name: each.entry for name, each in now.offered.items()} == {
        name: each.entry for name, each in before.offered.items()
    }
    assert now.plan.rates() == before.plan.rates() and now.plan.split.keys() == {"diamond"}


def test_ensemble_with_settings_of_a_model_is_rejected(tmp_path: Path) -> None:
    prepared = builder(repository(tmp_path / "models"), "max_batch = 4\n")
    with pytest.raises(ConfigError, match=r"^model 'diamond' is an ensemble and has no max_batch; give it to the"):
        asyncio.run(prepared.build())


def test_ensemble_target_that_no_split_meets_is_an_error(tmp_path: Path) -> None:
    prepared = builder(repository(tmp_path / "models"))
    settings = tmp_path / "serve.toml"
    settings.write_text(settings.read_text().replace("2s", "9ms"))
    prepared = DeploymentBuilder(read_settings(settings), Cpu())
    with pytest.raises(PlanError, match=r"^application 'diamond': no split of 9 ms meets its target: "):
        asyncio.run(prepared.build())


# Of six rows, those that are bright; each is looked at by two models.
TRAFFIC = """
platform: "ensemble"
input [ { name: "pixels" data_type: TYPE_FP32 dims: [ 6, 16 ] } ]
output [
  { name: "score" data_type: TYPE_FP32 dims: [ -1, 1 ] },
  { name: "copy" data_type: TYPE_FP32 dims: [ -1, 16 ] }
]
ensemble_scheduling {
  step [
    { model_name: "bright" model_version: -1
      input_map { key: "x" value: "pixels" } output_map { key: "y" value: "found" } },
    { model_name: "mean" model_version: -1
      input_map { key: "x" value: "found" } output_map { key: "y" value: "score" } },
    { model_name: "identity" model_version: -1
      input_map { key: "x" value: "found" } output_map { key: "y" value: "copy" } }
  ]
}
parameters { key: "items" value { string_value: "3" } }
"""


def test_step_for_each_row_runs_once_for_each_row_of_the_step_before(tmp_path: Path) -> None:
    """Over HTTP: as many requests of the later models as there are rows, none among them, and rows in their order."""
    root = repository(tmp_path / "models", TRAFFIC)
    (root / "bright" / "1").mkdir(parents=True)
    graphs.bright(root / "bright" / "1" / "model.onnx")
    (root / "bright" / "config.pbtxt").write_text("max_batch_size: 0")
    found = profile("bright")
    single = Profile("bright", "cpu", [point for point in found.points if point.batch == 1])
    profiles = [profile("identity"), profile("mean"), profile("add"), single]
    (tmp_path / "profiles.csv").write_text(write_profiles(profiles))
    log = io.BytesIO()

    def ask(address: str) -> dict[str, int]:
        rng = np.random.default_rng(0)
        with triton_http.InferenceServerClient(address) as client:
            for bright in (3, 0, 6, 1):
                rows = rng.random((6, 16)).astype(np.float32) * 0.4
                places = rng.permutation(6)[:bright]
                rows[places] += 0.6
                given = triton_http.InferInput("pixels", rows.shape, "FP32").set_data_from_numpy(rows)
                result = client.infer("diamond", [given])
                np.testing.assert_array_equal(result.as_numpy("copy"), rows[sorted(places)])
                expected = rows[sorted(places)].mean(axis=1, keepdims=True)
                np.testing.assert_allclose(result.as_numpy("score"), expected, rtol=1e-5)
            counts = client.get_inference_statistics()["model_stats"]
        return {row["name"]: row["inference_stats"]["success"]["count"] for row in counts}

    async def main() -> None:
        async with started(root, log) as server:
            http = HttpServer(server, status=server.status)
            try:
                counts = await asyncio.to_thread(ask, f"127.0.0.1:{await http.listen('127.0.0.1', 0)}")
            finally:
                await http.stop(1.0)
            assert counts == {"bright": 4, "mean": 10, "identity": 10, "add": 0, "diamond": 4}
            (whole,) = server.deployment.problem.applications
            assert whole.visits["mean"] == 3.0

    run(main())
    replayed = replay(log.getvalue().splitlines())
    assert not replayed.difference
    assert (replayed.outcomes["diamond", "served"], replayed.outcomes["mean", "served"]) == (4, 10)
