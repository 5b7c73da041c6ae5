"""Predict with models that LightGBM saved as text."""

from __future__ import annotations

import os

# Threads that have nothing to do sleep: the share would pay for spinning. OpenMP reads it when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import lightgbm
import numpy as np

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array, one_line
from cotenant.worker.runners.trees import Predict
from cotenant.worker.wire import WorkerModel


def load_predict(model: WorkerModel, threads: int) -> Predict:
    """Load a model, and return its prediction. Raises ModelError."""
    try:
        booster = lightgbm.Booster(model_file=model.path)
    except lightgbm.basic.LightGBMError as error:
        raise ModelError(f"{model.path}: LightGBM {lightgbm.__version__} cannot load it: {one_line(error)}") from None

    def predict(rows: Array) -> Array:
        try:
            predicted: Array = np.asarray(booster.predict(rows, num_threads=threads))
        except (lightgbm.basic.LightGBMError, ValueError) as error:
            raise ModelError(one_line(error)) from None
        return predicted

    return predict
