"""Models of scikit-learn, trained on its own data, converted and served."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

import cotenant
from cotenant.app import sklearn_conversion
from cotenant.errors import ModelError
from cotenant.worker.repository import describe, find_model
from tests.live.deployment import csv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def needs_skl2onnx() -> None:
    """Here, not for the file: it takes two seconds to import, in every process that collects the tests."""
    pytest.importorskip("skl2onnx")


def classifier() -> tuple[Any, Any]:
    from sklearn import datasets
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, targets = datasets.load_iris(return_X_y=True)
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(features, targets), features.astype(np.float32)


def test_converted_classifier_answers_stock_clients_as_the_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    estimator, features = classifier()
    file = cotenant.convert_sklearn(estimator, tmp_path / "models" / "iris")
    assert file == tmp_path / "models" / "iris" / "1" / "model.onnx"
    (tmp_path / "profiles.csv").write_text(csv(("iris",)))
    (tmp_path / "serve.toml").write_text(
        'model_repository = "models"\nprofiles = "profiles.csv"\nhttp_port = 0\ngrpc_port = 0\nmetrics_port = 0\n'
        '[[models]]\nname = "iris"\nslo = "30s"'
    )
    with cotenant.serve(tmp_path / "serve.toml") as server:
        client = triton_http.InferenceServerClient(server.addresses.http)
        # As many rows at once as the model takes, which are fewer.
        answers = []
        for start in range(0, 150, 30):
            given = triton_http.InferInput("input", (30, 4), "FP32")
            given.set_data_from_numpy(features[start : start + 30])
            answers.append(client.infer("iris", [given]))
        client.close()
    labels = np.concatenate([answer.as_numpy("label") for answer in answers])
    probabilities = np.concatenate([answer.as_numpy("probabilities") for answer in answers])
    assert labels.tolist() == estimator.predict(features).tolist()
    np.testing.assert_allclose(probabilities, estimator.predict_proba(features), atol=1e-5)


def test_conversion_of_regressors_and_forests_is_described_and_numbered(tmp_path: Path) -> None:
    from sklearn import datasets
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier

    features, targets = datasets.load_diabetes(return_X_y=True)
    regressor = GradientBoostingRegressor(random_state=0).fit(features, targets)
    assert cotenant.convert_sklearn(regressor, tmp_path / "m").parent.name == "1"
    assert cotenant.convert_sklearn(regressor, tmp_path / "m").parent.name == "2"
    assert cotenant.convert_sklearn(regressor, tmp_path / "m", version=7).parent.name == "7"
    assert not list((tmp_path / "m").glob(".*"))
    info = describe(find_model(tmp_path, "m"))
    assert info.version == "7" and info.max_batch_size == 32
    assert [(spec.name, spec.shape) for spec in info.inputs] == [("input", (-1, 10))]
    forest = RandomForestClassifier(20, random_state=0).fit(features, np.where(targets > 150, "high", "low"))
    cotenant.convert_sklearn(forest, tmp_path / "words")
    outputs = {spec.name: spec.datatype for spec in describe(find_model(tmp_path, "words")).outputs}
    assert outputs["label"] == "BYTES"


def test_conversion_says_what_it_cannot_do_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn import datasets
    from sklearn.linear_model import LogisticRegression
    from sklearn.semi_supervised import LabelSpreading

    with pytest.raises(ModelError, match=r"^LogisticRegression knows no number of features \(n_features_in_\); fit it"):
        cotenant.convert_sklearn(LogisticRegression(), tmp_path / "m")
    features, targets = datasets.load_iris(return_X_y=True)
    with pytest.raises(ModelError, match=r"^skl2onnx cannot convert this LabelSpreading: "):
        cotenant.convert_sklearn(LabelSpreading().fit(features, targets), tmp_path / "m")
    estimator, _ = classifier()
    real = sklearn_conversion._converted
    other, _ = classifier()
    other[-1].coef_ *= -1
    monkeypatch.setattr(sklearn_conversion, "_converted", lambda given, *rest: real(other, *rest))
    with pytest.raises(ModelError, match=r"^Pipeline and its ONNX agree on \d+% of 256 random rows only"):
        cotenant.convert_sklearn(estimator, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_conversion_without_skl2onnx_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, _ = classifier()
    imported = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("skl2onnx"):
            raise ModuleNotFoundError(name)
        return imported(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"pip install 'cotenant\[sklearn\]'"):
        cotenant.convert_sklearn(estimator, tmp_path / "m")
