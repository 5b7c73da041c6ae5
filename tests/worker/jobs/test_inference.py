from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cotenant.errors import ConfigError, ModelError
from cotenant.worker.jobs.context import JobContext
from cotenant.worker.jobs.inference import InferenceWork, infer
from cotenant.worker.wire import WorkerModel
from tests.worker.graphs import lookup, strings, total

ROWS = np.arange(26).reshape(13, 2) % 4


@pytest.fixture
def model(tmp_path: Path) -> WorkerModel:
    """y = 10 x for x below 4, two to a row, in batches of 8 at most."""
    return lookup(tmp_path / "model.onnx")


def work(folder: Path, model: WorkerModel, source: str, target: str, batch: int | None = None) -> JobContext:
    asked = InferenceWork(model=model, input=str(folder / source), output=str(folder / target))
    (folder / "checkpoint").mkdir(exist_ok=True)
    return JobContext(folder / "checkpoint", batch=batch, options=msgspec.to_builtins(asked))


def write(path: Path, rows: Any = ROWS) -> None:
    if path.suffix == ".npy":
        np.save(path, rows)
    elif path.suffix == ".npz":
        np.savez(path, x=rows)
    else:
        path.write_text("\n".join(json.dumps({"x": row.tolist()}) for row in rows) + "\n\n")


def read(path: Path) -> list[Any]:
    if path.suffix == ".jsonl":
        return [json.loads(line)["y"] for line in path.read_text().splitlines()]
    found = np.load(path)
    rows: list[Any] = (found if path.suffix == ".npy" else found["y"]).tolist()
    return rows


@pytest.mark.parametrize("source", ["in.npy", "in.npz", "in.jsonl"])
@pytest.mark.parametrize("target", ["out.npy", "out.npz", "out.jsonl"])
def test_outputs_are_complete_and_in_order(tmp_path: Path, model: WorkerModel, source: str, target: str) -> None:
    write(tmp_path / source)
    steps = list(infer(work(tmp_path, model, source, target, batch=5)))
    assert [(step.done, step.total) for step in steps] == [(1, 3), (2, 3), (3, 3)]  # type: ignore[union-attr]
    assert read(tmp_path / target) == (10.0 * ROWS).tolist()
    assert not list((tmp_path / "checkpoint").iterdir())


@pytest.mark.parametrize("target", ["out.npy", "out.npz", "out.jsonl"])
def test_attempt_goes_on_after_the_last_finished_batch(tmp_path: Path, model: WorkerModel, target: str) -> None:
    """What an attempt that crashed wrote after that batch is cut off, and its rows are run again."""
    write(tmp_path / "in.npy")
    first = infer(work(tmp_path, model, "in.npy", target, batch=4))
    next(first), next(first)
    first.close()
    assert not (tmp_path / target).exists()
    for part in (tmp_path / "checkpoint").glob("*.part"):
        with part.open("ab") as file:
            file.write(b"half a batch")
    steps = list(infer(work(tmp_path, model, "in.npy", target, batch=4)))
    assert [step.done for step in steps] == [3, 4]  # type: ignore[union-attr]
    assert read(tmp_path / target) == (10.0 * ROWS).tolist()


def test_other_input_begins_anew(tmp_path: Path, model: WorkerModel) -> None:
    write(tmp_path / "in.npy")
    first = infer(work(tmp_path, model, "in.npy", "out.npy", batch=4))
    next(first)
    first.close()
    write(tmp_path / "in.npy", ROWS[:5] * 0)
    assert len(list(infer(work(tmp_path, model, "in.npy", "out.npy", batch=4)))) == 2
    assert read(tmp_path / "out.npy") == [[0.0, 0.0]] * 5


