"""Run tree ensembles on the CPU, by the prediction of their library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cotenant.errors import ModelError
from cotenant.worker.runners.arrays import Array
from cotenant.worker.tree_models import INPUT, OUTPUT, read_tree_model, tree_output
from cotenant.worker.wire import WorkerModel

Predict = Callable[[Array], Array]  # rows of features → (rows,) or (rows, columns). Raises ModelError


class Trees:
    """Run a tree ensemble."""

    device = 0.0
    memory = 0
    warmed = False

    def __init__(self, model: WorkerModel, predict: Predict) -> None:
        path = Path(model.path)
        self.model = model
        self._predict = predict
        self._output = tree_output(path, model.platform, read_tree_model(path, model.platform), model.parameters)

    def join(self, name: str, parts: Sequence[Array], shape: tuple[int, ...]) -> None:
        return None

    def run(self, inputs: dict[str, Array]) -> list[tuple[str, Array]]:
        return [(OUTPUT, self._output.of(self._predict(inputs[INPUT])))]

    def improve(self) -> bool:
        return False

    def minimum_seconds(self, rows: int) -> float:
        return 0.0

    def close(self) -> None:
        del self._predict


def load_trees(model: WorkerModel, threads: int, stream: int | None) -> Trees:
    """Load a model with its library. Raises ModelError where that is not installed, and on a GPU."""
    if stream is not None:
        raise ModelError(f'{model.path}: tree ensembles run on the CPU only; serve it with backend = "cpu"')
    try:
        if model.platform == "xgboost_json":
            from cotenant.worker.runners.xgboost import load_predict
        else:
            from cotenant.worker.runners.lightgbm import load_predict
    except ModuleNotFoundError:
        raise ModelError(f"{model.path}: its library is not installed; run `pip install 'cotenant[trees]'`") from None
    return Trees(model, load_predict(model, threads))
