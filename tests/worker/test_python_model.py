"""Declarations are read from the source without running it; what a model returns is checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cotenant
from cotenant.errors import ModelError
from cotenant.worker import runners
from cotenant.worker.python_model import MARK, Declaration, DeclaredTensor, is_loading, read_declaration
from cotenant.worker.repository import describe, find_model, sample_inputs, worker_model
from cotenant.worker.runners.python import Python

HEAD = "import cotenant\n"
IO = 'inputs={"x": "FP32[2]"}, outputs={"y": "FP32[2]"}'


def put(root: Path, source: str, config: str = "") -> Path:
    (root / "m" / "1").mkdir(parents=True, exist_ok=True)
    (root / "m" / "1" / "model.py").write_text(source)
    if config:
        (root / "m" / "config.pbtxt").write_text(config)
    return root / "m" / "1" / "model.py"


def load(root: Path, source: str, config: str = "") -> Python:
    put(root, source, config)
    entry = find_model(root, "m")
    runner, _ = runners.load_runner(worker_model(entry, describe(entry)), threads=1, fake=False)
    assert isinstance(runner, Python)
    return runner


@pytest.mark.parametrize(
    "source",
    [
        f"import cotenant\n@cotenant.model({IO}, max_batch_size=4)\ndef f(x): return x",
        f"import cotenant as ct\n@ct.model({IO}, max_batch_size=2 * 2 - 0)\ndef f(x): return x",
        f"from cotenant import model\n@model({IO}, max_batch_size=4)\ndef f(x): return x",
        f"from cotenant import serve, model as m\n@m({IO}, max_batch_size=4)\nclass F:\n    def __call__(self, x): ...",
    ],
)
def test_declaration_is_what_the_decorator_says(tmp_path: Path, source: str) -> None:
    path = put(tmp_path, source)
    if "2 * 2" in source:
        with pytest.raises(ModelError, match=r"model\.py:2: max_batch_size is not a literal"):
            read_declaration(path)
        return
    expected = Declaration(
        inputs=(DeclaredTensor("x", "FP32", (2,)),), outputs=(DeclaredTensor("y", "FP32", (2,)),), max_batch_size=4
    )
    assert read_declaration(path) == expected
    info = describe(find_model(tmp_path, "m"))
    assert (info.platform, info.max_batch_size, info.inputs[0].shape) == ("python", 4, (-1, 2))


def test_declaration_is_read_without_running_anything(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    put(tmp_path, f"{HEAD}open({str(ran)!r}, 'w')\n@cotenant.model({IO})\ndef f(x): return x")
    assert describe(find_model(tmp_path, "m")).platform == "python"
    assert not ran.exists()


def test_decorator_and_file_agree() -> None:
    @cotenant.model(inputs={"x": "FP32[2]"}, outputs={"y": "FP32[2]"}, sample_dims={"x": [2]})
    def f(x: Any) -> Any:
        return x

    assert getattr(f, MARK).sample_dims == {"x": (2,)}
    with pytest.raises(ModelError, match=r"^@cotenant.model: inputs: 'x' is 'FP32'; write a datatype and its dims"):
        cotenant.model(inputs={"x": "FP32"})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("@cotenant.model(\ndef f(x): ...", "model.py:2: no Python"),
        (f"@cotenant.model({IO})\ndef f(x): ...\n@cotenant.model({IO})\ndef g(x): ...", "several models: f in line 3"),
        (f"@cotenant.model({IO})\nasync def f(x): ...", "f is a coroutine function"),
        ("@cotenant.model('FP32')\ndef f(x): ...", "takes its arguments by name"),
        ("@cotenant.model(input={})\ndef f(x): ...", "unknown argument 'input' of cotenant.model"),
        ("@cotenant.model(**options)\ndef f(x): ...", "unknown argument '**'"),
        ("@cotenant.model(inputs=spec)\ndef f(x): ...", "inputs is not a literal"),
        ("@cotenant.model(inputs=['x'])\ndef f(x): ...", "inputs is ['x']; write"),
        ("@cotenant.model(inputs={'x': 'FP33[1]'})\ndef f(x): ...", "'x' is 'FP33[1]'"),
        ("@cotenant.model(inputs={'x': 'FP32[0]'})\ndef f(x): ...", "'x' is 'FP32[0]'"),
        ("@cotenant.model(inputs={'x': 'FP32[]'})\ndef f(x): ...", "'x' is 'FP32[]'"),
        ("@cotenant.model(inputs={'a-b': 'FP32[1]'})\ndef f(x): ...", "'a-b' is not a name of an argument"),
        ("@cotenant.model(max_batch_size=-1)\ndef f(x): ...", "max_batch_size is -1"),
        ("@cotenant.model(max_batch_size=True)\ndef f(x): ...", "max_batch_size is True"),
        ("@cotenant.model(sample_dims={'x': [1]})\ndef f(x): ...", "sample_dims: there is no input 'x'"),
        (f"@cotenant.model({IO}, sample_dims={{'x': [0]}})\ndef f(x): ...", "sample_dims of 'x' are [0]"),
        ("@cotenant.model()\ndef f(x): ...", "model.py does not say what it takes"),
        ("x = " + "(" * 10_000, "no Python"),
    ],
)
def test_file_that_declares_something_else_is_not_served(tmp_path: Path, source: str, reason: str) -> None:
    put(tmp_path, HEAD + source)
    with pytest.raises(ModelError, match=re.escape(reason)):
        describe(find_model(tmp_path, "m"))


def test_configuration_says_what_the_decorator_does_not(tmp_path: Path) -> None:
    config = """
        backend: "python" max_batch_size: 4
        input { name: "x" data_type: TYPE_STRING dims: [ -1 ] }
        output { name: "y" data_type: TYPE_STRING dims: [ -1 ] }
        model_warmup { inputs { key: "x" value { dims: [ 3 ] } } }
    """
    put(tmp_path, f"{HEAD}@cotenant.model()\ndef f(x): return x", config)
    entry = find_model(tmp_path, "m")
    info = describe(entry)
    assert (info.max_batch_size, info.inputs[0].datatype) == (4, "BYTES")
    assert sample_inputs(entry, info, 2, np.random.default_rng(0))[0].shape == (2, 3)
    put(tmp_path, f"{HEAD}@cotenant.model(max_batch_size=5)\ndef f(x): return x")
    with pytest.raises(ModelError, match=r"config\.pbtxt: max_batch_size differs from that of @cotenant\.model"):
        describe(find_model(tmp_path, "m"))
    put(tmp_path, "class TritonPythonModel: ...")
    with pytest.raises(ModelError, match=r"nothing in it is marked by @cotenant\.model"):
        describe(find_model(tmp_path, "m"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x[0]", "output 'y' has the shape [2]; [1, 2] is declared"),
        ("return x[:, :1]", "output 'y' has the shape [1, 1]; [1, 2] is declared"),
        ("return {'z': x}", "no output 'y'; the model returns z"),
        ("x += 1\n    return x", "model.py:4: ValueError: output array is read-only"),
        ("return [['a', 'b']]", "output 'y' is <U1, but FP32 is declared"),
        ("return [[1, 2], [3]]", "output 'y' is not an array"),
        ("return x.astype(complex)", "output 'y' is complex128, but FP32 is declared"),
        ("return 1 / 0", "model.py:4: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "model.py:4: SystemExit: 3"),
        ("return None", "output 'y' is object, but FP32 is declared"),
    ],
)
def test_batch_that_fails_says_why(tmp_path: Path, body: str, reason: str) -> None:
    source = f"{HEAD}@cotenant.model({IO}, max_batch_size=1)\ndef f(x):\n    {body}"
    with pytest.raises(ModelError, match=re.escape(reason)):
        load(tmp_path, source)


@pytest.mark.parametrize(
    ("datatype", "body", "reason"),
    [
        ("INT8", "return [[300, 0]]", "output 'y' has 300, which INT8 cannot hold"),
        ("UINT8", "return [[-1, 0]]", "output 'y' has -1, which UINT8 cannot hold"),
        ("INT32", "return [[2**40, 0]]", "output 'y' has 1099511627776, which INT32 cannot hold"),
        ("FP16", "return [[1e6, 0]]", "output 'y' has numbers that are too large for FP16"),
    ],
)
def test_number_that_its_datatype_cannot_hold_is_an_error(
    tmp_path: Path, datatype: str, body: str, reason: str
) -> None:
    io = IO.replace('outputs={"y": "FP32[2]"}', f'outputs={{"y": "{datatype}[2]"}}')
    with pytest.raises(ModelError, match=re.escape(reason)):
        load(tmp_path, f"{HEAD}@cotenant.model({io}, max_batch_size=1)\ndef f(x):\n    {body}")


def test_integers_that_fit_are_converted(tmp_path: Path) -> None:
    io = IO.replace('outputs={"y": "FP32[2]"}', 'outputs={"y": "UINT8[2]"}')
    runner = load(tmp_path, f"{HEAD}@cotenant.model({io}, max_batch_size=1)\ndef f(x):\n    return [[3, 255]]")
    ((_, values),) = runner.run({"x": np.zeros((1, 2), np.float32)})
    assert values.dtype == np.uint8 and values.tolist() == [[3, 255]]


def test_class_is_instantiated_once_and_knows_that_it_loads(tmp_path: Path) -> None:
    source = f"""{HEAD}
