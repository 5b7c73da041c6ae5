"""The response cache: what it finds, what it must not find, what it holds, and how it is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import cotenant
from cotenant.app.serving import BackgroundServer
from cotenant.core.tensor import Tensor
from cotenant.live import inference, preparation
from cotenant.live.deployment import ServableModel
from cotenant.live.response_cache import MAX_PART, OVERHEAD, ResponseCache, copied, key_of
from tests.app.test_model_control import PAIR
from tests.cli.conftest import SERVE
from tests.live.deployment import csv, repository, sample_deployment
from tests.worker import graphs

CACHED = "response_cache { enable: true }"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = repository(tmp_path / "models")
    (root / "lookup" / "config.pbtxt").write_text('model_warmup { inputs { key: "x" value { dims: [2] } } }')
    (root / "identity" / "config.pbtxt").write_text(CACHED)
    return root


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundServer]:
    folder = root.parent
    (folder / "profiles.csv").write_text(csv())
    (folder / "serve.toml").write_text('response_cache = "64KiB"\n' + SERVE.replace('"2s"', '"30s"'))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with cotenant.serve(folder / "serve.toml") as server:
        yield server


def test_equal_requests_are_answered_from_the_cache_and_counted(server: BackgroundServer) -> None:
    rows = np.random.default_rng(0).random((2, 16), dtype=np.float32)
    for module, address in ((triton_http, server.addresses.http), (triton_grpc, server.addresses.grpc)):
        with module.InferenceServerClient(address) as client:
            given = module.InferInput("x", rows.shape, "FP32")
            given.set_data_from_numpy(rows)
            for _ in range(3):
                assert client.infer("identity", [given], request_id="7").as_numpy("y").tolist() == rows.tolist()
    with triton_http.InferenceServerClient(server.addresses.http) as client:
        (stats,) = client.get_inference_statistics("identity")["model_stats"]
    counts = {name: stats["inference_stats"][name]["count"] for name in ("success", "cache_hit", "cache_miss", "queue")}
    assert counts == {"success": 6, "cache_hit": 5, "cache_miss": 1, "queue": 1}
    assert (stats["inference_count"], stats["execution_count"]) == (2, 1)
    assert stats["inference_stats"]["cache_hit"]["ns"] > 0
    assert server.status().statistics["identity"].outcomes["served"] == 6


def test_large_inputs_and_answers_are_hashed_and_copied_beside_the_event_loop(
    server: BackgroundServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"key_of": set(), "copied": set(), "accepts": set()}

    def spied(name: str, call: Any) -> Any:
        def spy(*args: Any) -> Any:
            threads[name].add(threading.get_ident())
            return call(*args)

        return spy

    for module in (preparation, inference):
        monkeypatch.setattr(module, "MAX_AT_ONCE", 100)
    monkeypatch.setattr(inference, "key_of", spied("key_of", key_of))
    monkeypatch.setattr(inference, "copied", spied("copied", copied))
    monkeypatch.setattr(ResponseCache, "accepts", spied("accepts", ResponseCache.accepts))
    rows = np.random.default_rng(1).random((2, 16), dtype=np.float32)
    deadline = time.monotonic() + 10
    served = 0
    while served == arrived(server, "identity") and time.monotonic() < deadline:  # until an answer was kept
        assert server.infer("identity", {"x": rows})["y"].tolist() == rows.tolist()
        served += 1
    assert served > arrived(server, "identity")
    (loop,) = threads["accepts"]
    assert threads["key_of"] and threads["copied"] and loop not in threads["key_of"] | threads["copied"]


def arrived(server: BackgroundServer, model: str) -> int:
    """How many requests the controller has heard of."""
    return server._server._server._driver.arrived[model]


def test_answers_from_the_cache_are_no_load_that_is_planned_for(server: BackgroundServer) -> None:
    rows = np.zeros((1, 16), np.float32)
    for _ in range(10):
        server.infer("identity", {"x": rows})
        server.infer("lookup", {"x": [[1]]})
    assert (arrived(server, "identity"), arrived(server, "lookup")) == (1, 10), "lookup does not ask for a cache"


def test_model_that_is_loaded_from_other_files_finds_no_answer_of_the_former(
    server: BackgroundServer, root: Path
) -> None:
    rows = np.ones((1, 16), np.float32)
    assert server.infer("identity", {"x": rows})["y"].shape == (1, 16)
    graphs.mean(root / "identity" / "1" / "model.onnx")
    assert server.infer("identity", {"x": rows})["y"].shape == (1, 16), "it is not loaded yet"
    server.load("identity")
    assert server.infer("identity", {"x": rows})["y"].tolist() == [[1.0]]


def test_failures_are_not_kept(server: BackgroundServer, root: Path) -> None:
    (root / "lookup" / "config.pbtxt").write_text('model_warmup { inputs { key: "x" value { dims: [2] } } }' + CACHED)
    server.load("lookup")
    for _ in range(2):
        with pytest.raises(cotenant.RequestError):
            server.infer("lookup", {"x": [[9]]})
    assert arrived(server, "lookup") == 2


def test_unloaded_model_answers_nothing_from_the_cache(server: BackgroundServer) -> None:
    row = {"x": np.ones((1, 16), np.float32)}
    server.infer("identity", row)
    server.infer("identity", row)
    server.unload("identity")
    with pytest.raises(cotenant.RequestError):
        server.infer("identity", row)


def test_answers_of_an_ensemble_are_not_kept(server: BackgroundServer, root: Path) -> None:
    """Its own files are as they were when a model of its steps is another."""
    (root / "pair" / "1").mkdir(parents=True)
    (root / "pair" / "config.pbtxt").write_text(PAIR + CACHED)
    server.load("pair")
    rows = np.ones((1, 16), np.float32)
    for _ in range(2):
        assert server.infer("pair", {"x": rows})["y"].tolist() == rows.tolist()
    assert arrived(server, "pair") == 2


# Without a server.


def tensor(data: bytes, name: str = "x", shape: tuple[int, ...] | None = None, datatype: str = "UINT8") -> Tensor:
    return Tensor(name, datatype, (len(data),) if shape is None else shape, data)


@pytest.fixture
def offered(root: Path) -> ServableModel:
    return sample_deployment(root).offered["identity"]


def test_key_tells_all_that_may_change_an_answer(offered: ServableModel, root: Path) -> None:
    cache = ResponseCache(1 << 20)
    inputs: list[list[Tensor]] = [
        [tensor(b"ab")],
        [tensor(b"ac")],
        [tensor(b"ab", name="z")],
        [tensor(b"ab", shape=(1, 2))],
        [tensor(b"ab", datatype="INT8")],
        [tensor(b"a"), tensor(b"b")],
        [tensor(b"b"), tensor(b"a")],
        [tensor(b"ab"), tensor(b"")],
    ]

    def key(offered: ServableModel, inputs: list[Tensor]) -> bytes:
        return key_of(offered.info.name, cache.number(offered), inputs)

    keys = [key(offered, each) for each in inputs]
    assert len(set(keys)) == len(keys)
    assert key(offered, [tensor(bytes(bytearray(b"ab")))]) == keys[0]
    (root / "identity" / "config.pbtxt").write_text(CACHED + "max_batch_size: 3")
    assert key(sample_deployment(root).offered["identity"], inputs[0]) not in keys
    assert key(sample_deployment(root).offered["lookup"], inputs[0]) not in keys


def test_cache_holds_no_more_than_its_size_and_drops_what_was_not_asked_for() -> None:
    size = 16 * (1000 + OVERHEAD)
    cache = ResponseCache(size)
    keys = [bytes([number]) for number in range(20)]
    for key in keys[:16]:
        cache.put(key, (tensor(bytes(1000)),), 1000)
    assert cache.used == size and all(cache.get(key) for key in keys[:16])
    assert cache.get(keys[0]) is not None
    cache.put(keys[16], (tensor(bytes(1000)),), 1000)
    assert cache.used == size and cache.get(keys[0]) is not None and cache.get(keys[1]) is None
    cache.put(keys[17], (tensor(bytes(size // MAX_PART)),), size // MAX_PART)
    assert cache.get(keys[17]) is None, "it would cost too many others"
    cache.put(keys[0], (tensor(b"another"),), 7)
    kept: Any = cache.get(keys[0])
    assert len(kept[0].data) == 1000 and cache.used == size


def test_kept_answers_do_not_hold_the_workers_memory() -> None:
    lent = bytearray(b"abc")
    (kept,) = copied([Tensor("y", "UINT8", (3,), memoryview(lent), block=object())])
    lent[:] = b"xyz"
    assert (bytes(kept.data), kept.block) == (b"abc", None)
