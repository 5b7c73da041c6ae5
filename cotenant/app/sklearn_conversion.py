"""Convert models of scikit-learn to ONNX, into a model repository.

A file that scikit-learn's users keep (`model.joblib`, `model.pkl`) is a pickle, which is a program; a server that read
it would run it. So it is read where it was made, and the repository holds numbers alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, one_line

INPUT = "input"
CHECKED_ROWS = 256  # random ones that both are asked about
TOLERANCE = 1e-3  # between outputs, relative to the largest: ONNX computes in single precision
MIN_AGREEMENT = 0.98  # fraction of rows; a row beside a threshold of a tree may fall to the other side


def convert_sklearn(estimator: Any, folder: Path | str, *, version: int | None = None) -> Path:
    """Convert a fitted estimator or pipeline of numeric features to ONNX; return the file.

    It is written as `<folder>/<version>/model.onnx`: the folder is the model's in a repository; `version` is by default
    one above the highest that is there. The input is `input`, FP32 of the shape (rows, features); a classifier has the
    outputs `label` and `probabilities`, any other estimator `variable`. Both are asked about random rows
    before anything is written.

    Raises ModelError for an estimator that is not fitted, that skl2onnx cannot convert, or that answers differently in
    ONNX; and where skl2onnx is not installed (the extra `sklearn`).
    """
    name = type(estimator).__name__
    features = getattr(estimator, "n_features_in_", None)
    if not isinstance(features, int | np.integer):
        raise ModelError(f"{name} knows no number of features (n_features_in_); fit it first, on an array of numbers")
    content = _converted(estimator, name, int(features))
    _check_agreement(estimator, name, content, int(features))
    folder = Path(folder)
    target = folder / str(version or _next_version(folder)) / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:  # whole, or not there
        file.write(content)
    Path(file.name).chmod(0o644)
    return Path(file.name).replace(target)


def _next_version(folder: Path) -> int:
    numbers = [int(path.name) for path in folder.glob("[1-9]*") if path.name.isdecimal()]
    return max(numbers, default=0) + 1


def _converted(estimator: Any, name: str, features: int) -> bytes:
    try:
        import skl2onnx
        from skl2onnx.common.data_types import FloatTensorType
    except ModuleNotFoundError:
        raise ModelError("skl2onnx is not installed; run `pip install 'cotenant[sklearn]'`") from None
    options = {"zipmap": False} if hasattr(estimator, "predict_proba") else {}
    try:
        model = skl2onnx.to_onnx(
            estimator,
            initial_types=[(INPUT, FloatTensorType([None, features]))],
            options={id(estimator): options} if options else None,
        )
    except Exception as error:  # noqa: BLE001 it raises anything
        raise ModelError(
            f"skl2onnx cannot convert this {name}: {one_line(error)[:300]}; it takes estimators and pipelines of "
            "numeric features; serve another as a Python model"
        ) from None
    content: bytes = model.SerializeToString()
    return content


def _check_agreement(estimator: Any, name: str, content: bytes, features: int) -> None:
    """Raise ModelError where an estimator and its conversion answer differently."""
    rows = np.random.default_rng(0).normal(size=(CHECKED_ROWS, features)).astype(np.float32)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    converted: Array = np.asarray(session.run(None, {INPUT: rows})[0])
    expected = np.asarray(estimator.predict(rows) if hasattr(estimator, "predict") else estimator.transform(rows))
    converted = converted.reshape(expected.shape)
    if expected.dtype.kind == "f":
        near = np.abs(converted - expected) <= TOLERANCE * max(1.0, float(np.abs(expected).max()))
    else:
        near = converted.astype(expected.dtype) == expected
    agreement = float(near.reshape(len(rows), -1).all(axis=1).mean())
    if agreement < MIN_AGREEMENT:
        raise ModelError(
            f"{name} and its ONNX agree on {agreement:.0%} of {CHECKED_ROWS} random rows only; serve it as a Python "
            "model, or report it to skl2onnx"
        )
