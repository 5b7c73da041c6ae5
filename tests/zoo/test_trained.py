from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesClassifier

from cotenant.core.tensor import Tensor
from cotenant.worker import repository
from cotenant.zoo import trained
from cotenant.zoo.graph import Graph
from tests.zoo.conftest import Run


@pytest.mark.parametrize(("name", "least"), [("digits", 0.97), ("cancer", 0.92), ("wine", 0.9)])
def test_trained_model_is_accurate_on_held_out_rows(models: Path, run: Run, name: str, least: float) -> None:
    known = trained.load_dataset(name)
    entry = repository.find_model(models, name)
    rows = known.held_out_x
    (found,) = run(name, [Tensor(entry.config.input[0].name, "FP32", rows.shape, rows.tobytes())])
    chances = found.array()
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-4)
    right = float((chances.argmax(1) == known.held_out_y).mean())
    assert right >= least
    assert entry.config.parameters["score"].string_value == f"{right:.1%} of {len(rows)} held-out rows right"
    assert repository.read_labels(entry, "probabilities") == known.names


@pytest.mark.parametrize("name", ["digits", "cancer", "wine"])
def test_dataset_has_no_row_in_both_parts(name: str) -> None:
    known = trained.load_dataset(name)
    train, held_out = ({row.tobytes() for row in part} for part in (known.x, known.held_out_x))
    assert not train & held_out and len(known.held_out_y) > 40


def test_forest_equals_that_of_scikit_learn(models: Path, run: Run) -> None:
    """Thresholds are float64 there and float32 here; no row may fall on the other side of one."""
    graph = Graph("cancer", np.random.default_rng([0, *b"cancer"]))
    known = trained.load_dataset("cancer")
    seed = int(graph.rng.integers(2**31))
    theirs = ExtraTreesClassifier(300, random_state=seed).fit(known.x, known.y).predict_proba(known.held_out_x)
    (ours,) = run("cancer", [Tensor("features", "FP32", known.held_out_x.shape, known.held_out_x.tobytes())])
    np.testing.assert_allclose(ours.array(), theirs, atol=1e-5)


def test_interrupted_training_raises_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sklearn.neural_network._multilayer_perceptron.AdamOptimizer.update_params", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained.digits(Graph("digits", np.random.default_rng(0)))