from cotenant.worker.python_model import is_loading
@cotenant.model({IO})
class F:
    def __init__(self):
        assert is_loading()
    def __call__(self, x):
        assert not is_loading()
        return x + 1
"""
    runner = load(tmp_path, source)
    ((name, values),) = runner.run({"x": np.zeros(2, np.float32)})
    assert (name, values.tolist()) == ("y", [1.0, 1.0]) and values.dtype == np.float32
    assert not is_loading()


def test_line_of_an_error_is_told_for_a_relative_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"model\.py:4: ZeroDivisionError"):
        load(Path(), f"{HEAD}@cotenant.model({IO}, max_batch_size=1)\ndef f(x):\n    return 1 / 0")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_like_this", "model.py:2: ModuleNotFoundError"),
        (f"@cotenant.model({IO})\nclass F: ...", "F has no __call__; define it"),
        (f"@cotenant.model({IO})\nclass F:\n    def __init__(self): raise KeyError('weights')", "model.py:4: KeyError"),
    ],
)
def test_file_that_fails_to_load_says_where(tmp_path: Path, source: str, reason: str) -> None:
    marked = "" if "@" in source else f"\n@cotenant.model({IO})\ndef f(x): return x"
    with pytest.raises(ModelError, match=re.escape(reason)):
        load(tmp_path, HEAD + source + marked)
