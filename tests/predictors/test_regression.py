from __future__ import annotations

import builtins
from typing import Any

import msgspec
import numpy as np
import pytest

from cotenant.errors import PlanError
from cotenant.predictors import regression
from cotenant.predictors.regression import Forest, LinearModel, Network, Regressor, Tree, train

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(60, 4))
TARGETS = ROWS @ np.array([1.0, -2.0, 0.5, 0.0]) + 3.0


def test_train_lr_on_linear_data_recovers_it_exactly() -> None:
    found = train("lr", ROWS, TARGETS)
    assert isinstance(found, LinearModel)
    assert found.weights == pytest.approx((1.0, -2.0, 0.5, 0.0), abs=1e-9)
    assert found.constant == pytest.approx(3.0)


@pytest.mark.parametrize("technique", ["ridge", "rf", "nn", "automl"])
def test_train_any_technique_predicts_and_round_trips(technique: str) -> None:
    found = train(technique, ROWS, TARGETS, effort=1)
    off = found.predict(ROWS) - TARGETS
    assert (off**2).mean() < 0.5 * TARGETS.var()
    again = msgspec.json.decode(msgspec.json.encode(found), type=Regressor)
    assert np.array_equal(again.predict(ROWS), found.predict(ROWS))


def test_train_ridge_on_few_samples_beats_lr() -> None:
    """Twelve noisy samples of ten features: plain least squares mostly fits the noise."""
    rng = np.random.default_rng(4)
    rows, unseen, weights = rng.normal(size=(12, 10)), rng.normal(size=(200, 10)), rng.normal(size=10)
    targets = rows @ weights + rng.normal(size=12)

    def error(technique: str) -> float:
        return float(((train(technique, rows, targets).predict(unseen) - unseen @ weights) ** 2).mean())

    assert error("ridge") < 0.7 * error("lr")
    assert len(train("ridge", rows[:10], targets[:10]).weights) == 10  # type: ignore[union-attr]


def test_train_rf_predicts_as_scikit_learn() -> None:
    from sklearn.ensemble import ExtraTreesRegressor

    library = ExtraTreesRegressor(20, random_state=1).fit(ROWS, TARGETS)
    new = RNG.normal(size=(200, 4))
    assert regression._of_trees(library.estimators_).predict(new) == pytest.approx(library.predict(new))


def test_train_automl_boosted_trees_predict_as_lightgbm() -> None:
    from lightgbm import LGBMRegressor

    library = LGBMRegressor(n_estimators=30, min_child_samples=3, n_jobs=1, verbose=-1).fit(ROWS, TARGETS)
    new = RNG.normal(size=(200, 4))
    expected = library.booster_.predict(new)
    assert regression._boosted(library.booster_.dump_model()).predict(new) == pytest.approx(expected)


def test_network_predict_equals_hand_calculation() -> None:
    """|x| = max(x, 0) + max(-x, 0)."""
    layers = (regression.Layer(((1.0, -1.0),), (0.0, 0.0)), regression.Layer(((1.0,), (1.0,)), (0.5,)))
    assert Network(layers).predict(np.array([[-2.0], [3.0]])).tolist() == [2.5, 3.5]


def test_forest_predict_equals_hand_calculation() -> None:
    """Values up to 1 go left; the trees are summed."""
    split = Tree(feature=(0, 0, 0), threshold=(1.0, 0.0, 0.0), left=(1, 1, 2), right=(2, 1, 2), value=(0.0, 10.0, 20.0))
    leaf = Tree(feature=(0,), threshold=(0.0,), left=(0,), right=(0,), value=(1.0,))
    found = Forest((split, leaf), constant=0.5).predict(np.array([[1.0], [1.5]]))
    assert found.tolist() == [11.5, 21.5]


def test_train_on_unusable_input_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="4 samples are too few for 'lr' with 4 features; it needs 5"):
        train("lr", ROWS[:4], TARGETS[:4])
    with pytest.raises(PlanError, match="9 samples are too few for 'rf'"):
        train("rf", ROWS[:9], TARGETS[:9])
    with pytest.raises(PlanError, match="unknown technique 'svm'; available: lr, ridge, rf, nn, automl"):
        train("svm", ROWS, TARGETS)


def test_train_without_library_raises_plan_error_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name="sklearn")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PlanError, match=r"'rf' needs sklearn to be fitted: pip install 'cotenant\[learn\]'"):
        train("rf", ROWS, TARGETS)
    assert isinstance(train("lr", ROWS, TARGETS), LinearModel)


def test_train_nn_on_few_samples_emits_no_warning() -> None:
    """Warnings are errors here."""
    assert isinstance(train("nn", ROWS[:23], TARGETS[:23]), Network)
