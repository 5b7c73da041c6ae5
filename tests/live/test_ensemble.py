"""The tensors of an ensemble's request, where a step runs for each row of what another found."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.core.application import MAX_REQUESTS
from cotenant.core.tensor import ModelInfo, Tensor, TensorSpec
from cotenant.errors import FailedError
from cotenant.live.ensemble import EnsembleTensors
from cotenant.worker.ensemble import Ensemble, EnsembleStage

INFO = ModelInfo(
    name="street",
    version="1",
    platform="ensemble",
    inputs=(TensorSpec("picture", "FP32", (2,)),),
    outputs=(TensorSpec("names", "INT64", (-1, -1)),),
    max_batch_size=0,
)
STREET = Ensemble(
    INFO,
    (
        EnsembleStage("find", "find", {"x": "picture"}, {"boxes": "boxes", "marks": "marks"}, ()),
        EnsembleStage("name", "name", {"box": "boxes", "mark": "marks"}, {"y": "names"}, ("find",), each=True),
    ),
)


def tensor(name: str, values: object, datatype: str = "FP32") -> Tensor:
    array = np.array(values, dtype={"FP32": np.float32, "INT64": np.int64}[datatype])
    return Tensor(name, datatype, array.shape, array.tobytes())


def found(rows: int, marks: int) -> tuple[Tensor, ...]:
    return tensor("boxes", np.arange(rows * 3).reshape(rows, 3)), tensor("marks", np.arange(marks))


def test_step_for_each_row_concatenates_outputs_in_order() -> None:
    board = EnsembleTensors(STREET, [tensor("picture", [1, 2])])
    assert board.made(0, found(2, 2)) == {1: 2}
    board.take(0, 0, found(2, 2))
    box, mark = board.inputs(1, 1)
    assert (box.name, box.shape, mark.shape) == ("box", (1, 3), (1,))
    np.testing.assert_array_equal(box.array(), [[3, 4, 5]])
    np.testing.assert_array_equal(mark.array(), [1])
    board.take(1, 1, [tensor("y", [[7, 8]], "INT64")])
    board.take(1, 0, [tensor("y", [[5, 6]], "INT64")])
    np.testing.assert_array_equal(board.outputs()[0].array(), [[5, 6], [7, 8]])


def test_step_for_each_row_of_none_has_no_rows() -> None:
    board = EnsembleTensors(STREET, [tensor("picture", [1, 2])])
    assert board.made(0, found(0, 0)) == {1: 0}
    board.take(0, 0, found(0, 0))
    assert board.outputs()[0] == Tensor("names", "INT64", (0, 0), b"")


@pytest.mark.parametrize(
    ("rows", "marks", "message"),
    [
        (2, 3, "step 'name' runs for each row, and there are 2 of 'boxes', 3 of 'marks'"),
        (
            MAX_REQUESTS + 1,
            MAX_REQUESTS + 1,
            f"step 'name' runs for each row, {MAX_REQUESTS} at most; there are {MAX_REQUESTS + 1}",
        ),
    ],
)
def test_step_for_each_row_of_outputs_that_disagree_fails(rows: int, marks: int, message: str) -> None:
    board = EnsembleTensors(STREET, [tensor("picture", [1, 2])])
    with pytest.raises(FailedError, match=f"^{message}$"):
        board.made(0, found(rows, marks))


def test_rows_of_different_shapes_fail() -> None:
    board = EnsembleTensors(STREET, [tensor("picture", [1, 2])])
    board.take(0, 0, found(2, 2))
    board.take(1, 0, [tensor("y", [[5, 6]], "INT64")])
    board.take(1, 1, [tensor("y", [[5]], "INT64")])
    with pytest.raises(FailedError, match="rows of 'names' have different shapes"):
        board.outputs()
