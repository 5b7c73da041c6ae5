"""Fit regression techniques by libraries and keep the results as plain numbers.

KACE (section 6.1) compares four: linear regression, a random forest with tuned hyperparameters, a network of 128, 64
and 32 units, and AutoML. A fitted regressor is a struct that is written to JSON as it is and predicts with numpy alone;
scikit-learn and FLAML (`pip install 'cotenant[learn]'`) are needed to fit all but linear models. `ridge` is added here:
a linear model that is more robust to few samples.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cotenant.errors import PlanError

Matrix = NDArray[np.float64]


class LinearModel(msgspec.Struct, frozen=True, tag="line"):
    weights: tuple[float, ...]
    constant: float

    def predict(self, rows: Matrix) -> Matrix:
        prediction: Matrix = rows @ np.array(self.weights) + self.constant
        return prediction


class Layer(msgspec.Struct, frozen=True):
    """Hold a dense layer. weights: a row for each input."""

    weights: tuple[tuple[float, ...], ...]
    constants: tuple[float, ...]

    @property
    def arrays(self) -> tuple[Matrix, Matrix]:
        return np.array(self.weights), np.array(self.constants)


class Network(msgspec.Struct, frozen=True, tag="network", dict=True):
    """Evaluate layers with rectified linear units between them; the last has one output."""

    layers: tuple[Layer, ...]

    def predict(self, rows: Matrix) -> Matrix:
        for i, (weights, constants) in enumerate(self._arrays):
            rows = (np.maximum(rows, 0.0) if i else rows) @ weights + constants
        return rows[:, 0]

    @functools.cached_property
    def _arrays(self) -> list[tuple[Matrix, Matrix]]:
        return [layer.arrays for layer in self.layers]


class Tree(msgspec.Struct, frozen=True):
    """Hold a decision tree's nodes, the root first.

    Values up to `threshold` go left. For a leaf, left and right are its own index.
    """

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]


class Forest(msgspec.Struct, frozen=True, tag="forest", dict=True):
    """Sum the trees' values and a constant."""

    trees: tuple[Tree, ...]
    constant: float = 0.0

    def predict(self, rows: Matrix) -> Matrix:
        feature, threshold, left, right, value, roots = self._arrays
        at = np.tile(roots, (len(rows), 1))
        float32_rows = rows.astype(np.float32)  # the precision in which the libraries compare
        before = np.full_like(at, -1)
        while (before != at).any():
            before = at
            goes_left = np.take_along_axis(float32_rows, feature[at], axis=1) <= threshold[at]
            at = np.where(goes_left, left[at], right[at])
        prediction: Matrix = value[at].sum(axis=1) + self.constant
        return prediction

    @functools.cached_property
    def _arrays(self) -> tuple[NDArray[np.int64], Matrix, NDArray[np.int64], NDArray[np.int64], Matrix, Any]:
        """The nodes of all trees, concatenated."""
        roots = np.cumsum([0, *(len(tree.value) for tree in self.trees)])[:-1]
        placed = list(zip(self.trees, roots, strict=True))
        return (
            np.concatenate([np.array(tree.feature) for tree in self.trees]),
            np.concatenate([np.array(tree.threshold) for tree in self.trees]),
            np.concatenate([np.array(tree.left) + root for tree, root in placed]),
            np.concatenate([np.array(tree.right) + root for tree, root in placed]),
            np.concatenate([np.array(tree.value) for tree in self.trees]),
            roots,
        )


Regressor = LinearModel | Network | Forest


class Fit(Protocol):
    def __call__(self, rows: Matrix, targets: Matrix, *, seed: int, effort: int) -> Regressor: ...


def train(technique: str, rows: Matrix, targets: Matrix, *, seed: int = 0, effort: int = 10) -> Regressor:
    """Fit a regressor by a technique.

    rows: samples by features, standardised; targets: one for each. effort: hyperparameter settings to try, or seconds.
    Raises PlanError for an unknown technique, too few samples, or a missing library.
    """
    if technique not in TECHNIQUES:
        raise PlanError(f"unknown technique {technique!r}; available: {', '.join(TECHNIQUES)}")
    min_samples = rows.shape[1] + 1 if technique == "lr" else 2 * FOLDS
    if len(rows) < min_samples:
        raise PlanError(
            f"{len(rows)} samples are too few for {technique!r} with {rows.shape[1]} features; it needs {min_samples},"
            " so measure more co-located runs"
        )
    try:
        return TECHNIQUES[technique](rows, targets, seed=seed, effort=effort)
    except ImportError as error:
        raise PlanError(
            f"{technique!r} needs {error.name} to be fitted: pip install 'cotenant[learn]'; 'lr' needs nothing more"
        ) from None


FOLDS = 5  # folds of a cross-validation
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # penalties on the weights of standardised features


def fit_line(rows: Matrix, targets: Matrix, *, seed: int = 0, effort: int = 0) -> LinearModel:
    """Fit by least squares."""
    solution, *_ = np.linalg.lstsq(np.column_stack([rows, np.ones(len(rows))]), targets, rcond=None)
    return LinearModel(tuple(solution[:-1].tolist()), float(solution[-1]))


