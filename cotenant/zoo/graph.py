"""Construct ONNX graphs with the layers of the papers. Weights are random from a seed unless given.

Batch normalisation is folded into the convolution before it, as every runtime does for inference: a `conv` carries a
bias instead of a scale and a shift. Weights are He et al.'s (2015, section 2.2): variance 2 / fan-in, which keeps
activations level; `gain` scales them down where a residual sum would otherwise grow with depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from cotenant.worker.repository import write_config

# What ONNX Runtime 1.22, the oldest that is supported, can load.
OPSETS = {"": 20, "ai.onnx.ml": 3}
IR_VERSION = 10

MAX_BATCH = 32

_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64}


class Graph:
    """Build a graph layer by layer; layers take and return names of values. `shapes` omits the batch dimension.

    labels: class names, by output. notes: parameters for the model's config.pbtxt.
    """

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self.name = name
        self.rng = rng
        self.labels: dict[str, Sequence[str]] = {}
        self.notes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._inputs: list[tuple[str, str, tuple[int, ...]]] = []
        self._outputs: list[tuple[str, str, tuple[int, ...]]] = []
        self._warmup: dict[str, tuple[int, ...]] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    @property
    def parameters(self) -> int:
        """Return the number of trainable weights."""
        return sum(
            math.prod(weight.dims) for weight in self._weights if weight.dims and weight.data_type == TensorProto.FLOAT
        )

    # Edges

    def input(self, name: str, datatype: str, shape: Sequence[int], sample: Sequence[int] = ()) -> str:
        """Add an input. sample: the shape to warm up with if a dimension of `shape` is -1."""
        self._inputs.append((name, datatype, tuple(shape)))
        self.shapes[name] = tuple(shape)
        if sample:
            self._warmup[name] = tuple(sample)
        return name

    def output(self, value: str, name: str, datatype: str, shape: Sequence[int]) -> None:
        self._outputs.append((name, datatype, tuple(shape)))
        self.op("Identity", value, outputs=(name,))

    def weight(self, value: NDArray[Any]) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def op(self, kind: str, *values: str, outputs: Sequence[str] = (), domain: str = "", **attributes: Any) -> str:
        """Add any operator; return its first output. outputs: names, if there is more than one."""
        names = list(outputs) or [f"v{len(self._nodes)}"]
        self._nodes.append(helper.make_node(kind, values, names, domain=domain, **attributes))
        return names[0]

    # Layers on images: shapes are (channels, height, width)

    def conv(
        self, value: str, channels: int, kernel: int, stride: int = 1, *, pad: int | None = None, groups: int = 1,
        act: str = "Relu", gain: float = 1.0, bias: bool = True,
    ) -> str:  # fmt: skip
        """Add a convolution with folded batch normalisation and an activation: "Relu", "Relu6", "Tanh" or none.

        pad: (kernel - 1) / 2 if not given, so that stride 1 keeps the size. bias: False without normalisation.
        """
        depth, height, width = self.shapes[value]
        pad = (kernel - 1) // 2 if pad is None else pad
        shape = (channels, depth // groups, kernel, kernel)
        biases = [self.weight(np.zeros(channels, np.float32))] if bias else []
        out = self.op(
            "Conv", value, self._he(shape, gain), *biases,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=groups,
        )  # fmt: skip
        size = ((side + 2 * pad - kernel) // stride + 1 for side in (height, width))
        return self.activate(self._shaped(out, (channels, *size)), act)

    def activate(self, value: str, act: str) -> str:
        if not act:
            return value
        if act == "Relu6":
            return self._shaped(self.op("Clip", value, self._constant(0), self._constant(6)), self.shapes[value])
        return self._shaped(self.op(act, value), self.shapes[value])

    def pool(self, value: str, kind: str, kernel: int, stride: int, *, pad: int = 0, ceil: bool = False) -> str:
        """Add pooling. kind: "Max" or "Average"."""
        depth, *sides = self.shapes[value]
        rounded = math.ceil if ceil else math.floor
        out = self.op(
            f"{kind}Pool", value, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, ceil_mode=int(ceil)
        )
        return self._shaped(out, (depth, *(rounded((side + 2 * pad - kernel) / stride) + 1 for side in sides)))

    def norm(self, value: str) -> str:
        """Add batch normalisation that cannot be folded into a convolution."""
        shape = (self.shapes[value][0], 1, 1)
        scaled = self.op("Mul", value, self.weight(np.ones(shape, np.float32)))
        return self._shaped(self.op("Add", scaled, self.weight(np.zeros(shape, np.float32))), self.shapes[value])

    def lrn(self, value: str) -> str:
        """Add local response normalisation over 5 channels, with the constants of Krizhevsky et al. (2012, section
        3.3).

        Written out, since ONNX Runtime's LRN takes a power of each element, one by one: it took most of GoogLeNet's
        time. t^-0.75 = 1 / (√t √√t).
        """
        shape = self.shapes[value]
        rows = self.op("Reshape", self.op("Mul", value, value), self.weight(np.array([0, 1, shape[0], -1])))
        mean = self.op("AveragePool", rows, kernel_shape=[5, 1], pads=[2, 0, 2, 0], count_include_pad=1)
        scaled = self.op("Mul", self.op("Reshape", mean, self.weight(np.array([0, *shape]))), self._constant(5e-4))
        root = self.op("Sqrt", self.op("Add", scaled, self._constant(2)))
        return self._shaped(self.op("Div", value, self.op("Mul", root, self.op("Sqrt", root))), shape)

    def add(self, left: str, right: str) -> str:
        return self._shaped(self.op("Add", left, right), self.shapes[left])

    def concat(self, values: Sequence[str]) -> str:
        first = self.shapes[values[0]]
        depth = sum(self.shapes[value][0] for value in values)
        return self._shaped(self.op("Concat", *values, axis=1), (depth, *first[1:]))

    def global_pool(self, value: str) -> str:
        """Add the mean over the image: (channels, …) to (channels,)."""
        return self.flatten(self._shaped(self.op("GlobalAveragePool", value), (self.shapes[value][0], 1, 1)))

    def flatten(self, value: str) -> str:
        return self._shaped(self.op("Flatten", value), (math.prod(self.shapes[value]),))

    # Layers on rows: shapes are (features,)

    def dense(self, value: str, features: int, act: str = "") -> str:
        weight = self._he((features, self.shapes[value][0]), 1.0)
        out = self.op("Gemm", value, weight, self.weight(np.zeros(features, np.float32)), transB=1)
        return self.activate(self._shaped(out, (features,)), act)

    def _constant(self, value: float) -> str:
        return self.weight(np.array(value, np.float32))

    def _he(self, shape: tuple[int, ...], gain: float) -> str:
        scale = np.float32(gain * math.sqrt(2 / math.prod(shape[1:])))
        return self.weight(self.rng.standard_normal(shape, np.float32) * scale)

    def _shaped(self, value: str, shape: tuple[int, ...]) -> str:
        self.shapes[value] = shape
        return value

    # What becomes of it

    def model(self) -> bytes:
        """Return the ONNX file. Raises onnx.checker.ValidationError for an invalid graph, which is a bug of this
        package."""

        def edges(tensors: list[tuple[str, str, tuple[int, ...]]]) -> list[onnx.ValueInfoProto]:
            return [
                helper.make_tensor_value_info(
                    name, _TYPES[datatype], ["batch", *(dim if dim >= 0 else "length" for dim in shape)]
                )
                for name, datatype, shape in tensors
            ]

        graph = helper.make_graph(self._nodes, self.name, edges(self._inputs), edges(self._outputs), self._weights)
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="cotenant")
        onnx.checker.check_model(model)
        return model.SerializeToString()

    def config(self) -> str:
        """Return the config.pbtxt."""

        def tensor(name: str, datatype: str, dims: tuple[int, ...]) -> dict[str, Any]:
            labels = {"label_filename": f"{name}.labels"} if name in self.labels else {}
            return {"name": name, "data_type": f"TYPE_{datatype}", "dims": dims, **labels}

        config: dict[str, Any] = {
            "name": self.name,
            "platform": "onnxruntime_onnx",
            "max_batch_size": MAX_BATCH,
            "input": [tensor(*edge) for edge in self._inputs],
            "output": [tensor(*edge) for edge in self._outputs],
        }
        if self.notes:
            config["parameters"] = {key: {"string_value": value} for key, value in self.notes.items()}
        if self._warmup:
            types = {name: datatype for name, datatype, _ in self._inputs}
            inputs = {
                name: {"data_type": f"TYPE_{types[name]}", "dims": dims, "random_data": True}
                for name, dims in self._warmup.items()
            }
            config["model_warmup"] = [{"name": "sample", "batch_size": 1, "inputs": inputs}]
        return write_config(config)
