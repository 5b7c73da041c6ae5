"""Models in Python: marked by a decorator, from a file of the repository and from this program, over every protocol."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import cotenant
from cotenant.app.python_repository import python_repository
from cotenant.app.serving import BackgroundServer
from cotenant.errors import ConfigError, ModelError
from tests.live.deployment import csv

FILE = """
import cotenant
import numpy as np

@cotenant.model(inputs={"text": "BYTES[1]", "times": "INT32[1]"}, outputs={"shout": "BYTES[1]", "size": "INT32[1]"},
                max_batch_size=8)
def shout(text, times):
    if "fail" in text:
        raise ValueError("no such word")
    loud = np.array([[word[0].upper() * n[0]] for word, n in zip(text, times)], object)
    return {"shout": loud, "size": np.vectorize(len, otypes=[np.int64])(loud)}
"""


@cotenant.model(inputs={"x": "FP32[-1]"}, outputs={"mean": "FP32[1]"}, max_batch_size=4, sample_dims={"x": [16]})
def mean(x: Any) -> Any:
    return x.mean(axis=1, keepdims=True)


@cotenant.model(inputs={"x": "INT64[2]"}, outputs={"y": "INT64[2]"})
class Counter:
    """Count its calls; it takes one request at a time, without a batch dimension."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        assert x.shape == (2,)
        return [self.calls, int(x.sum())]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    folder = tmp_path_factory.mktemp("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "models" / "shout" / "1").mkdir(parents=True)
        (folder / "models" / "shout" / "1" / "model.py").write_text(FILE)
        (folder / "profiles.csv").write_text(csv(("shout",)))
        (folder / "serve.toml").write_text(
            'model_repository = "models"\nprofiles = "profiles.csv"\nhttp_port = 0\ngrpc_port = 0\nmetrics_port = 0\n'
            '[[models]]\nname = "shout"\nslo = "30s"'
        )
        with cotenant.serve(folder / "serve.toml") as server:
            yield server


def texts(module: Any, *words: str) -> list[Any]:
    text = module.InferInput("text", (len(words), 1), "BYTES")
    text.set_data_from_numpy(np.array([[word] for word in words], object))
    times = module.InferInput("times", (len(words), 1), "INT32")
    times.set_data_from_numpy(np.full((len(words), 1), 2, np.int32))
    return [text, times]


@pytest.mark.parametrize("module", [triton_http, triton_grpc])
def test_model_of_a_file_answers_stock_clients(served: BackgroundServer, module: Any) -> None:
    address = served.addresses.http if module is triton_http else served.addresses.grpc
    client = module.InferenceServerClient(address)
    answer = client.infer("shout", texts(module, "ja", "über"))
    assert [item.decode() for item in answer.as_numpy("shout").ravel()] == ["JAJA", "ÜBERÜBER"]
    assert answer.as_numpy("size").tolist() == [[4], [8]]
    assert answer.as_numpy("size").dtype == np.int32, "what is declared, not what numpy made"
    with pytest.raises(InferenceServerException, match=r"model\.py:9: ValueError: no such word"):
        client.infer("shout", texts(module, "fail"))
    assert client.infer("shout", texts(module, "ja")).as_numpy("size").tolist() == [[4]]
    client.close()


def ask(server: BackgroundServer, path: str, body: Any) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(server.addresses.http, timeout=60)
    connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], text


def test_generate_takes_and_gives_plain_values(served: BackgroundServer) -> None:
    path = "/v2/models/shout/generate"
    status, kind, text = ask(served, path, {"text": "ja", "times": 2, "id": "7", "parameters": {"priority": 1}})
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == {"id": "7", "model_name": "shout", "model_version": "1", "shout": "JAJA", "size": 4}
    status, _, text = ask(served, "/v2/models/shout/versions/1/generate", {"text": ["ja"], "times": [[3]]})
    assert (status, json.loads(text)["shout"]) == (200, "JAJAJA")
    status, _, text = ask(served, path, {"text": [["a"], ["b"]], "times": [[1], [2]]})
    assert (status, json.loads(text)["shout"]) == (200, ["A", "BB"])