def test_lost_part_begins_anew(tmp_path: Path, model: WorkerModel) -> None:
    write(tmp_path / "in.npy")
    first = infer(work(tmp_path, model, "in.npy", "out.npy", batch=4))
    next(first)
    first.close()
    for part in (tmp_path / "checkpoint").glob("*.part"):
        part.write_bytes(b"")
    list(infer(work(tmp_path, model, "in.npy", "out.npy", batch=4)))
    assert read(tmp_path / "out.npy") == (10.0 * ROWS).tolist()


def test_earlier_output_stays_until_the_new_one_is_complete(tmp_path: Path, model: WorkerModel) -> None:
    write(tmp_path / "in.npy")
    (tmp_path / "out.npy").write_text("earlier")
    running = infer(work(tmp_path, model, "in.npy", "out.npy", batch=4))
    next(running)
    assert (tmp_path / "out.npy").read_text() == "earlier"
    list(running)
    assert read(tmp_path / "out.npy") == (10.0 * ROWS).tolist()


def test_strings_go_from_lines_to_lines(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", np.array([["a", "ß"], ["", "d"]], object))
    list(infer(work(tmp_path, strings(tmp_path / "strings.onnx"), "in.jsonl", "out.jsonl")))
    assert read(tmp_path / "out.jsonl") == [["a", "ß"], ["", "d"]]


WRONG = [
    ("gone.npy", "out.npy", "gone.npy: there is no such file of inputs"),
    ("in.txt", "out.npy", "in.txt: inputs are read from .npy, .npz, .jsonl"),
    ("in.npy", "out.txt", "out.txt: outputs are written to .npy, .npz, .jsonl"),
    ("in.npy", "gone/out.npy", "gone; make it first"),
    ("empty.npy", "out.npy", "empty.npy: the file of inputs has no rows"),
    ("wide.npy", "out.npy", "wide.npy: a row of 'x' has the shape [3], not [2]"),
    ("floats.npy", "out.npy", "floats.npy, row 1: 'x' takes INT64, and the file has float64"),
    ("other.npz", "out.npy", "other.npz: it has no array 'x'; its arrays are a"),
    ("torn.npz", "out.npy", "torn.npz: cannot be read as .npz: "),
    ("torn.npy", "out.npy", "torn.npy: cannot be read as .npy: "),
    ("torn.jsonl", "out.npy", "torn.jsonl, line 2: no JSON: "),
    ("list.jsonl", "out.npy", "list.jsonl, line 1: give an object of inputs by name"),
    ("words.jsonl", "out.npy", "words.jsonl, line 1: 'x' takes INT64: "),
    ("lacks.jsonl", "out.npy", "lacks.jsonl, line 1: input 'x' is missing"),
]


@pytest.mark.parametrize(("source", "target", "reason"), WRONG, ids=[each[2][:40] for each in WRONG])
def test_files_that_do_not_fit_are_refused_with_place_and_reason(
    tmp_path: Path, model: WorkerModel, source: str, target: str, reason: str
) -> None:
    write(tmp_path / "in.npy")
    (tmp_path / "in.txt").touch()
    np.save(tmp_path / "empty.npy", ROWS[:0])
    np.save(tmp_path / "wide.npy", np.zeros((2, 3), int))
    np.save(tmp_path / "floats.npy", ROWS / 2)
    np.savez(tmp_path / "other.npz", a=ROWS)
    (tmp_path / "torn.npz").write_bytes(b"PK\3\4 torn")
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "torn.jsonl").write_text('{"x": [1, 2]}\n{"x": [1')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "words.jsonl").write_text('{"x": ["a", "b"]}\n')
    (tmp_path / "lacks.jsonl").write_text('{"z": [1, 2]}\n')
    with pytest.raises(ConfigError) as raised:
        list(infer(work(tmp_path, model, source, target)))
    assert reason in str(raised.value)


def test_model_whose_outputs_are_not_rows_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((4, 2), np.float32))
    model = total(tmp_path / "total.onnx")
    with pytest.raises(ModelError, match="has not one row for each of the inputs"):
        list(infer(work(tmp_path, model, "in.npy", "out.npy")))
