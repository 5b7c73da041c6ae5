"""Small ONNX models that tests run for real, besides those of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.onnx_models import Dims, save, worker_model
from benchmarks.onnx_models import convolutions as convolutions
from benchmarks.onnx_models import identity as identity
from benchmarks.onnx_models import mean as mean
from cotenant.worker.wire import WorkerModel


def strings(path: Path) -> WorkerModel:
    """y = x, two strings a row."""
    node = helper.make_node("Identity", ["x"], ["y"])
    save(path, [node], {"x": (TensorProto.STRING, ["n", 2])}, {"y": (TensorProto.STRING, ["n", 2])})
    return worker_model("strings", path, 4, "BYTES", (-1, 2))


def lookup(path: Path) -> WorkerModel:
    """y = table[x]: fails for an index of 4 or more."""
    table = numpy_helper.from_array(np.arange(4, dtype=np.float32) * 10, "table")
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    shape: Dims = ["n", "k"]
    save(path, [node], {"x": (TensorProto.INT64, shape)}, {"y": (TensorProto.FLOAT, shape)}, [table])
    return worker_model("lookup", path, 8, "INT64", (-1, 2))


def total(path: Path) -> WorkerModel:
    """y = the sum of all of x: its output has no row for each row of the input."""
    node = helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)
    save(path, [node], {"x": (TensorProto.FLOAT, ["n", 2])}, {"y": (TensorProto.FLOAT, [])})
    return worker_model("total", path, 8, "FP32", (-1, 2))


def repeat(path: Path, size: int) -> WorkerModel:
    """y = the mean of `size` bytes of repetitions of each row of x."""
    times = numpy_helper.from_array(np.array([1, size // 64]), "times")
    nodes = [
        helper.make_node("Tile", ["x", "times"], ["tiled"]),
        helper.make_node("ReduceMean", ["tiled"], ["y"], axes=[1]),
    ]
    save(path, nodes, {"x": (TensorProto.FLOAT, ["n", 16])}, {"y": (TensorProto.FLOAT, ["n", 1])}, [times])
    return worker_model("repeat", path, 8, "FP32", (-1, 16))


def bright(path: Path, width: int = 16) -> None:
    """y = those rows of x whose mean is above 0.5: as many as there are."""
    half = numpy_helper.from_array(np.array(0.5, dtype=np.float32), "half")
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["means"], axes=[1], keepdims=0),
        helper.make_node("Greater", ["means", "half"], ["above"]),
        helper.make_node("Compress", ["x", "above"], ["y"], axis=0),
    ]
    save(path, nodes, {"x": (TensorProto.FLOAT, [6, width])}, {"y": (TensorProto.FLOAT, ["m", width])}, [half])


def sum_of_two(path: Path, width: int = 16) -> None:
    """total = left + right, rows of `width` floats."""
    shape: Dims = ["n", width]
    node = helper.make_node("Add", ["left", "right"], ["total"])
    floats = TensorProto.FLOAT, shape
    save(path, [node], {"left": floats, "right": floats}, {"total": floats})
