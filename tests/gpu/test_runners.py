"""Models of PyTorch on a stream of the first GPU: the answers of the processor, graphs, memory, and errors."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cotenant import zoo
from cotenant.core.tensor import TensorSpec
from cotenant.errors import ModelError
from cotenant.worker import repository, runners
from cotenant.worker.arena import KEPT
from cotenant.worker.batch import BatchBuilder
from cotenant.worker.runners import Runner
from cotenant.worker.runners.arrays import Array
from cotenant.worker.wire import TensorPart, WorkerModel

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]

STREAM = 0  # of the runner's own
ROWS = 4


def model(root: Path, name: str, **changes: object) -> tuple[WorkerModel, dict[str, Array]]:
    """Of the zoo, and so many rows of input."""
    zoo.build_models(root, [name], torch=True)
    entry = repository.find_model(root, name)
    info = repository.describe(entry)
    inputs = repository.sample_inputs(entry, info, ROWS, np.random.default_rng(0))
    loadable = msgspec.structs.replace(repository.worker_model(entry, info), **{"max_batch": ROWS, **changes})
    return loadable, {tensor.name: tensor.array() for tensor in inputs}


def load(it: WorkerModel, stream: int | None = STREAM) -> Runner:
    return runners.load_runner(it, threads=4, fake=False, stream=stream)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", ["lenet", "resnet50", "ssd_mobilenet", "bert", "whisper", "wav2vec2"])
def test_runner_outputs_equal_those_of_the_cpu(root: Path, name: str, figure: Callable[..., None]) -> None:
    """The last two make tensors as they run, on the processor where they were traced."""
    it, inputs = model(root, name)
    plain = {output: array.copy() for output, array in load(it, None).run(inputs)}
    begun = time.perf_counter()
    card = load(it)
    loaded = time.perf_counter() - begun
    answers = dict(card.run(inputs))
    errors = {
        output: float(np.abs(answers[output] - plain[output]).max() / np.abs(plain[output]).max()) for output in plain
    }
    figure(model=name, load_s=loaded, device_ms=1e3 * card.device, memory_mib=card.memory >> 20, errors=errors)
    assert max(errors.values()) < 2e-2  # convolutions may use TF32
    assert card.device > 0 and card.memory >= Path(it.path).stat().st_size // 2
    card.close()


@pytest.mark.parametrize("name", zoo.GPULET)
def test_runner_cuda_graphs_give_equal_outputs_faster(root: Path, name: str, figure: Callable[..., None]) -> None:
    """Of a whole batch, and of one that is padded."""
    it, inputs = model(root, name)
    assert it.graphs and not it.must_capture
    taken = {}
    answers = {}
    for graphs in ((), ((ROWS, 3),)):
        begun = time.perf_counter()
        card = load(msgspec.structs.replace(it, graphs=graphs, must_capture=True))
        loaded = time.perf_counter() - begun
        seconds = []
        for _ in range(50):
            begun = time.perf_counter()
            card.run(inputs)
            seconds.append(time.perf_counter() - begun)
        taken[bool(graphs)] = {"load_s": loaded, "ms": 1e3 * float(np.median(seconds)), "memory_mib": card.memory >> 20}
        answers[bool(graphs)] = [
            array.copy()
            for rows in (ROWS, ROWS - 1)
            for _, array in card.run({name: array[:rows] for name, array in inputs.items()})
        ]
        card.close()
    figure(model=name, plain=taken[False], captured=taken[True])
    for plain, captured in zip(answers[False], answers[True], strict=True):
        assert plain.shape == captured.shape
        np.testing.assert_allclose(captured, plain, atol=1e-2 * np.abs(plain).max())
    assert taken[True]["ms"] < 1.1 * taken[False]["ms"]


def test_runner_model_that_cannot_be_captured_runs_without_graphs(root: Path, tmp_path: Path) -> None:
    """And the next one is captured."""
    path = tmp_path / "model.py"
    path.write_text("""
import torch
class Looks(torch.nn.Module):
    def forward(self, x):
        return x * (1 if x.sum().item() > 0 else 2)
""")
    spec = (TensorSpec("x", "FP32", (-1, 2)),)
    looks = WorkerModel(
        name="m", path=str(path), platform="pytorch_module", max_batch=8, inputs=spec, outputs=spec, graphs=((8, 1),)
    )
    with pytest.raises(ModelError, match="a batch of 8 cannot be captured as a CUDA graph"):
        load(msgspec.structs.replace(looks, must_capture=True))
    runner = load(looks)
    for value, factor in ((1, 1), (-1, 2)):
        ((_, answer),) = runner.run({"x": np.full((3, 2), value, np.float32)})
        assert answer.tolist() == [[value * factor] * 2] * 3
    it, inputs = model(root, "mobilenet_v2")
    captured, plain = load(it), load(msgspec.structs.replace(it, graphs=()))
    for (_, array), (_, other) in zip(captured.run(inputs), plain.run(inputs), strict=True):
        np.testing.assert_allclose(array, other, atol=1e-2 * np.abs(other).max())
    for lane in (captured, plain, runner):
        lane.close()
    torch.cuda.empty_cache()  # aborted the process while the allocator took a capture to be under way
    torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("side", [112, 224, 448])  # 147 KiB, 588 KiB and 2.3 MiB a row
def test_runner_reads_large_inputs_where_they_are(
    tmp_path: Path, side: int, rows: int, figure: Callable[..., None]
) -> None:
    """Beyond the part of the arena whose pages stay, the processor joins them first."""
    path = tmp_path / "model.py"
    path.write_text("""
