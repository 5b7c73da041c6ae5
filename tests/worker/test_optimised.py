"""Test that ONNX models are kept as they were optimised, and that nothing depends on what is kept."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.onnx_models import save, worker_model
from cotenant.worker.runners import optimised
from cotenant.worker.runners.onnx import Onnx
from cotenant.worker.wire import WorkerModel

WIDTH = 600  # floats of a row: the weights have 1.4 MB


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cotenant" / "optimised"


def scaled(path: Path, factor: float, width: int = WIDTH) -> WorkerModel:
    """y = factor * x."""
    weights = numpy_helper.from_array(factor * np.eye(width, dtype=np.float32), "weights")
    node = helper.make_node("MatMul", ["x", "weights"], ["y"])
    shape: list[int | str] = ["n", width]
    rows = (int(TensorProto.FLOAT), shape)
    save(path, [node], {"x": rows}, {"y": rows}, [weights])
    return worker_model("scaled", path, 4, "FP32", (-1, width))


def answer(model: WorkerModel) -> float:
    """Return what a fresh runner makes of ones."""
    runner = Onnx(model, threads=1)
    (_, output), *_ = runner.run({"x": np.ones((2, model.inputs[0].shape[1]), np.float32)})
    runner.close()
    assert np.ptp(output) == 0
    return float(output[0, 0])


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*")) if cache.exists() else []


def test_a_model_is_optimised_once(tmp_path: Path, cache: Path) -> None:
    model = scaled(tmp_path / "model.onnx", 2.0)
    assert answer(model) == 2.0
    (file,) = kept(cache)
    written = file.stat().st_ino, file.stat().st_ctime_ns
    content = file.read_bytes()
    os.utime(file, (0, 0))
    assert answer(model) == 2.0
    assert kept(cache) == [file]
    assert (file.stat().st_ino, file.read_bytes()) == (written[0], content)
    assert file.stat().st_mtime > 0  # it was used


def test_what_is_kept_is_what_runs(tmp_path: Path, cache: Path) -> None:
    model, other = scaled(tmp_path / "model.onnx", 2.0), scaled(tmp_path / "other.onnx", 3.0)
    answer(model)
    (file,) = kept(cache)
    answer(other)
    (another,) = set(kept(cache)) - {file}
    another.replace(file)
    assert answer(model) == 3.0


def test_a_model_that_was_written_again_is_optimised_again(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.onnx"
    assert answer(scaled(path, 2.0)) == 2.0
    before = path.stat()
    model = scaled(path, 5.0)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert answer(model) == 5.0
    assert len(kept(cache)) == 2


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\0" * 4096])
def test_a_broken_file_is_replaced(tmp_path: Path, cache: Path, content: bytes) -> None:
    model = scaled(tmp_path / "model.onnx", 2.0)
    answer(model)
    (file,) = kept(cache)
    whole = file.stat().st_size
    file.write_bytes(content)
    assert answer(model) == 2.0
    assert kept(cache) == [file]
    assert file.stat().st_size == whole


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, list[Path]]] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        fsync(handle)
        synced.append((os.fstat(handle).st_ino, [file for file in kept(cache) if not file.name.startswith(".")]))

    monkeypatch.setattr(os, "fsync", record)
    answer(scaled(tmp_path / "model.onnx", 2.0))
    (file,) = kept(cache)
    assert synced == [(file.stat().st_ino, [])]


def test_a_link_is_not_followed(tmp_path: Path, cache: Path) -> None:
    model, other = scaled(tmp_path / "model.onnx", 2.0), scaled(tmp_path / "other.onnx", 3.0)
    answer(model)
    (file,) = kept(cache)
    answer(other)
    (another,) = set(kept(cache)) - {file}
    file.unlink()
    file.symlink_to(another)
    assert answer(model) == 2.0
    assert not file.is_symlink()


def test_a_folder_that_cannot_be_written_does_no_harm(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert answer(scaled(tmp_path / "model.onnx", 2.0)) == 2.0


def test_small_models_are_not_kept(tmp_path: Path, cache: Path) -> None:
    assert answer(scaled(tmp_path / "model.onnx", 2.0, width=16)) == 2.0
    assert not kept(cache)


def test_models_with_data_in_other_files_are_not_kept(tmp_path: Path, cache: Path) -> None:
    import onnx

    path = tmp_path / "model.onnx"
    model = scaled(path, 2.0)
    onnx.save_model(onnx.load(str(path)), str(path), save_as_external_data=True, location="weights", size_threshold=0)
    with path.open("ab") as file:  # a field that nobody knows: large enough to be kept
        file.write(b"\xa2\x06" + b"\x80\x80\x80\x01" + b"\0" * (2 << 20))
    assert path.stat().st_size > optimised.MIN_SIZE
    assert answer(model) == 2.0
    assert not kept(cache)


def test_what_was_used_longest_ago_makes_room(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [scaled(tmp_path / f"{n}.onnx", float(n)) for n in range(1, 4)]
    answer(models[0])
    (first,) = kept(cache)
    answer(models[1])
    (second,) = set(kept(cache)) - {first}
    os.utime(first, (2, 2))
    os.utime(second, (1, 1))
    monkeypatch.setattr(optimised, "MAX_TOTAL", 2 * first.stat().st_size + 1000)
    answer(models[2])
    assert len(kept(cache)) == 2
    assert first in kept(cache) and second not in kept(cache)
    assert [answer(model) for model in models] == [1.0, 2.0, 3.0]


def test_another_runtime_or_processor_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled(tmp_path / "model.onnx", 2.0)
    path = tmp_path / "model.onnx"
    ours = optimised.kept_path(path, "1.27.0")
    assert ours == optimised.kept_path(path, "1.27.0")
    assert ours != optimised.kept_path(path, "1.28.0")
    monkeypatch.setattr(optimised, "_processor", lambda: "another")
    assert ours != optimised.kept_path(path, "1.27.0")
    assert optimised.kept_path(tmp_path / "missing.onnx", "1.27.0") is None
