"""Small ONNX models that tests and benchmarks run for real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cotenant.core.tensor import TensorSpec
from cotenant.worker.wire import WorkerModel

Dims = list[int | str]


def identity(path: Path, width: int = 16, *, max_batch: int = 8, name: str = "identity") -> WorkerModel:
    """y = x, rows of `width` floats."""
    node = helper.make_node("Identity", ["x"], ["y"])
    _save(path, [node], {"x": (TensorProto.FLOAT, ["n", width])}, {"y": (TensorProto.FLOAT, ["n", width])})
    return _model(name, path, max_batch, "FP32", (-1, width))


def strings(path: Path) -> WorkerModel:
    """y = x, two strings a row."""
    node = helper.make_node("Identity", ["x"], ["y"])
    _save(path, [node], {"x": (TensorProto.STRING, ["n", 2])}, {"y": (TensorProto.STRING, ["n", 2])})
    return _model("strings", path, 4, "BYTES", (-1, 2))


def lookup(path: Path) -> WorkerModel:
    """y = table[x]: fails for an index of 4 or more."""
    table = numpy_helper.from_array(np.arange(4, dtype=np.float32) * 10, "table")
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    shape: Dims = ["n", "k"]
    _save(path, [node], {"x": (TensorProto.INT64, shape)}, {"y": (TensorProto.FLOAT, shape)}, [table])
    return _model("lookup", path, 8, "INT64", (-1, 2))


def total(path: Path) -> WorkerModel:
    """y = the sum of all of x: its output has no row for each row of the input."""
    node = helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)
    _save(path, [node], {"x": (TensorProto.FLOAT, ["n", 2])}, {"y": (TensorProto.FLOAT, [])})
    return _model("total", path, 8, "FP32", (-1, 2))


def mean(path: Path, width: int = 16) -> WorkerModel:
    """y = the mean of each row of `width` floats: much in, little out."""
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[1])
    _save(path, [node], {"x": (TensorProto.FLOAT, ["n", width])}, {"y": (TensorProto.FLOAT, ["n", 1])})
    return _model("mean", path, 8, "FP32", (-1, width))


def bright(path: Path, width: int = 16) -> None:
    """y = those rows of x whose mean is above 0.5: as many as there are."""
    half = numpy_helper.from_array(np.array(0.5, dtype=np.float32), "half")
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["means"], axes=[1], keepdims=0),
        helper.make_node("Greater", ["means", "half"], ["above"]),
        helper.make_node("Compress", ["x", "above"], ["y"], axis=0),
    ]
    _save(path, nodes, {"x": (TensorProto.FLOAT, [6, width])}, {"y": (TensorProto.FLOAT, ["m", width])}, [half])


def sum_of_two(path: Path, width: int = 16) -> None:
    """total = left + right, rows of `width` floats."""
    shape: Dims = ["n", width]
    node = helper.make_node("Add", ["left", "right"], ["total"])
    floats = TensorProto.FLOAT, shape
    _save(path, [node], {"left": floats, "right": floats}, {"total": floats})


def convolutions(path: Path, *, max_batch: int = 32, layers: int = 7, size: int = 32) -> WorkerModel:
    """A network of 3x3 convolutions, about 270 million operations a picture with 7 layers of 32 pixels."""
    rng = np.random.default_rng(0)
    channels, value = 3, "x"
    nodes, weights = [], []
    for layer in range(layers):
        weight = rng.normal(size=(64, channels, 3, 3)) / np.sqrt(9 * channels)
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w{layer}"))
        nodes.append(helper.make_node("Conv", [value, f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        channels, value = 64, f"r{layer}"
    nodes.append(helper.make_node("GlobalAveragePool", [value], ["p"]))
    nodes.append(helper.make_node("Flatten", ["p"], ["y"]))
    picture: Dims = ["n", 3, size, size]
    _save(path, nodes, {"x": (TensorProto.FLOAT, picture)}, {"y": (TensorProto.FLOAT, ["n", 64])}, weights)
    return _model("convolutions", path, max_batch, "FP32", (-1, 3, size, size))


def _model(name: str, path: Path, max_batch: int, datatype: str, shape: tuple[int, ...]) -> WorkerModel:
    return WorkerModel(name=name, path=str(path), max_batch=max_batch, inputs=(TensorSpec("x", datatype, shape),))


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, Dims]],
    outputs: dict[str, tuple[int, Dims]],
    weights: list[onnx.TensorProto] | None = None,
) -> None:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        weights or [],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