import torch
class Sums(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=(1, 2, 3))
""")
    spec = TensorSpec("x", "FP32", (-1, 3, side, side)), TensorSpec("y", "FP32", (-1,))
    it = WorkerModel(
        name="m", path=str(path), platform="pytorch_module", max_batch=rows, inputs=spec[:1], outputs=spec[1:]
    )
    data = np.random.default_rng(0).random((rows, 3, side, side), np.float32)
    size, taken, sums = data[0].nbytes, {}, {}
    memory = mmap.mmap(-1, KEPT + rows * size)
    card = runners.load_runner(it, threads=4, fake=False, stream=STREAM, memory=memory)[0]
    for name, start in (("read", 0), ("joined", KEPT)):
        memory[start : start + rows * size] = data.tobytes()
        batch = [[TensorPart("x", "FP32", (1, 3, side, side), None, start + row * size, size)] for row in range(rows)]
        seconds = []
        for _ in range(30):
            begun = time.perf_counter()
            answers = BatchBuilder(card, memory, (0, 0)).run(batch)
            seconds.append(time.perf_counter() - begun)
        taken[name] = 1e3 * float(np.median(seconds))
        sums[name] = np.array([np.frombuffer(answer[0].data or b"", np.float32)[0] for answer in answers])  # type: ignore[union-attr]
    figure(kib=size >> 10, rows=rows, ms=taken)
    np.testing.assert_allclose(sums["read"], data.sum(axis=(1, 2, 3)), rtol=1e-4)
    np.testing.assert_array_equal(sums["read"], sums["joined"])
    card.close()
    _forget(memory)


def _forget(memory: mmap.mmap) -> None:
    """Have the driver let go of memory that a worker would keep until it ends: other tests get its addresses."""
    from cuda.bindings import driver

    driver.cuMemHostUnregister(np.frombuffer(memory, np.uint8).ctypes.data)


def test_runner_second_lane_adds_no_weights(root: Path, figure: Callable[..., None]) -> None:
    """Each has a workspace of cuBLAS, which stays: 32 MiB on Hopper."""
    it, _ = model(root, "vgg16")
    weights = Path(it.path).stat().st_size  # 528 MiB
    first = load(it)
    before = torch.cuda.memory_allocated()
    lanes = [load(it) for _ in range(3)]
    added = torch.cuda.memory_allocated() - before
    assert added < weights // 2
    for lane in (first, *lanes):
        lane.close()
    after = torch.cuda.memory_allocated()
    figure(weights_mib=weights >> 20, added_mib=added >> 20, left_mib=after >> 20)
    assert after < before - weights // 2


def test_runner_memory_after_another_model_includes_its_weights(root: Path, figure: Callable[..., None]) -> None:
    """What the other leaves in PyTorch's cache, it would use."""
    stream = torch.cuda.Stream()
    it, _ = model(root, "resnet50")
    alone = load(it, stream.cuda_stream)
    alone.close()
    other = load(model(root, "vgg16")[0], stream.cuda_stream)
    after = load(it, stream.cuda_stream)
    figure(alone_mib=alone.memory >> 20, after_mib=after.memory >> 20)
    assert after.memory > Path(it.path).stat().st_size  # weights alone
    for lane in (other, after):
        lane.close()


def test_runner_training_step_reduces_the_loss(root: Path) -> None:
    it, inputs = model(root, "albert_train")
    card = load(it)
    losses = [card.run(inputs)[0][1].mean() for _ in range(8)]
    assert losses[-1] < losses[0]
    card.close()


def test_runner_out_of_memory_fails_one_request(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("""
import torch
class Greedy(torch.nn.Module):
    def forward(self, x):
        if (x == 7).any():
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return x
""")
    spec = (TensorSpec("x", "FP32", (-1, 2)),)
    card = load(
        WorkerModel(name="m", path=str(path), platform="pytorch_module", max_batch=8, inputs=spec, outputs=spec)
    )
    requests = [
        [TensorPart("x", "FP32", (1, 2), memoryview(np.full((1, 2), n, np.float32).tobytes()))] for n in (1, 7, 3)
    ]
    with mmap.mmap(-1, 4096) as memory:
        for answer, spoilt in zip(BatchBuilder(card, memory, (0, 0)).run(requests), (False, True, False), strict=True):
            assert isinstance(answer, str) == spoilt
            if isinstance(answer, str):
                assert answer.startswith("no device memory for this batch: CUDA out of memory.")


def test_runner_illegal_address_ends_the_worker(tmp_path: Path) -> None:
    """In a process of its own, since its context is lost."""
    path = tmp_path / "model.py"
    path.write_text("""
import torch
class Wild(torch.nn.Module):
    def forward(self, x):
        return torch.arange(4.0, device=x.device)[x.long() * 10**6]
""")
    program = f"""
import numpy as np
from cotenant.core.tensor import TensorSpec
from cotenant.errors import ModelError
from cotenant.errors import DeviceError
from cotenant.worker import runners
from cotenant.worker.main import end_broken
from cotenant.worker.wire import WorkerModel
spec = (TensorSpec("x", "FP32", (-1, 2)),)
model = WorkerModel(name="m", path={str(path)!r}, platform="pytorch_module", inputs=spec, outputs=spec)
try:
    runners.load_runner(model, threads=1, fake=False, stream=0)
except DeviceError as error:
    end_broken(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy())
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("model 'm' corrupted its CUDA context: CUDA error: ")