def test_generate_stream_sends_one_event(served: BackgroundServer) -> None:
    status, kind, text = ask(served, "/v2/models/shout/generate_stream", {"text": "ja", "times": 2})
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    assert text.startswith("data: {") and text.endswith("}\n\n") and text.count("data:") == 1
    assert json.loads(text.removeprefix("data: "))["shout"] == "JAJA"
    status, _, text = ask(served, "/v2/models/shout/generate_stream", {"text": "fail", "times": 2})
    assert status == 200 and "no such word" in json.loads(text.removeprefix("data: "))["error"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("[]", 500, "not an object of inputs by name"),
        ("{", 500, "not an object of inputs by name"),
        ({"text": "ja"}, 400, "'times' is missing"),
        ({"text": "ja", "times": 2, "more": [1]}, 400, "'more' is not an input of the model"),
        ({"text": "ja", "times": "two"}, 500, "'data' is not a list of INT32"),
        ({"text": "ja", "times": 2.5}, 500, "'data' is not a list of INT32"),
        ({"text": {"a": 1}, "times": 2}, 500, "input 'text' is an object"),
        ({"text": ["ja", "nein"], "times": 2}, 400, "has shape [1, 2]"),
        ({"text": [["a"], ["b", "c"]], "times": [[1], [1]]}, 500, "its rows differ in length"),
        ({"text": "ja", "times": 2, "timeout": -1}, 400, "parameter 'timeout'"),
        ({"text": "ja", "times": 2, "parameters": 7}, 500, "not an object"),
        ('{"text": ' + "[" * 100 + "]" * 100 + ', "times": 1}', 500, "is nested in more than"),
        ('{"text": ' + "[" * 100_000 + ', "times": 1}', 500, "not an object of inputs by name"),
    ],
)
def test_generate_of_something_else_is_an_error_in_words(
    served: BackgroundServer, body: Any, status: int, reason: str
) -> None:
    for path in ("/v2/models/shout/generate", "/v2/models/shout/generate_stream"):
        answered, _, text = ask(served, path, body)
        assert answered == status and reason in json.loads(text)["error"]
    assert ask(served, "/v2/models/nobody/generate", body)[0] == 404


def test_functions_and_classes_of_a_program_are_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cotenant.serve([mean, Counter]) as server:
        rows = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert server.infer("mean", {"x": rows})["mean"].tolist() == [[1.0], [4.0]]
        client = triton_http.InferenceServerClient(server.addresses.http)
        assert client.get_model_config("mean")["max_batch_size"] == 4
        given = triton_http.InferInput("x", (2,), "INT64")
        given.set_data_from_numpy(np.array([3, 4]))
        calls = [client.infer("Counter", [given]).as_numpy("y").tolist() for _ in range(3)]
        assert [total for _, total in calls] == [7, 7, 7]
        assert [count - calls[0][0] for count, _ in calls] == [0, 1, 2], "one instance takes all calls"
        client.close()
    assert mean(np.ones((1, 2))).tolist() == [[1.0]], "it is a function as before"


def test_program_that_serves_its_own_models_is_not_served_again_by_its_workers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import cotenant, helper

        @cotenant.model(inputs={"x": "FP32[1]"}, outputs={"y": "FP32[1]"})
        def double(x):
            return helper.factor * x

        if GUARD:
            with cotenant.serve(double) as server:
                print(server.infer("double", {"x": [4.0]})["y"].tolist())
        """)
    )
    (tmp_path / "helper.py").write_text("factor = 2")
    text = program.read_text()

    def run(guard: str) -> subprocess.CompletedProcess[str]:
        program.write_text(text.replace("GUARD", guard))
        folder = str(Path(cotenant.__file__).parent.parent)
        environment = {"PYTHONPATH": folder, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    assert run('__name__ == "__main__"').stdout == "[8.0]\n"
    assert 'put the call under `if __name__ == "__main__":`' in run("True").stderr


def test_what_a_worker_cannot_find_is_an_error_at_once() -> None:
    @cotenant.model(inputs={"x": "FP32[1]"}, outputs={"y": "FP32[1]"})
    def inner(x: Any) -> Any:
        return x

    namespace: dict[str, Any] = {"cotenant": cotenant, "__name__": "nowhere"}
    source = "@cotenant.model(inputs={'x': 'FP32[1]'}, outputs={'y': 'FP32[1]'})\ndef f(x): return x"
    exec(compile(source, "<input>", "exec"), namespace)  # noqa: S102 as a notebook does
    for target, reason in (
        (lambda x: x, "is not marked; put @cotenant.model"),
        (inner, "inner: a worker cannot find it; define it at the top of a file"),
        (namespace["f"], "f: it is in no file that a worker could run"),
        ([mean, mean], "mean: two models of this name; rename one"),
        ([], "no models; give functions"),
    ):
        with pytest.raises(ModelError, match=reason), python_repository(target):
            pass
    with pytest.raises(ModelError, match="no models"):
        cotenant.serve([]).__enter__()


def test_serve_of_a_path_that_is_none_is_an_error_as_before() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        cotenant.serve("nowhere.toml").__enter__()