def ridge(rows: Matrix, targets: Matrix, *, seed: int = 0, effort: int = 0) -> LinearModel:
    """Fit by ridge regression, with the penalty of the least leave-one-out error."""
    centre, target_mean = rows.mean(axis=0), targets.mean()
    centred_rows, centred_targets = rows - centre, targets - target_mean
    best: tuple[float, Matrix] | None = None
    for penalty in PENALTIES:
        solve = np.linalg.solve(centred_rows.T @ centred_rows + penalty * np.eye(rows.shape[1]), centred_rows.T)
        weights = solve @ centred_targets
        # Leave-one-out errors in closed form (Allen's PRESS, 1974).
        left_out = (centred_targets - centred_rows @ weights) / (
            1 - np.einsum("ij,ji->i", centred_rows, solve) - 1 / len(rows)
        )
        error = float((left_out**2).mean())
        if best is None or error < best[0]:
            best = error, weights
    assert best is not None
    return LinearModel(_floats(best[1]), float(target_mean - centre @ best[1]))


def fit_forest(rows: Matrix, targets: Matrix, *, seed: int, effort: int) -> Forest:
    """Fit the best of `effort` random hyperparameter settings by cross-validation; KACE searches up to 2000 trees."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.model_selection import RandomizedSearchCV

    space = {
        "n_estimators": [50, 100],
        "max_features": ["sqrt", "log2"],
        "max_depth": [*range(10, 111, 10), None],
        "min_samples_split": [2, 5, 10],
        "min_samples_leaf": [1, 2, 4],
        "bootstrap": [True, False],
    }
    search = RandomizedSearchCV(
        RandomForestRegressor(random_state=seed), space, n_iter=effort, cv=FOLDS, random_state=seed
    )
    search.fit(rows, targets)
    return _of_trees(search.best_estimator_.estimators_)


def fit_network(rows: Matrix, targets: Matrix, *, seed: int, effort: int) -> Network:
    """Fit 128, 64 and 32 rectified units with Adam.

    At most 250 epochs, stopping after 40 without gain on a held-out fifth.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    model = MLPRegressor(
        hidden_layer_sizes=(128, 64, 32),
        batch_size=min(32, int(0.8 * len(rows))),
        max_iter=250,
        early_stopping=True,
        validation_fraction=0.2,
        n_iter_no_change=40,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of epochs is the paper's
        model.fit(rows, targets)
    return Network(
        tuple(
            Layer(tuple(tuple(row) for row in weights.tolist()), tuple(constants.tolist()))
            for weights, constants in zip(model.coefs_, model.intercepts_, strict=True)
        )
    )


def _of_trees(trees: Sequence[Any], share: float | None = None) -> Forest:
    """Convert scikit-learn's trees; a forest predicts their mean."""
    weight = 1 / len(trees) if share is None else share
    return Forest(tuple(_tree(each.tree_, weight) for each in trees))


def _tree(nodes: Any, weight: float) -> Tree:
    own_index = np.arange(nodes.node_count)
    leaf = nodes.children_left < 0
    return Tree(
        feature=_ints(np.where(leaf, 0, nodes.feature)),
        threshold=_floats(np.where(leaf, 0.0, nodes.threshold)),
        left=_ints(np.where(leaf, own_index, nodes.children_left)),
        right=_ints(np.where(leaf, own_index, nodes.children_right)),
        value=_floats(np.where(leaf, weight * nodes.value[:, 0, 0], 0.0)),
    )


def _ints(values: ArrayLike) -> tuple[int, ...]:
    return tuple(np.asarray(values).tolist())


def _floats(values: ArrayLike) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=float).tolist())


def fit_automl(rows: Matrix, targets: Matrix, *, seed: int, effort: int) -> Regressor:
    """Fit the best model that FLAML finds in `effort` seconds.

    Candidates are elastic net, random forest, extra trees and boosted trees: others could not be written as plain
    numbers, or predict without the library.
    """
    from flaml import AutoML

    search = AutoML()
    search.fit(
        rows,
        targets,
        task="regression",
        metric="mse",
        time_budget=effort,
        estimator_list=["lgbm", "rf", "extra_tree", "enet"],
        eval_method="cv",
        n_splits=FOLDS,
        n_jobs=1,
        seed=seed,
        verbose=0,
    )
    best = search.model.estimator
    if search.best_estimator == "enet":
        return LinearModel(_floats(best.coef_), float(best.intercept_))
    if search.best_estimator == "lgbm":
        return _boosted(best.booster_.dump_model())
    return _of_trees(best.estimators_)


def _boosted(model: dict[str, Any]) -> Forest:
    """Convert LightGBM's trees, which are summed."""
    trees = []
    for each in model["tree_info"]:
        nodes: list[tuple[int, float, int, int, float]] = []
        _lay_out(each["tree_structure"], nodes)
        feature, threshold, left, right, value = zip(*nodes, strict=True)
        trees.append(Tree(feature, threshold, left, right, value))
    return Forest(tuple(trees))


def _lay_out(node: dict[str, Any], nodes: list[tuple[int, float, int, int, float]]) -> int:
    """Append a node and its subtree to the list; return the node's index."""
    index = len(nodes)
    nodes.append((0, 0.0, index, index, float(node.get("leaf_value", 0.0))))
    if "split_feature" in node:
        left, right = _lay_out(node["left_child"], nodes), _lay_out(node["right_child"], nodes)
        nodes[index] = (int(node["split_feature"]), float(node["threshold"]), left, right, 0.0)
    return index


# Technique → its fitting function.
TECHNIQUES: dict[str, Fit] = {"lr": fit_line, "ridge": ridge, "rf": fit_forest, "nn": fit_network, "automl": fit_automl}
