"""Read what tree ensembles of XGBoost (JSON) and LightGBM (text) take and give, without these libraries.

The layout and the `parameters` are those of Triton's FIL backend, whose repositories serve unchanged: `xgboost.json` or
`model.txt`, one input `input__0` and one output `output__0` (triton-inference-server/fil_backend,
docs/model_config.md).
Formats: https://xgboost.readthedocs.io/en/stable/tutorials/saving_model.html, and the head of LightGBM's text, up to
its first tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from cotenant.core.tensor import TensorSpec
from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array

INPUT, OUTPUT = "input__0", "output__0"
MAX_HEAD = 1 << 20  # bytes of a LightGBM file, within which its first tree begins
MAX_SIZE = 1 << 20  # features, classes

# Parameters of FIL's configuration that say how to compute, not what.
TUNING = frozenset(
    {"algo", "blocks_per_sm", "chunk_size", "layout", "storage_type", "threads_per_tree", "transfer_threshold"}
    | {"use_experimental_optimizations", "xgboost_allow_unknown_field"}
)


class Wanted(StrEnum):
    """Name what a model gives: what its library predicts, a probability for each class, or the class."""

    VALUE = "value"
    PROBABILITIES = "probabilities"
    CLASS = "class"


class TreeModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a tree ensemble.

    outputs: columns that the library predicts. classes: 0 where it does not classify; 2 has one column.
    """

    features: int
    outputs: int
    classes: int = 0


class TreeOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Say what is made of the columns that a library predicts. threshold: from which on a probability is class 1."""

    wanted: Wanted = Wanted.VALUE
    threshold: float = 0.5

    def columns(self, model: TreeModel) -> int:
        match self.wanted:
            case Wanted.PROBABILITIES:
                return model.classes
            case Wanted.CLASS:
                return 1
        return model.outputs

    def of(self, predicted: Array) -> Array:
        """Return the output for what a library predicts, of the shape (rows,) or (rows, columns)."""
        rows = predicted.astype(np.float32, copy=False).reshape(predicted.shape[0], -1)
        if self.wanted is Wanted.VALUE:
            return rows
        binary = rows.shape[1] == 1
        if self.wanted is Wanted.PROBABILITIES:
            return np.hstack([1 - rows, rows]) if binary else rows
        chosen = rows[:, 0] >= self.threshold if binary else rows.argmax(axis=1)
        return chosen.astype(np.float32).reshape(-1, 1)


def tree_specs(
    path: Path, platform: str, parameters: Mapping[str, str]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of a tree ensemble. Raises ModelError."""
    model = read_tree_model(path, platform)
    columns = tree_output(path, platform, model, parameters).columns(model)
    return (TensorSpec(INPUT, "FP32", (-1, model.features)),), (TensorSpec(OUTPUT, "FP32", (-1, columns)),)


def read_tree_model(path: Path, platform: str) -> TreeModel:
    """Read a model's head. Raises ModelError for a file that is none."""
    model = _read_xgboost(path) if platform == "xgboost_json" else _read_lightgbm(path)
    if not (1 <= model.features <= MAX_SIZE and 1 <= model.outputs <= MAX_SIZE):
        raise ModelError(
            f"{path}: {model.features} features and {model.outputs} outputs; both are 1 to {MAX_SIZE}; save it again"
        )
    return model


def tree_output(path: Path, platform: str, model: TreeModel, parameters: Mapping[str, str]) -> TreeOutput:
    """Read FIL's parameters of a configuration. Raises ModelError for those that cannot be honoured."""
    given = {name: text.strip().lower() for name, text in parameters.items() if name not in TUNING}
    saved = given.pop("model_type", platform)
    if saved not in (platform, platform.removesuffix("_text")):
        raise ModelError(f"{path}: model_type {saved!r}; save it as XGBoost's xgboost.json or LightGBM's model.txt")
    probabilities = _flag(path, given, "predict_proba")
    classes = _flag(path, given, "output_class") | _flag(path, given, "is_classifier")
    threshold = given.pop("threshold", "0.5")
    if given:
        raise ModelError(f"{path}: parameter {min(given)!r} is unknown for trees; remove it from config.pbtxt")
    wanted = Wanted.PROBABILITIES if probabilities else Wanted.CLASS if classes else Wanted.VALUE
    if wanted is not Wanted.VALUE and not model.classes:
        raise ModelError(f"{path}: the model does not classify; remove predict_proba and output_class")
    if wanted is Wanted.PROBABILITIES and model.classes > 2 and model.outputs == 1:
        raise ModelError(f"{path}: it gives classes only; train with the objective multi:softprob for predict_proba")
    try:
        return TreeOutput(wanted=wanted, threshold=float(threshold))
    except ValueError:
        raise ModelError(f"{path}: threshold {threshold!r} is not a number") from None


def _flag(path: Path, parameters: dict[str, str], name: str) -> bool:
    text = parameters.pop(name, "false")
    if text not in ("true", "false"):
        raise ModelError(f"{path}: parameter {name} is {text!r}; it is true or false")
    return text == "true"


class _Parameters(msgspec.Struct):
    num_feature: int
    num_class: int = 0
    num_target: int = 1


class _Objective(msgspec.Struct):
    name: str


class _Learner(msgspec.Struct):
    learner_model_param: _Parameters
    objective: _Objective


class _XgboostFile(msgspec.Struct):
    learner: _Learner


def _read_xgboost(path: Path) -> TreeModel:
    try:
        # Not strict: XGBoost writes numbers as text.
        learner = msgspec.json.decode(path.read_bytes(), type=_XgboostFile, strict=False).learner
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            f"{path}: no model of XGBoost in JSON: {error}; save it with `save_model('xgboost.json')`"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; let this user read it") from None
    parameters, objective = learner.learner_model_param, learner.objective.name
    classes = 2 if objective == "binary:logistic" else parameters.num_class if objective.startswith("multi:") else 0
    outputs = 1 if objective == "multi:softmax" else max(parameters.num_class, parameters.num_target, 1)
    return TreeModel(features=parameters.num_feature, outputs=outputs, classes=classes)


def _read_lightgbm(path: Path) -> TreeModel:
    try:
        with path.open("rb") as file:
            head = file.read(MAX_HEAD).decode(errors="replace")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; let this user read it") from None
    lines = head.partition("\nTree=")[0].splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        if lines[:1] != ["tree"]:
            raise ValueError("it does not begin with the line 'tree'")
        features, outputs = int(values["max_feature_idx"]) + 1, int(values["num_class"])
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{path}: no model of LightGBM as text: {error}; save it with `booster.save_model('model.txt')`"
        ) from None
    objective = values.get("objective", "").partition(" ")[0]
    classes = {"binary": 2, "multiclass": outputs, "multiclassova": outputs}.get(objective, 0)
    return TreeModel(features=features, outputs=outputs, classes=classes)
