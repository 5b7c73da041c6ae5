"""Write small ONNX models for benchmarks and tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cotenant.core.tensor import TensorSpec
from cotenant.worker.wire import WorkerModel

Dims = list[int | str]


def identity(path: Path, width: int = 16, *, max_batch: int = 8, name: str = "identity") -> WorkerModel:
    """Write y = x, with rows of `width` floats."""
    node = helper.make_node("Identity", ["x"], ["y"])
    save(path, [node], {"x": (TensorProto.FLOAT, ["n", width])}, {"y": (TensorProto.FLOAT, ["n", width])})
    return worker_model(name, path, max_batch, "FP32", (-1, width))


def mean(path: Path, width: int = 16) -> WorkerModel:
    """Write y = the mean of each row of `width` floats: large input, small output."""
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[1])
    save(path, [node], {"x": (TensorProto.FLOAT, ["n", width])}, {"y": (TensorProto.FLOAT, ["n", 1])})
    return worker_model("mean", path, 8, "FP32", (-1, width))


def convolutions(path: Path, *, max_batch: int = 32, layers: int = 7, size: int = 32) -> WorkerModel:
    """Write a network of 3x3 convolutions.

    About 270 million operations per image with 7 layers at 32 pixels.
    """
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
    save(path, nodes, {"x": (TensorProto.FLOAT, picture)}, {"y": (TensorProto.FLOAT, ["n", 64])}, weights)
    return worker_model("convolutions", path, max_batch, "FP32", (-1, 3, size, size))


def worker_model(name: str, path: Path, max_batch: int, datatype: str, shape: tuple[int, ...]) -> WorkerModel:
    """Describe a model with one input `x` to a worker."""
    return WorkerModel(name=name, path=str(path), max_batch=max_batch, inputs=(TensorSpec("x", datatype, shape),))


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, Dims]],
    outputs: dict[str, tuple[int, Dims]],
    weights: list[onnx.TensorProto] | None = None,
) -> None:
    """Write a graph to a file. inputs, outputs: element type and shape by name."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        weights or [],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
