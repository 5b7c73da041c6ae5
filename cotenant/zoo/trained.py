"""Train small models while the zoo is built, on data that ships with scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from cotenant.zoo.graph import Graph

Array = NDArray[Any]


class Dataset(NamedTuple):
    """Hold a data set. Rows of `x` are inputs; `y` are indices into `names`."""

    x: Array
    y: Array
    held_out_x: Array
    held_out_y: Array
    names: tuple[str, ...]


@cache
def load_dataset(name: str) -> Dataset:
    """Load a data set with a fixed split: "digits" (images [1, 8, 8] of 0 to 1), "cancer" or "wine" (features)."""
    loaded = {"digits": datasets.load_digits, "cancer": datasets.load_breast_cancer, "wine": datasets.load_wine}[name]()
    x = (loaded.images[:, None] / 16 if name == "digits" else loaded.data).astype(np.float32)
    parts = train_test_split(x, loaded.target, test_size=0.25, stratify=loaded.target, random_state=0)
    return Dataset(parts[0], parts[2], parts[1], parts[3], tuple(str(label) for label in loaded.target_names))


def digits(g: Graph) -> None:
    """Train a multi-layer perceptron, also on the images shifted by one pixel."""
    known = load_dataset("digits")
    framed = np.pad(known.x[:, 0], ((0, 0), (1, 1), (1, 1)))
    moves = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
    images = np.concatenate([framed[:, down : down + 8, right : right + 8] for down, right in moves]).reshape(-1, 64)
    network = MLPClassifier((256, 128), alpha=1e-3, learning_rate_init=2e-3, batch_size=128, random_state=_seed(g))
    with threadpool_limits(1), _interruptible():  # two threads wait for each other more than they work
        for _ in range(20):
            network.partial_fit(images, np.tile(known.y, len(moves)), classes=np.arange(10))
    x = g.op("Flatten", g.input("image", "FP32", (1, 8, 8)))
    for layer, (weight, bias) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        x = g.op("Relu", x) if layer else x
        x = g.op("Gemm", x, g.weight(weight.astype(np.float32)), g.weight(bias.astype(np.float32)))
    _answer(g, g.op("Softmax", x, axis=1), known)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt as usual: scikit-learn only stops training and warns."""
    words = "Training interrupted"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", words, UserWarning)
        try:
            yield
        except UserWarning as warning:
            raise KeyboardInterrupt if str(warning).startswith(words) else warning from None


def cancer(g: Graph) -> None:
    """Train extremely randomised trees (Geurts et al. 2006) to classify cells as malignant or benign."""
    known = load_dataset("cancer")
    forest = ExtraTreesClassifier(300, random_state=_seed(g)).fit(known.x, known.y)
    nodes: dict[str, list[Any]] = {
        name: []
        for name in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    }  # fmt: skip
    leaves: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for index, estimator in enumerate(forest.estimators_):
        tree = estimator.tree_
        # scikit-learn compares a float32 with a float64; the float32 at or below it divides the same way.
        splits = tree.threshold.astype(np.float32)
        splits = np.where(splits > tree.threshold, np.nextafter(splits, np.float32(-np.inf)), splits)
        leaf = tree.children_left < 0
        nodes["treeids"] += [index] * tree.node_count
        nodes["nodeids"] += range(tree.node_count)
        nodes["featureids"] += np.where(leaf, 0, tree.feature).tolist()
        nodes["values"] += np.where(leaf, 0, splits).tolist()
        nodes["modes"] += np.where(leaf, "LEAF", "BRANCH_LEQ").tolist()
        nodes["truenodeids"] += np.where(leaf, 0, tree.children_left).tolist()
        nodes["falsenodeids"] += np.where(leaf, 0, tree.children_right).tolist()
        for node in np.flatnonzero(leaf).tolist():
            votes = tree.value[node, 0]
            leaves["treeids"] += [index] * len(votes)
            leaves["nodeids"] += [node] * len(votes)
            leaves["ids"] += range(len(votes))
            leaves["weights"] += (votes / votes.sum() / len(forest.estimators_)).tolist()
    x = g.op(
        "TreeEnsembleRegressor",
        g.input("features", "FP32", known.x.shape[1:]),
        domain="ai.onnx.ml",
        n_targets=len(known.names),
        **{f"nodes_{name}": values for name, values in nodes.items()},
        **{f"target_{name}": values for name, values in leaves.items()},
    )
    _answer(g, x, known)


def wine(g: Graph) -> None:
    """Classify the cultivar of a wine by its five nearest neighbours in standardised features."""
    known = load_dataset("wine")
    mean, spread = known.x.mean(0), known.x.std(0)
    others = (known.x - mean) / spread
    x = g.op("Sub", g.input("features", "FP32", known.x.shape[1:]), g.weight(mean))
    x = g.op("Div", x, g.weight(spread))
    # The squared distance but for |x|², which is the same for all: |other|² - 2 x·other.
    distances = g.op("Gemm", x, g.weight(others), g.weight((others**2).sum(1)), alpha=-2.0, transB=1)
    g.op("TopK", distances, g.weight(np.array([5])), outputs=("nearest", "who"), axis=1, largest=0)
    votes = g.op("Gather", g.weight(np.eye(len(known.names), dtype=np.float32)[known.y]), "who")
    _answer(g, g.op("ReduceMean", votes, g.weight(np.array([1])), keepdims=0), known)


def _seed(g: Graph) -> int:
    return int(g.rng.integers(2**31))


def _answer(g: Graph, probabilities: str, known: Dataset) -> None:
    """Add the output and its labels, and note the accuracy of the finished graph."""
    g.output(probabilities, "probabilities", "FP32", (len(known.names),))
    g.labels["probabilities"] = known.names
    session = onnxruntime.InferenceSession(g.model(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: known.held_out_x})
    right = float((np.argmax(found, axis=1) == known.held_out_y).mean())
    g.notes["score"] = f"{right:.1%} of {len(known.held_out_y)} held-out rows right"
