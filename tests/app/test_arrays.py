from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cotenant.app.arrays import to_arrays, to_tensors
from cotenant.core.tensor import DTYPES, ModelInfo, TensorSpec
from cotenant.errors import InvalidError


def model(datatype: str) -> ModelInfo:
    spec = TensorSpec("x", datatype, (-1, 3))
    return ModelInfo(name="m", version="1", platform="onnxruntime_onnx", inputs=(spec,), outputs=(), max_batch_size=8)


@pytest.mark.parametrize("datatype", DTYPES)
def test_to_tensors_every_datatype_round_trips(datatype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(DTYPES[datatype])
    (tensor,) = to_tensors(model(datatype), {"x": array})
    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    np.testing.assert_array_equal(to_arrays([tensor])["x"], array)


def test_to_tensors_strings_become_bytes() -> None:
    (tensor,) = to_tensors(model("BYTES"), {"x": np.array([["a", b"\0", "ü"]], dtype=object)})
    assert tensor.shape == (1, 3)
    assert to_arrays([tensor])["x"].tolist() == [[b"a", b"\0", "ü".encode()]]


def test_to_tensors_lists_take_the_datatype_of_the_input() -> None:
    (tensor,) = to_tensors(model("FP32"), {"x": [[1, 2, 3]]})
    assert tensor.array().dtype == np.float32


def test_to_tensors_non_contiguous_array_is_read_in_row_order() -> None:
    array = np.arange(6, dtype=np.int64).reshape(3, 2).T
    (tensor,) = to_tensors(model("INT64"), {"x": array})
    np.testing.assert_array_equal(tensor.array(), array)


def test_to_arrays_output_is_a_writable_copy() -> None:
    data = bytearray(np.ones(3, np.float32).tobytes())
    (tensor,) = to_tensors(model("FP32"), {"x": np.frombuffer(data, np.float32)})
    array = to_arrays([tensor])["x"]
    assert array.flags.owndata and array.flags.writeable


@pytest.mark.parametrize(
    ("datatype", "inputs", "words"),
    [
        ("FP32", {"y": [1.0]}, r"^model 'm' has no input 'y'; it takes x$"),
        ("FP32", {"x": np.zeros((1, 3))}, r"^input 'x' is float64, but the model takes float32; convert it$"),
        ("INT8", {"x": [[300, 0, 0]]}, r"^input 'x' cannot be read as int8: "),
        ("FP32", {"x": [[1, 2], [3]]}, r"^input 'x' cannot be read as float32: "),
        ("FP32", {"x": [["a"]]}, r"^input 'x' cannot be read as float32: "),
    ],
)
def test_to_tensors_values_of_the_wrong_type_are_rejected(datatype: str, inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        to_tensors(model(datatype), inputs)
