"""What callers, workers and model files bring is data: nothing of it is unpickled, run, opened or fetched."""

from __future__ import annotations

import ast
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
import pytest
from onnx import TensorProto, helper

import cotenant
from benchmarks.onnx_models import save
from cotenant.errors import ModelError
from cotenant.protocol import messages
from cotenant.worker.runners.onnx import Onnx
from cotenant.worker.wire import FromWorker, Inbox, ToWorker, WorkerModel
from tests.security.server import PATIENCE, Served, post
from tests.worker import graphs

PACKAGE = Path(cotenant.__file__).parent
# yaml.safe_load makes plain values only.
YAML_LOADERS = {
    f"yaml.{name}"
    for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load", "Loader", "UnsafeLoader")
}
SERIALIZERS = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
RUN = {"eval", "exec", "compile", "__import__"}


def pickled(file: Path) -> bytes:
    """A pickle that makes a file when it is loaded, as `os.system` would be called."""
    return b"cposix\nsystem\n(S'touch %s'\ntR." % str(file).encode()


def test_package_has_no_unpickler_and_runs_no_text() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, name) for name in names if name.partition(".")[0] in SERIALIZERS]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUN:
                found.append((path.name, node.func.id))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in YAML_LOADERS:
                found.append((path.name, ast.unparse(node)))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "torch.load"):
                safe = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}[
                    ast.unparse(node.func)
                ]
                given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
                found += [] if given.get(safe[0]) is safe[1] else [(path.name, ast.unparse(node))]
    assert found == []


def test_pickle_from_a_caller_is_not_loaded(server: Served, tmp_path: Path) -> None:
    file = tmp_path / "loaded"
    pickle = pickled(file)
    strings = b"".join(struct.pack("<I", len(pickle)) + pickle for _ in range(2))
    given = {"name": "x", "shape": [1, 2], "datatype": "BYTES", "parameters": {"binary_data_size": len(strings)}}
    head = json.dumps({"inputs": [given]}).encode()
    line = f"Inference-Header-Content-Length: {len(head)}"
    assert server.ask(post("/v2/models/strings/infer", head + strings, line))[0] == 200  # as text, which it is
    for kind in ("application/octet-stream", "application/x-pickle", "application/vnd.bentoml+pickle"):
        assert server.ask(post("/v2/models/identity/infer", pickle, f"Content-Type: {kind}"))[0] in (400, 500)
    with grpc.insecure_channel(server.grpc) as channel:
        for method in ("ModelInfer", "RepositoryModelLoad"):
            call: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError):
                call(pickle, timeout=PATIENCE)
    assert server.serves() and not file.exists()


@pytest.mark.parametrize("message", [FromWorker, ToWorker])
def test_pickle_from_a_worker_is_no_message(message: Any, tmp_path: Path) -> None:
    pickle = pickled(tmp_path / "loaded")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<Q", len(pickle)) + pickle)
        inbox = Inbox(ours)
        assert inbox.fill() and inbox.take() == pickle
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.Decoder(message).decode(pickle)
    assert not (tmp_path / "loaded").exists()


def test_code_beside_a_model_file_is_not_run(tmp_path: Path) -> None:
    """Programs are models of their own, by their file's name; an ONNX file brings none, nor a library of operators."""
    graphs.identity(tmp_path / "model.onnx")
    ran = tmp_path / "ran"
    for name in ("model.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (tmp_path / name).write_text(f"open({str(ran)!r}, 'w')")
    runner = Onnx(WorkerModel(name="m", path=str(tmp_path / "model.onnx"), inputs=()), 1)
    runner.close()
    node = helper.make_node("Evil", ["x"], ["y"], domain=f"{tmp_path}/evil.so", library="evil.so")
    shape: Any = {"x": (TensorProto.FLOAT, ["n", 2])}
    save(tmp_path / "evil.onnx", [node], shape, {"y": shape["x"]})
    (tmp_path / "evil.so").write_bytes(b"\x7fELF")
    with pytest.raises(ModelError, match="ONNX Runtime cannot load it"):
        Onnx(WorkerModel(name="evil", path=str(tmp_path / "evil.onnx"), inputs=()), 1)
    assert not ran.exists()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        yield sock


def test_url_of_a_caller_is_never_fetched(server: Served, listener: socket.socket) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/model.onnx"
    quoted = url.replace(":", "%3A").replace("/", "%2F")
    text = {"name": "x", "shape": [1, 2], "datatype": "BYTES", "data": [url, f"file://{url}"]}
    assert server.infer("strings", text, parameters={"url": url, "image_url": url})[0] == 200
    for parameters in ({"config": json.dumps({"model_uri": url})}, {"url": url}, {"file:1/model.onnx": url}):
        body = json.dumps({"parameters": parameters, "url": url}).encode()
        assert server.ask(post("/v2/repository/models/strings/load", body))[0] in (200, 400, 500, 501)
    for path in (f"/v2/repository/models/{quoted}/load", f"/v2/models/{quoted}/infer", f"/{url}"):
        assert server.ask(post(path, b"{}", f"Referer: {url}", f"X-Forwarded-Host: {url}"))[0] >= 400
    with grpc.insecure_channel(server.grpc) as channel:
        load: Any = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        with pytest.raises(grpc.RpcError):
            load(messages.RepositoryModelLoadRequest(model_name=url, repository_name=url).SerializeToString())
    assert server.serves()
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_callers_register_and_name_no_shared_memory(server: Served) -> None:
    for kind in ("systemsharedmemory", "cudasharedmemory"):
        region = {"key": "/cotenant", "offset": 0, "byte_size": 64, "raw_handle": {"b64": "AA=="}, "device_id": 0}
        path = f"/v2/{kind}/region/r/register"
        assert server.ask(post(path, json.dumps(region).encode()))[0] == 501
    named = {"name": "x", "shape": [1, 16], "datatype": "FP32"}
    named["parameters"] = cast(Any, {"shared_memory_region": "r", "shared_memory_byte_size": 64})
    assert server.infer("identity", named)[0] == 501
    errors = server.infer("identity", named)[1]["error"], server.infer("identity", {"name": "x"})[1]["error"]
    assert not any("memfd" in error or "/dev/shm" in error for error in errors)  # noqa: S108  # it is not to be there
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    assert "/dev/shm/" not in maps, "memory with a name, which others can open"  # noqa: S108
    assert server.serves()
