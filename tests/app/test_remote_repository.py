"""Model repositories on object stores: what is copied, when, and what a store cannot make the server write."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cotenant
from cotenant.app import repository_poller
from cotenant.app.remote_repository import STATE, RemoteRepository
from cotenant.errors import ConfigError, FailedError
from tests.cli.program import until
from tests.live.deployment import csv
from tests.worker import graphs

fsspec = pytest.importorskip("fsspec")
ROW = np.full((1, 16), 0.25, dtype=np.float32)


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    graphs.identity(tmp_path / "model.onnx")
    return (tmp_path / "model.onnx").read_bytes()


@pytest.fixture
def store() -> Iterator[tuple[Any, str]]:
    """A store in memory, which fsspec brings, and the URL of a folder of it."""
    url = f"memory://{uuid.uuid4().hex}/models"
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(root)
    yield files, url
    files.rm(root.rpartition("/")[0], recursive=True)


def put(store: tuple[Any, str], path: str, content: bytes) -> None:
    files, url = store
    files.pipe_file(f"{url.removeprefix('memory:/')}/{path}", content)


def held(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != STATE
    }


def test_folder_takes_the_place_of_a_file_and_the_reverse(store: tuple[Any, str], tmp_path: Path) -> None:
    put(store, "a/1/model.onnx", b"one")
    put(store, "b/1/model.onnx/part", b"two")
    folder = tmp_path / "mirror"
    remote = RemoteRepository(store[1], folder)
    remote.synchronise()
    for gone in ("a/1/model.onnx", "b/1/model.onnx"):
        store[0].rm(f"{store[1].removeprefix('memory:/')}/{gone}", recursive=True)
    put(store, "a/1/model.onnx/part", b"three")
    put(store, "b/1/model.onnx", b"four")
    remote.synchronise()
    assert held(folder) == {"a/1/model.onnx/part": b"three", "b/1/model.onnx": b"four"}


def test_mirror_is_what_the_store_is_and_copies_only_what_changed(store: tuple[Any, str], tmp_path: Path) -> None:
    put(store, "a/1/model.onnx", b"one")
    put(store, "a/config.pbtxt", b"")
    put(store, "b/2/model.onnx", b"two")
    folder = tmp_path / "mirror"
    remote = RemoteRepository(store[1], folder)
    remote.synchronise()
    assert held(folder) == {"a/1/model.onnx": b"one", "a/config.pbtxt": b"", "b/2/model.onnx": b"two"}
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.onnx")}
    (folder / "own").mkdir()
    (folder / "own" / "notes").write_text("not of the store")
    put(store, "a/1/model.onnx", b"ONE")
    store[0].rm(f"{store[1].removeprefix('memory:/')}/b", recursive=True)
    remote.synchronise()
    assert held(folder) == {"a/1/model.onnx": b"ONE", "a/config.pbtxt": b"", "own/notes": b"not of the store"}
    assert not (folder / "b").exists()
    remote.synchronise()
    assert times[folder / "a/1/model.onnx"] != (now := (folder / "a/1/model.onnx").stat().st_mtime_ns)
    remote.synchronise()
    assert (folder / "a/1/model.onnx").stat().st_mtime_ns == now
    (folder / "a/1/model.onnx").unlink()
    remote.synchronise()
    assert held(folder)["a/1/model.onnx"] == b"ONE", "what was lost here is copied again"


@pytest.mark.parametrize("path", ["../out", "a/../../out", "a\\..\\out", STATE])
def test_file_that_would_lead_out_of_the_mirror_is_refused(
    store: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    root = store[1].removeprefix("memory:/")
    with monkeypatch.context() as patch:
        patch.setattr(type(store[0]), "find", lambda self, given, **rest: {f"{root}/{path}": {"size": 1}})
        with pytest.raises(ConfigError, match="is not a path of a file in a repository; remove it"):
            RemoteRepository(store[1], tmp_path / "mirror").synchronise()
    assert not (tmp_path / "out").exists()


def test_copy_that_breaks_off_leaves_the_file_as_it_was(
    store: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a/1/model.onnx", b"one")
    remote = RemoteRepository(store[1], tmp_path / "mirror")
    remote.synchronise()
    put(store, "a/1/model.onnx", b"another")

    def broken(self: Any, source: str, target: str, **rest: Any) -> None:
        Path(target).write_bytes(b"ano")
        raise OSError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(store[0]), "get_file", broken)
        with pytest.raises(ConfigError, match="cannot be read: the connection was lost"):
            remote.synchronise()
        remote.synchronise(first=True)  # a server that starts serves what there is
    assert held(tmp_path / "mirror") == {"a/1/model.onnx": b"one"}
    remote.synchronise()
    assert held(tmp_path / "mirror") == {"a/1/model.onnx": b"another"}


def test_store_that_is_not_there_is_an_error_in_words(store: tuple[Any, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^memory://.*/nothing: nothing found; name a folder of"):
        RemoteRepository(f"{store[1]}/nothing", tmp_path).synchronise(first=True)
    with pytest.raises(ConfigError, match=r"^nosuch://x: cannot be read: "):
        RemoteRepository("nosuch://x", tmp_path).synchronise(first=True)
    (tmp_path / STATE).write_text("no JSON")
    put(store, "a/1/model.onnx", b"one")
    RemoteRepository(store[1], tmp_path).synchronise()
    assert json.loads((tmp_path / STATE).read_text()).keys() == {"a/1/model.onnx"}


def test_server_serves_loads_and_follows_a_store(
    store: tuple[Any, str], model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(repository_poller, "SETTLED", 0.05)
    put(store, "identity/1/model.onnx", model)
    (tmp_path / "profiles.csv").write_text(csv(("identity", "other")))
    text = (
        f'remote_repository = "{store[1]}"\nprofiles = "profiles.csv"\nhttp_port = 0\ngrpc_port = 0\nmetrics_port = 0\n'
    )
    (tmp_path / "serve.toml").write_text(text)
    with cotenant.serve(tmp_path / "serve.toml") as server:
        assert server.infer("identity", {"x": ROW}, timeout=30)["y"].tolist() == ROW.tolist()
        put(store, "other/1/model.onnx", model)
        server.load("other")
        assert server.infer("other", {"x": ROW}, timeout=30)["y"].tolist() == ROW.tolist()
        with pytest.raises(FailedError, match="no model 'nobody'"):
            server.load("nobody")
    (tmp_path / "serve.toml").write_text(f'model_control_mode = "poll"\nrepository_poll_interval = "50ms"\n{text}')
    with cotenant.serve(tmp_path / "serve.toml") as server:
        put(store, "identity/2/model.onnx", model)
        until(lambda: server.deployment.offered["identity"].info.version == "2")


def test_s3_is_served(model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a server of its own on this machine, where the packages for it are installed."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"client_kwargs": {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"}}
        files = fsspec.filesystem("s3", **options)
        files.call_s3("create_bucket", Bucket="bucket")
        files.pipe_file("bucket/models/identity/1/model.onnx", model)
        remote = RemoteRepository("s3://bucket/models", tmp_path / "mirror", options)
        remote.synchronise()
        assert held(tmp_path / "mirror") == {"identity/1/model.onnx": model}
        files.pipe_file("bucket/models/identity/1/model.onnx", model[::-1])  # of the same size
        files.pipe_file("bucket/models/identity/config.pbtxt", b"max_batch_size: 2")
        remote.synchronise()
        assert held(tmp_path / "mirror")["identity/1/model.onnx"] == model[::-1]
        files.pipe_file("bucket/models/identity/1/model.onnx", model)
        (tmp_path / "profiles.csv").write_text(csv(("identity",)))
        endpoint = f'{{ endpoint_url = "http://{host}:{port}", region_name = "us-east-1" }}'
        (tmp_path / "serve.toml").write_text(
            'remote_repository = "s3://bucket/models"\nprofiles = "profiles.csv"\n'
            "http_port = 0\ngrpc_port = 0\nmetrics_port = 0\n"
            f"[remote_options]\nclient_kwargs = {endpoint}\n"
        )
        with cotenant.serve(tmp_path / "serve.toml") as served:
            assert served.infer("identity", {"x": ROW}, timeout=30)["y"].tolist() == ROW.tolist()
            assert served.deployment.offered["identity"].info.max_batch_size == 2
    finally:
        server.stop()
