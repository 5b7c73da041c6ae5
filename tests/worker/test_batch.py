"""Batches through real models of ONNX Runtime, in this process."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.tensor import DTYPES, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker import runners
from cotenant.worker.batch import BatchBuilder
from cotenant.worker.runners import Runner
from cotenant.worker.runners.arrays import Array, datatype, decode_strings, encode_strings, filled_inputs
from cotenant.worker.wire import LARGE, TensorPart, WorkerModel, aligned
from tests.worker import graphs

NO_ROOM = (0, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(model: WorkerModel) -> Runner:
    return runners.load_runner(model, threads=1, fake=False)[0]


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 1 << 20)


def part(array: Array) -> TensorPart:
    data = encode_strings(array) if array.dtype == object else array.tobytes()
    return TensorPart("x", datatype(array), array.shape, memoryview(data))


def value(part: TensorPart, memory: mmap.mmap) -> Array:
    data = part.data if part.data is not None else memoryview(memory)[part.start : part.start + part.size]
    if part.datatype == "BYTES":
        return decode_strings(data, part.shape)
    return np.frombuffer(bytes(data), DTYPES[part.datatype]).reshape(part.shape)


def run(runner: Runner, arrays: list[Array], memory: mmap.mmap, room: tuple[int, int] = NO_ROOM) -> list[Any]:
    """One output of each request, or the reason why there is none."""
    answers = BatchBuilder(runner, memory, room).run([[part(array)] for array in arrays])
    return [answer if isinstance(answer, str) else value(answer[0], memory) for answer in answers]


@pytest.mark.parametrize("room", [NO_ROOM, (4096, 1 << 19)])
def test_batch_each_request_gets_its_rows(folder: Path, memory: mmap.mmap, room: tuple[int, int]) -> None:
    runner = load(graphs.identity(folder / "identity.onnx", 1000))
    rng = np.random.default_rng(0)
    arrays = [rng.random((rows, 1000), np.float32) for rows in (1, 3, 2)]
    for got, sent in zip(run(runner, arrays, memory, room), arrays, strict=True):
        np.testing.assert_array_equal(got, sent)


@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=12))
def test_batch_requests_of_many_shapes_all_get_outputs(folder: Path, shapes: list[tuple[int, int]]) -> None:
    runner = load(graphs.lookup(folder / "lookup.onnx"))
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 4, shape) for shape in shapes]
    with mmap.mmap(-1, 4096) as memory:
        for got, sent in zip(run(runner, arrays, memory), arrays, strict=True):
            np.testing.assert_array_equal(got, sent * 10)


@pytest.mark.parametrize("bad", [[0], [3], [0, 1, 6], range(7)])
def test_batch_bad_request_fails_alone(folder: Path, memory: mmap.mmap, bad: list[int]) -> None:
    runner = load(graphs.lookup(folder / "lookup.onnx"))
    arrays = [np.array([[index % 4, 9 if index in bad else 1]]) for index in range(7)]
    for index, answer in enumerate(run(runner, arrays, memory)):
        if index in bad:
            assert "idx=9 must be within the inclusive range [-4,3]" in answer
            assert "\n" not in answer and "ONNXRuntimeError" not in answer
        else:
            assert answer.tolist() == [[index % 4 * 10, 10]]


def test_batch_strings_round_trip(folder: Path, memory: mmap.mmap) -> None:
    runner = load(graphs.strings(folder / "strings.onnx"))
    arrays = [np.array([["a", ""]], object), np.array([["é\0x", "long " * 50], ["", "b"]], object)]
    assert [got.tolist() for got in run(runner, arrays, memory)] == [array.tolist() for array in arrays]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x01\0\0\0\xff\0\0\0\0", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"\x01\0\0\0a", "BYTES of shape [1, 2] end after 1 of 2 elements"),
        (b"\x09\0\0\0a", "BYTES of shape [1, 2] end after 0 of 2 elements"),
    ],
)
def test_batch_invalid_strings_are_rejected(folder: Path, memory: mmap.mmap, data: bytes, reason: str) -> None:
    runner = load(graphs.strings(folder / "strings.onnx"))
    answers = BatchBuilder(runner, memory, NO_ROOM).run([[TensorPart("x", "BYTES", (1, 2), memoryview(data))]])
    assert answers == [reason]


def test_batch_inputs_at_any_offset_of_the_arena_are_read(folder: Path, memory: mmap.mmap) -> None:
    runner = load(graphs.identity(folder / "identity.onnx", 16))
    sent = np.arange(16, dtype=np.float32).reshape(1, 16)
    memory[4099 : 4099 + 64] = sent.tobytes()
    placed = TensorPart("x", "FP32", (1, 16), None, 4099, 64)
    for requests in ([[placed]], [[placed], [part(sent)]]):
        for answer in BatchBuilder(runner, memory, NO_ROOM).run(requests):
            assert not isinstance(answer, str)
            np.testing.assert_array_equal(value(answer[0], memory), sent)


def test_batch_large_output_uses_its_block_or_travels_inline(folder: Path, memory: mmap.mmap) -> None:
    runner = load(graphs.identity(folder / "large.onnx", LARGE // 4))
    request = [part(np.ones((1, LARGE // 4), np.float32))]
    (placed,) = BatchBuilder(runner, memory, (8192, LARGE)).run([request])
    assert placed[0] == TensorPart("y", "FP32", (1, LARGE // 4), None, 8192, LARGE)
    (inside,) = BatchBuilder(runner, memory, (8192, LARGE - 1)).run([request])
    assert isinstance(inside[0], TensorPart) and inside[0].data is not None and len(inside[0].data) == LARGE


def test_batch_large_outputs_of_several_batches_are_consecutive_and_aligned(folder: Path, memory: mmap.mmap) -> None:
    width = LARGE // 4 + 1
    builder = BatchBuilder(load(graphs.identity(folder / "odd.onnx", width)), memory, (8192, 3 * LARGE))
    starts = []
    for _ in range(2):
        (answer,) = builder.run([[part(np.ones((1, width), np.float32))]])
        assert isinstance(answer[0], TensorPart) and answer[0].data is None
        starts.append(answer[0].start)
    assert starts == [8192, 8192 + aligned(4 * width)]


def test_batch_output_without_rows_runs_requests_one_by_one(folder: Path, memory: mmap.mmap) -> None:
    runner = load(graphs.total(folder / "total.onnx"))
    assert run(runner, [np.full((1, 2), n, np.float32) for n in (1, 2, 3)], memory) == [2, 4, 6]


def test_batch_model_without_batch_dimension_runs_each_request(folder: Path, memory: mmap.mmap) -> None:
    model = WorkerModel(
        name="t",
        path=graphs.total(folder / "total.onnx").path,
        batched=False,
        inputs=(TensorSpec("x", "FP32", (3, 2)),),
    )
    assert run(load(model), [np.ones((3, 2), np.float32), np.ones((3, 2), np.float32)], memory) == [6, 6]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no ONNX model: it is empty"),
        (b"no model", "no ONNX model: a field of no known type"),
        (b"\x08\x08", "ONNX Runtime cannot load it: "),
        (None, "cannot read it: No such file or directory"),
    ],
)
def test_load_runner_of_an_invalid_model_raises(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.onnx: {reason}") as raised:
        load(WorkerModel(name="m", path=str(path), inputs=()))
    assert "\n" not in str(raised.value)


def test_load_runner_of_a_model_that_fails_its_warmup_raises(folder: Path) -> None:
    model = graphs.identity(folder / "identity.onnx", 16)
    wrong = WorkerModel(name="m", path=model.path, max_batch=4, inputs=(TensorSpec("x", "FP32", (-1, 7)),))
    with pytest.raises(ModelError, match=r"^model 'm' cannot run a batch of 4: Got invalid dimensions for input: x"):
        load(wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_batches_of_a_worker_that_is_ready_need_no_memory_that_the_warm_up_has_not_touched(folder: Path) -> None:
    """A worker that takes over serves its first batches as fast as those after."""
    model = graphs.convolutions(folder / "convolutions.onnx", layers=2)  # 16 MiB of activations
    runner = load(model)
    inputs = filled_inputs(model, model.max_batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        runner.run(inputs)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500


def test_fake_runner_repeats_matching_inputs_and_fills_the_rest(memory: mmap.mmap) -> None:
    inputs = (TensorSpec("x", "FP32", (-1, 2)),)
    outputs = (TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "INT64", (-1, -1, 3)))
    runner, _ = runners.load_runner(
        WorkerModel(name="f", inputs=inputs, outputs=outputs, latencies=(0.5,)), threads=1, fake=True
    )
    (answer,) = BatchBuilder(runner, memory, NO_ROOM).run([[part(np.array([[1, 2]], np.float32))]])
    y, z = (value(it, memory) for it in answer if not isinstance(it, str))
    assert (y.tolist(), z.tolist()) == ([[1, 2]], [[[0, 0, 0]]])
    assert runner.minimum_seconds(1) == 0.5


def test_fake_runner_without_latencies_is_rejected() -> None:
    model = WorkerModel(name="f", max_batch=3, inputs=(), latencies=(0.1, 0.2))
    with pytest.raises(
        ModelError, match=r"^model 'f' has latencies for 2 rows, and 3 as its largest batch; profile it up to there$"
    ):
        runners.load_runner(model, threads=1, fake=True)


def test_onnx_runner_on_a_gpu_needs_a_gpu_build(folder: Path) -> None:
    model = graphs.identity(folder / "identity.onnx", 16)
    reason = "runs nothing on a GPU; install onnxruntime-gpu in its place, or serve the model as TorchScript or torch"
    with pytest.raises(ModelError, match=rf"identity\.onnx: ONNX Runtime \S+ here {reason}.export$"):
        runners.load_runner(model, threads=1, fake=False, stream=0)
