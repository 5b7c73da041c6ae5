"""Predict with models that XGBoost saved as JSON."""

from __future__ import annotations

import os

# Threads that have nothing to do sleep: the share would pay for spinning. OpenMP reads it when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import xgboost

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, one_line
from cotenant.worker.runners.trees import Predict
from cotenant.worker.wire import WorkerModel


def load_predict(model: WorkerModel, threads: int) -> Predict:
    """Load a model, and return its prediction. Raises ModelError."""
    try:
        booster = xgboost.Booster({"nthread": threads}, model_file=model.path)
    except xgboost.core.XGBoostError as error:
        raise ModelError(f"{model.path}: XGBoost {xgboost.__version__} cannot load it: {_brief(error)}") from None

    def predict(rows: Array) -> Array:
        try:
            predicted: Array = booster.inplace_predict(rows)
        except (xgboost.core.XGBoostError, ValueError) as error:
            raise ModelError(_brief(error)) from None
        return predicted

    return predict


def _brief(error: Exception) -> str:
    """Return an error's message without XGBoost's stack trace."""
    return one_line(ValueError(str(error).partition("Stack trace")[0]))
