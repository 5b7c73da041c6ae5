"""Batches through real models of PyTorch on the processor, in this process."""

from __future__ import annotations

import gc
import itertools
import mmap
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pytest
import torch

from cotenant.core.tensor import DTYPES, TensorSpec
from cotenant.errors import DeviceError, ModelError
from cotenant.worker import runners
from cotenant.worker.batch import BatchBuilder
from cotenant.worker.runners import Runner, torch_modules
from cotenant.worker.runners.arrays import Array, datatype
from cotenant.worker.runners.pytorch import Torch
from cotenant.worker.runners.torch_device import CpuDevice
from cotenant.worker.runners.torch_modules import load_model
from cotenant.worker.wire import TensorPart, WorkerModel
from tests.worker import modules

T = TypeVar("T")


def load(model: WorkerModel) -> Runner:
    return runners.load_runner(model, threads=1, fake=False)[0]


def part(array: Array, name: str = "x") -> TensorPart:
    return TensorPart(name, datatype(array), array.shape, memoryview(array.tobytes()))


def run(runner: Runner, arrays: list[Array]) -> list[Any]:
    """The first output of each request, or the reason why there is none."""
    with mmap.mmap(-1, 4096) as memory:
        answers = BatchBuilder(runner, memory, (0, 0)).run([[part(array)] for array in arrays])
    return [
        answer
        if isinstance(answer, str)
        else np.frombuffer(answer[0].data or b"", DTYPES[answer[0].datatype]).reshape(answer[0].shape).tolist()
        for answer in answers
    ]


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WorkerModel]:
    return {platform: modules.double(tmp_path_factory.mktemp(platform), platform) for platform in modules.KINDS}


