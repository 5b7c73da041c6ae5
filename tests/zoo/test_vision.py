"""The architectures against the counts of parameters that their papers and reference implementations give."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest

from cotenant.zoo import vision
from cotenant.zoo.graph import IR_VERSION, OPSETS, Graph


@cache
def draw(name: str) -> Graph:
    graph = Graph(name, np.random.default_rng(0))
    getattr(vision, name)(graph)
    return graph


def unfolded(graph: Graph) -> int:
    """Parameters with batch normalisation: a scale and a shift where a folded convolution has a bias."""
    model = onnx.load_model_from_string(graph.model())
    sizes = {weight.name: weight.dims[0] for weight in model.graph.initializer if len(weight.dims) == 1}
    folded = [node.input[2] for node in model.graph.node if node.op_type == "Conv" and len(node.input) == 3]
    return graph.parameters + sum(sizes[bias] for bias in folded)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("mobilenet_v2", 3_504_872),
        ("mnasnet", 4_383_312),
        ("densenet121", 7_978_856),
    ],
)
def test_vision_network_with_batch_normalisation_has_the_published_parameters(name: str, published: int) -> None:
    """As torchvision counts them."""
    assert unfolded(draw(name)) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("lenet", 61_706),  # 60,000 in the paper, whose C3 sees a part of the maps
        ("googlenet", 6_998_552),
        pytest.param("vgg16", 138_357_544, marks=pytest.mark.slow),
    ],
)
def test_vision_network_without_it_has_the_published_parameters(name: str, published: int) -> None:
    assert draw(name).parameters == published


def test_ssd_mobilenet_has_the_published_parameters() -> None:
    """MobileNet, table 13: 6.8 million."""
    graph = draw("ssd_mobilenet")
    assert round(graph.parameters / 1e6, 1) == 6.8


@pytest.mark.parametrize("name", ["googlenet", "resnet18", "resnet50", "mnasnet"])
def test_vision_activations_keep_their_scale(name: str) -> None:
    """So that what a model says depends on its image, and no number overflows."""
    session = onnxruntime.InferenceSession(draw(name).model(), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).standard_normal((2, 3, 224, 224), np.float32)
    (found,) = session.run(None, {"image": images})
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-4)
    assert np.isfinite(found).all() and found.max() < 0.9999
    assert not np.allclose(found[0], found[1], rtol=0.1)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [7, 8])
def test_vision_shapes_equal_those_at_run_time(kernel: int, stride: int, side: int) -> None:
    graph = Graph("g", np.random.default_rng(0))
    x = graph.input("x", "FP32", (4, side, side))
    values = [
        graph.conv(x, 6, kernel, stride, groups=2),
        graph.conv(x, 6, kernel, stride, pad=0, act="Relu6"),
        graph.pool(x, "Max", 2, stride, ceil=True),
        graph.pool(x, "Average", 3, stride, pad=1),
        graph.lrn(x),
        graph.norm(x),
        graph.global_pool(x),
    ]
    for index, value in enumerate(values):
        graph.output(value, f"y{index}", "FP32", graph.shapes[value])
    found = onnxruntime.InferenceSession(graph.model()).run(None, {"x": np.zeros((1, 4, side, side), np.float32)})
    assert [output.shape[1:] for output in found] == [graph.shapes[value] for value in values]


def test_lrn_equals_the_onnx_operator() -> None:
    graph = Graph("g", np.random.default_rng(0))
    x = graph.input("x", "FP32", (7, 3, 2))
    graph.output(graph.lrn(x), "ours", "FP32", (7, 3, 2))
    graph.output(graph.op("LRN", x, size=5, alpha=5e-4, beta=0.75, bias=2.0), "theirs", "FP32", (7, 3, 2))
    value = 100 * np.random.default_rng(0).standard_normal((2, 7, 3, 2), np.float32)
    ours, theirs = onnxruntime.InferenceSession(graph.model()).run(None, {"x": value})
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_vision_models_load_in_old_runtimes() -> None:
    """ONNX Runtime 1.22 reads IR version 11 and opset 23."""
    assert IR_VERSION <= 11 and OPSETS[""] <= 23