class Reading(CpuDevice):
    """Reads what requests bring where it is, as a GPU does in the arena."""

    def reads(self, parts: Sequence[Array]) -> bool:
        return True

    def to_device(self, host: Sequence[torch.Tensor], into: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat(list(host))


def test_pytorch_inputs_that_the_device_reads_are_not_staged(
    doubles: dict[str, WorkerModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = doubles["pytorch_libtorch"]
    runner = Torch(it, place := Reading(), load_model(it, place.device))
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    monkeypatch.setattr(place, "stage", lambda shape, dtype: pytest.fail("it was staged"))
    with mmap.mmap(-1, 4096) as memory:
        memory[: rows.nbytes] = rows.tobytes()
        for cuts in ((0, 6), (0, 1, 4, 6)):
            batch = [
                [TensorPart("x", "FP32", (end - start, 2), None, 8 * start, 8 * (end - start))]
                for start, end in itertools.pairwise(cuts)
            ]
            answers = BatchBuilder(runner, memory, (0, 0)).run(batch)
            assert b"".join(bytes(answer[0].data or b"") for answer in answers) == (2 * rows).tobytes()  # type: ignore[union-attr]
        gc.collect()


class Counting(CpuDevice):
    """Says that it is a GPU, and counts the rows of what it is given."""

    device = cast(torch.device, SimpleNamespace(type="cuda"))

    def __init__(self) -> None:
        self.rows: list[int] = []

    def to_device(self, host: Sequence[torch.Tensor], into: torch.Tensor | None = None) -> torch.Tensor:
        self.rows.append(sum(len(part) for part in host))
        return super().to_device(host)


def test_pytorch_each_size_is_run_once_by_a_thread_before_a_lane_on_a_gpu_serves(
    doubles: dict[str, WorkerModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = msgspec.structs.replace(doubles["pytorch_libtorch"], max_batch=6)
    module = load_model(it, torch.device("cpu"))

    def lane() -> list[int]:
        place = Counting()
        Torch(it, place, module)
        return place.rows

    assert lane() == [6, 6, 6, 1, 1, 1, 4, 2, 5, 3]
    assert lane() == []
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lane).result() == [4, 2, 1, 6, 5, 3]
        assert other.submit(lane).result() == []
        monkeypatch.setattr("cotenant.worker.runners.pytorch.SIZES_SECONDS", -1.0)
    with ThreadPoolExecutor(1) as another:
        assert another.submit(lane).result() == []


@pytest.mark.parametrize("platform", modules.KINDS)
def test_pytorch_each_request_gets_its_rows(doubles: dict[str, WorkerModel], platform: str) -> None:
    runner, footprint = runners.load_runner(doubles[platform], threads=1, fake=False)
    assert footprint == 2 * 64  # two outputs, each aligned
    assert (runner.device, runner.memory) == (0.0, 0)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert run(runner, [rows[:1], rows[1:4], rows[4:]]) == [
        (2 * rows[:1]).tolist(),
        (2 * rows[1:4]).tolist(),
        (2 * rows[4:]).tolist(),
    ]
    assert [name for name, _ in runner.run({"x": rows})] == ["y", "total"]


@pytest.mark.parametrize("platform", modules.KINDS)
def test_pytorch_lanes_share_the_weights_of_a_file(doubles: dict[str, WorkerModel], platform: str) -> None:
    model = doubles[platform]
    first, second = (load_model(model, torch.device("cpu")) for _ in range(2))
    assert first is second
    alive = weakref.ref(first)
    weight = next(first.parameters()).untyped_storage()  # type: ignore[attr-defined]
    lanes = [Torch(model, CpuDevice(), first) for _ in range(2)]
    assert [lane.warmed for lane in lanes] == [False, True]  # the second runs one small batch, and is ready
    del first, second
    lanes[0].close()
    assert alive() is not None and lanes[1].run({"x": np.ones((1, 2), np.float32)})[0][1].tolist() == [[2, 2]]
    gc.disable()
    try:  # nobody waits for Python to collect what is in cycles
        lanes[1].close()
        assert alive() is None and torch._C._storage_Use_Count(weight._cdata) == 1
    finally:
        gc.enable()


def test_pytorch_trained_weights_are_not_shared(tmp_path: Path) -> None:
    source = """
import torch
class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
    def forward(self, x):
        loss = (self.weight - x.sum(1, keepdim=True)) ** 2
        self.optimizer.zero_grad()
        loss.mean().backward()
        self.optimizer.step()
        return loss
"""
    model = modules.python(tmp_path, source, gradients=True, outputs=(TensorSpec("loss", "FP32", (-1, 1)),))
    first = load(model)
    rows = np.full((3, 2), 2, np.float32)
    before = run(load(model), [rows])  # one that has learnt only from its own warm-up
    for _ in range(2):
        first.run({"x": rows})
    ((_, loss),) = first.run({"x": rows})
    assert loss.tolist() == [[0], [0], [0]] and before == [[[4], [4], [4]]]


def test_pytorch_batch_out_of_memory_is_halved_until_it_fits(tmp_path: Path) -> None:
    source = """
import torch
class Small(torch.nn.Module):
    def forward(self, x):
        if (x == 7).any() or len(x) > 4 and (x == 5).any():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\\nSee documentation")
        return x, x.sum(1, keepdim=True)
"""
    runner = load(modules.python(tmp_path, source))
    requests = [np.full((1, 2), value, np.float32) for value in (1, 2, 3, 7, 5, 6, 7, 8)]
    no_memory = "no device memory for this batch: CUDA out of memory. Tried to allocate 20.00 MiB."
    assert run(runner, requests) == [no_memory if array[0, 0] == 7 else array.tolist() for array in requests]
    assert run(runner, requests[:1]) == [[[1, 1]]]


class Lost(CpuDevice):
    """A device on which nothing runs any more."""

    def scope(self) -> AbstractContextManager[object]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors")

    def broken(self) -> str:
        return "CUDA error: an illegal memory access was encountered"


def test_pytorch_broken_context_ends_the_worker(doubles: dict[str, WorkerModel]) -> None:
    model = doubles["pytorch_module"]
    runner = Torch(model, Lost(), load_model(model, torch.device("cpu")))
    error = "model 'm' corrupted its CUDA context: CUDA error: an illegal memory access was encountered"
    with pytest.raises(DeviceError, match=f"^{error}$"):
        run(runner, [np.ones((1, 2), np.float32)] * 3)


def test_pytorch_call_error_fails_one_request(tmp_path: Path) -> None:
    source = """
import torch
class Picky(torch.nn.Module):
    def forward(self, x):
        if (x == 7).any():
            raise torch.AcceleratorError("CUDA error: invalid argument")
        return x, x.sum(1, keepdim=True)
"""
    answers = run(load(modules.python(tmp_path, source)), [np.full((1, 2), n, np.float32) for n in (1, 7)])
    assert answers == [[[1, 1]], "CUDA error: invalid argument"]


class Cached(CpuDevice):
    """Keeps the memory of one model's batches for the next that asks."""

    def __init__(self) -> None:
        self.used, self.cached = 100, 0

    def taken(self) -> int:
        self.cached = max(self.cached, 1000)
        return self.used + self.cached

    def release(self) -> int:
        self.cached = 0
        return self.used


def test_pytorch_memory_of_each_model_of_a_lane_is_its_own(tmp_path: Path) -> None:
    place = Cached()
    for platform in ("pytorch_module", "pytorch_libtorch"):
        model = modules.double(tmp_path, platform)
        assert Torch(model, place, load_model(model, torch.device("cpu"))).memory == 1000


@pytest.mark.parametrize(
    ("platform", "opens"), [("pytorch_libtorch", "torch.jit.load"), ("pytorch_export", "torch.export.load")]
)
def test_pytorch_weights_out_of_memory_are_reported_as_such(
    doubles: dict[str, WorkerModel], monkeypatch: pytest.MonkeyPatch, platform: str, opens: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation")

    monkeypatch.setattr(opens, full)
    with pytest.raises(ModelError, match=r"model\.pt2?: no device memory for its weights: CUDA out of memory\. Tried"):
        load_model(doubles[platform], torch.device("cpu"))


@pytest.fixture(autouse=True)
def forget_never_captured() -> None:
    """Forget what other tests could not capture of the same module."""
    torch_modules.never_captured.clear()


class Recorder(CpuDevice):
    """Captures as a GPU does: the same kernels, on the same memory. refused: why it captures nothing."""

    def __init__(self, refused: Exception | None = None) -> None:
        self.captured = self.replayed = self.tried = 0
        self.refused = refused

    def capture(self, compute: Callable[[], T], runs: int) -> tuple[T, Callable[[], None]]:  # type: ignore[override]
        self.tried += 1
        if self.refused is not None:
            raise self.refused
        self.captured += 1
        result: Any = compute()

        def replay() -> None:
            self.replayed += 1
            fresh: Any = compute()
            for (_, place), (_, value) in zip(result, fresh, strict=True):
                place.copy_(value)

        return result, replay


def captured(
    model: WorkerModel, place: Recorder, *, must: bool = False, serve_first: bool = False, **graphs: int
) -> Torch:
    """Load a model that captures graphs of sizes, each with the fewest rows that are padded to it."""
    sizes = tuple((int(size[1:]), lowest) for size, lowest in graphs.items())
    changed = msgspec.structs.replace(model, graphs=sizes, must_capture=must)
    return Torch(changed, place, load_model(changed, torch.device("cpu")), serve_first=serve_first)


def test_pytorch_captured_sizes_replay_and_others_run_eagerly(doubles: dict[str, WorkerModel]) -> None:
    place = Recorder()
    runner = captured(doubles["pytorch_module"], place, _1=1, _4=4, _64=64)
    assert place.captured == 2  # 64 is more than its largest batch
    for rows, replayed in ((4, 1), (3, 1), (1, 2), (5, 2), (4, 3)):
        sent = np.random.default_rng(rows).random((rows, 2), np.float32)
        (_, y), _ = runner.run({"x": sent})
        np.testing.assert_allclose(y, 2 * sent)
        assert place.replayed == replayed
    assert runner.memory == 0


def test_pytorch_batches_are_padded_to_the_next_captured_size(doubles: dict[str, WorkerModel]) -> None:
    place = Recorder()
    runner = captured(doubles["pytorch_module"], place, _2=1, _8=4)
    for number, (rows, padded) in enumerate(((8, 1), (5, 1), (4, 1), (3, 0), (2, 1), (1, 1), (7, 1))):
        before = place.replayed
        sent = np.random.default_rng(number).random((rows, 2), np.float32)
        (_, y), (_, total) = runner.run({"x": sent})
        np.testing.assert_allclose(y, 2 * sent)
        np.testing.assert_allclose(total, 2 * sent.sum(1, keepdims=True), rtol=1e-6)
        assert place.replayed - before == padded


def test_pytorch_model_that_serves_first_is_captured_while_no_batch_waits(doubles: dict[str, WorkerModel]) -> None:
    place = Recorder()
    runner = captured(doubles["pytorch_module"], place, serve_first=True, _1=1, _2=2, _8=3, _64=64)
    sent = np.ones((2, 2), np.float32)
    for more, number in ((True, 1), (True, 2), (True, 3), (False, 3)):
        assert run(runner, [sent]) == [[[2, 2]] * 2]
        assert (runner.improve(), place.captured) == (more, number)
    before = place.replayed
    for rows in (1, 2, 5):
        runner.run({"x": np.ones((rows, 2), np.float32)})
    assert place.replayed == before + 3
    runner.model = msgspec.structs.replace(runner.model, max_batch=100)  # as after a change of plan
    assert (runner.improve(), place.captured) == (True, 4)


def test_pytorch_model_that_asks_for_graphs_is_captured_before_it_serves(doubles: dict[str, WorkerModel]) -> None:
    place = Recorder()
    captured(doubles["pytorch_module"], place, must=True, serve_first=True, _1=1, _2=2)
    assert place.captured == 2


@pytest.mark.parametrize(
    "refused",
    [RuntimeError("operation not permitted when stream is capturing"), TypeError("no"), torch.jit.Error("no")],
)
def test_pytorch_model_that_cannot_be_captured_runs_without_graphs(
    doubles: dict[str, WorkerModel], refused: Exception
) -> None:
    place, model = Recorder(refused), doubles["pytorch_module"]
    runner = captured(model, place, _1=1, _4=2)
    assert run(runner, [np.ones((3, 2), np.float32)]) == [[[2, 2]] * 3]
    captured(model, place, _1=1, _4=2)  # another lane of the same module
    assert place.tried == 1
    with pytest.raises(ModelError, match=rf"a batch of 4 cannot be captured .*: {refused}; remove"):
        captured(model, place, must=True, _1=1, _4=2)


def test_pytorch_size_without_memory_for_a_graph_runs_without_one(doubles: dict[str, WorkerModel]) -> None:
    place, model = Recorder(torch.OutOfMemoryError("CUDA out of memory")), doubles["pytorch_module"]
    captured(model, place, _1=1, _4=2)
    assert place.tried == 2
    place.refused = None
    assert not captured(model, place, _1=1, _4=2).improve() and place.captured == 2  # another lane finds memory


@pytest.mark.parametrize("body", ["x.sum()", "x.new_ones(10)", "x.new_ones(8, 2)", "x.repeat(5, 1)"])
def test_pytorch_outputs_that_are_no_rows_of_the_batch_are_as_without_graphs(tmp_path: Path, body: str) -> None:
    source = f"import torch\nclass Whole(torch.nn.Module):\n    def forward(self, x):\n        return {body}\n"
    model = modules.python(tmp_path, source, outputs=(TensorSpec("y", "FP32", (-1, 2)),))
    plain = Torch(model, CpuDevice(), load_model(model, torch.device("cpu")))
    sent = {"x": np.ones((3, 2), np.float32)}
    ((_, expected),) = plain.run(sent)
    ((_, answer),) = captured(model, Recorder(), _8=1, _4=1, _1=1).run(sent)
    np.testing.assert_array_equal(answer, expected)
    with pytest.raises(ModelError, match="the first dimension of output 'y' is not the batch"):
        captured(model, Recorder(), must=True, _8=1, _4=1, _1=1)


def test_pytorch_size_that_the_model_rejects_is_not_captured_and_others_are(tmp_path: Path) -> None:
    source = """
import torch
class Even(torch.nn.Module):
    def forward(self, x):
        if len(x) == 4:
            raise ValueError("no four")
        return x
"""
    model = modules.python(tmp_path, source, outputs=(TensorSpec("y", "FP32", (-1, 2)),))
    place = Recorder()
    runner = captured(model, place, _1=1, _4=2, _8=5)
    assert place.captured == 2
    runner.run({"x": np.ones((1, 2), np.float32)})
    with pytest.raises(ModelError, match="no four"):
        runner.run({"x": np.ones((4, 2), np.float32)})


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_pytorch_scripted_module_that_keeps_state_is_not_captured(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Counter()).save(str(tmp_path / "model.pt"))
    y = (TensorSpec("y", "FP32", (-1, 2)),)
    place = Recorder()
    captured(modules.written(tmp_path / "model.pt", "pytorch_libtorch", outputs=y), place, _1=1, _8=2)
    assert place.tried == 0


def test_pytorch_value_without_dimensions_is_copied_into_a_captured_input() -> None:
    into = torch.zeros(())
    assert CpuDevice().to_device([torch.tensor(3.0)], into) is into and into == 3
    rows = torch.zeros(4, 2)
    CpuDevice().to_device([torch.ones(3, 2)], rows)
    assert rows.sum(1).tolist() == [2, 2, 2, 0]


def test_pytorch_inputs_of_dynamic_size_are_not_recorded(tmp_path: Path) -> None:
    spec = (TensorSpec("x", "FP32", (-1, -1)),)
    source = "import torch\nclass Same(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    model = modules.python(tmp_path, source, inputs=spec, outputs=spec, graphs=((1, 1), (2, 2)))
    place = Recorder()
    Torch(model, place, load_model(model, torch.device("cpu")))
    assert place.captured == 0


def test_pytorch_named_inputs_and_outputs_are_matched(tmp_path: Path) -> None:
    source = """
import torch
class Named(torch.nn.Module):
    def forward(self, a, b=None):
        return {"total": a, "y": b, "more": a}
"""
    two = TensorSpec("b", "FP32", (-1, 2)), TensorSpec("a", "FP32", (-1, 1))
    runner = load(modules.python(tmp_path, source, inputs=two))
    answers = runner.run({"a": np.zeros((1, 1), np.float32), "b": np.ones((1, 2), np.float32)})
    assert [(name, array.tolist()) for name, array in answers] == [("y", [[1, 1]]), ("total", [[0]])]


def test_pytorch_bf16_round_trips(tmp_path: Path) -> None:
    source = "import torch\nclass Same(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    specs = (TensorSpec("x", "BF16", (-1, 2)),)
    runner = load(modules.python(tmp_path, source, inputs=specs, outputs=specs))
    sent = np.array([[0x3F80, 0x4000]], np.uint16)  # 1 and 2
    with mmap.mmap(-1, 4096) as memory:
        (answer,) = BatchBuilder(runner, memory, (0, 0)).run(
            [[TensorPart("x", "BF16", (1, 2), memoryview(sent.tobytes()))]]
        )
    assert (
        isinstance(answer[0], TensorPart)
        and answer[0].datatype == "BF16"
        and bytes(answer[0].data or b"") == sent.tobytes()
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x", "the module returns 1 outputs, but config.pbtxt lists 2"),
        ("return {'y': x}", "no output 'total'; the module returns y"),
        ("return x, x.double()", "output 'total' is torch.float64, but FP32 in config.pbtxt"),
        ("return x, 3", "output 'total' is a int, not a tensor"),
        ("raise KeyError('no such thing')", "'no such thing'"),
        ("raise ValueError", "ValueError"),
    ],
)
def test_pytorch_module_that_fails_its_warmup_raises(tmp_path: Path, body: str, reason: str) -> None:
    source = f"import torch\nclass Wrong(torch.nn.Module):\n    def forward(self, x):\n        {body}\n"
    with pytest.raises(ModelError, match=f"^model 'm' cannot run a batch of 8: {re.escape(reason)}$"):
        load(modules.python(tmp_path, source))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_like_it", ":1: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("x = (", ":1: SyntaxError: '(' was never closed (model.py, line 1)"),
        ("def model():\n    return 3", ": TypeError: it returns a int; return a torch.nn.Module"),
        ("", ": it builds no model; define `def model() -> torch.nn.Module`"),
        (
            "import torch\nclass A(torch.nn.Module): pass\nclass B(A): pass",
            ": it builds no model; define `def",
        ),
    ],
)
def test_pytorch_file_without_a_module_is_rejected(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(ModelError) as raised:
        load(modules.python(tmp_path, source))
    assert str(raised.value).startswith(f"{tmp_path}/model.py{reason}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        ("pytorch_libtorch", "finds no TorchScript in it: .*; save it with torch.jit.save"),
        ("pytorch_export", "cannot load what torch.export saved: .*; export it again with this version"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_pytorch_invalid_file_is_rejected(tmp_path: Path, platform: str, reason: str, content: bytes | None) -> None:
    path = tmp_path / modules.KINDS[platform]
    if content is None:
        reason = "cannot load it: No such file or directory"
    else:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{path}: PyTorch.* {reason}$") as raised:
        load(modules.written(path, platform))
    assert "\n" not in str(raised.value)


def test_pytorch_class_weights_are_read_from_the_same_folder(tmp_path: Path) -> None:
    """As Triton's Python models of PyTorch have them."""
    torch.save({"factor": torch.tensor(5.0)}, tmp_path / "model.pt")
    assert run(load(modules.python(tmp_path, modules.SOURCE)), [np.ones((1, 2), np.float32)]) == [[[5, 5]]]


class Positions(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(2, device=x.device)


def test_pytorch_traced_module_creates_tensors_on_its_device(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(torch.nn.Sequential(Positions()), torch.ones(2, 2)).save(str(path))
    y = (TensorSpec("y", "FP32", (-1, 2)),)
    module: Any = load_model(modules.written(path, "pytorch_libtorch", outputs=y), torch.device("meta"))
    assert 'value="meta"' in str(module.inlined_graph) and 'value="cpu"' not in str(module.inlined_graph)
    assert run(load(modules.written(path, "pytorch_libtorch", outputs=y)), [np.ones((1, 2), np.float32)]) == [[[1, 2]]]


class Shaped(torch.nn.Module):
    """Computes a shape by tensors, as transformers' models do when they are traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0 : x.shape[1] + 0]


def test_pytorch_traced_module_computes_shapes_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each shape would wait for the device, which a CUDA graph cannot hold."""
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(torch.nn.Sequential(Shaped()), torch.ones(2, 2)).save(str(path))
    y = (TensorSpec("y", "FP32", (-1, 2)),)
    # What is on "meta" has no values.
    monkeypatch.setattr(torch_modules, "_on_host", lambda value: torch.zeros((), dtype=value.dtype))
    module: Any = load_model(modules.written(path, "pytorch_libtorch", outputs=y), torch.device("meta"))
    assert module(torch.ones(3, 2, device="meta")).shape == (3, 2)


def test_pytorch_without_a_gpu_raises_device_error(doubles: dict[str, WorkerModel]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match=r"^PyTorch .* sees no GPU: .*; see `cotenant devices`$"):
        runners.load_runner(doubles["pytorch_module"], threads=1, fake=False, stream=0)


def test_pytorch_not_installed_names_the_extra(
    doubles: dict[str, WorkerModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cotenant.worker.runners.pytorch", None)
    with pytest.raises(
        ModelError, match=r"model\.pt: PyTorch is not installed; run `pip install 'cotenant\[torch\]'`$"
    ):
        load(doubles["pytorch_libtorch"])


def test_pytorch_is_not_imported_by_the_worker() -> None:
    program = "import sys, cotenant, cotenant.worker.main, cotenant.worker.batch; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
