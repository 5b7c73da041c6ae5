"""Tree ensembles of XGBoost and LightGBM in the formats that they save, served as Triton's FIL backend has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import cotenant
from cotenant.errors import ModelError
from cotenant.worker import runners
from cotenant.worker.repository import describe, find_model, worker_model
from tests.live.deployment import csv

Fit = Callable[[], tuple[Any, Any, Any]]  # → features, targets, the trained booster
FILES = {"xgboost": "xgboost.json", "lightgbm": "model.txt"}


@pytest.fixture(autouse=True)
def needs_libraries() -> None:
    """Here, not for the file: they take a second to import, in every process that collects the tests."""
    pytest.importorskip("xgboost")
    pytest.importorskip("lightgbm")
    pytest.importorskip("sklearn")


def data(task: str) -> tuple[Any, Any]:
    from sklearn import datasets

    load = {"binary": datasets.load_breast_cancer, "classes": datasets.load_iris, "value": datasets.load_diabetes}
    features, targets = load[task](return_X_y=True)
    return features.astype(np.float32), targets


def train(library: str, task: str) -> tuple[Any, Any]:
    """Return the features and a model that was trained on them."""
    import lightgbm
    import xgboost

    features, targets = data(task)
    if library == "xgboost":
        objective = {"binary": "binary:logistic", "classes": "multi:softprob", "value": "reg:squarederror"}[task]
        parameters = {"objective": objective, "max_depth": 3} | ({"num_class": 3} if task == "classes" else {})
        return features, xgboost.train(parameters, xgboost.DMatrix(features, targets), 20)
    objective = {"binary": "binary", "classes": "multiclass", "value": "regression"}[task]
    parameters = {"objective": objective, "verbose": -1} | ({"num_class": 3} if task == "classes" else {})
    return features, lightgbm.train(parameters, lightgbm.Dataset(features, targets), 20)


def save(root: Path, library: str, task: str, config: str = "") -> tuple[Any, Any]:
    """Put a trained model into a repository; return its features and its library's predictions."""
    features, booster = train(library, task)
    folder = root / f"{library}-{task}"
    (folder / "1").mkdir(parents=True)
    booster.save_model(str(folder / "1" / FILES[library]))
    if config:
        (folder / "config.pbtxt").write_text(config)
    predicted = booster.inplace_predict(features) if library == "xgboost" else booster.predict(features)
    return features, np.asarray(predicted, np.float32).reshape(len(features), -1)


def run(root: Path, name: str, rows: Any) -> Any:
    """Run a batch as a worker does; return its output."""
    entry = find_model(root, name)
    info = describe(entry)
    runner, _ = runners.load_runner(worker_model(entry, info), threads=1, fake=False)
    ((output, values),) = runner.run({info.inputs[0].name: rows})
    assert output == info.outputs[0].name and values.dtype == np.float32
    assert values.shape[1:] == info.outputs[0].shape[1:]
    return values


@pytest.mark.parametrize("library", FILES)
@pytest.mark.parametrize(("task", "columns"), [("binary", 1), ("classes", 3), ("value", 1)])
def test_trees_give_what_their_library_predicts(tmp_path: Path, library: str, task: str, columns: int) -> None:
    features, predicted = save(tmp_path, library, task)
    info = describe(find_model(tmp_path, f"{library}-{task}"))
    assert [(spec.name, spec.datatype, spec.shape) for spec in (*info.inputs, *info.outputs)] == [
        ("input__0", "FP32", (-1, features.shape[1])),
        ("output__0", "FP32", (-1, columns)),
    ]
    np.testing.assert_allclose(run(tmp_path, f"{library}-{task}", features), predicted, rtol=1e-5)
    np.testing.assert_allclose(run(tmp_path, f"{library}-{task}", features[:1]), predicted[:1], rtol=1e-5)


# As the FIL backend's users write it.
FIL = """
backend: "fil"
max_batch_size: 1024
input {{ name: "input__0" data_type: TYPE_FP32 dims: [ {features} ] }}
output {{ name: "output__0" data_type: TYPE_FP32 dims: [ {columns} ] }}
instance_group {{ kind: KIND_CPU }}
parameters {{ key: "model_type" value {{ string_value: "{model_type}" }} }}
parameters {{ key: "{wanted}" value {{ string_value: "true" }} }}
parameters {{ key: "storage_type" value {{ string_value: "AUTO" }} }}
"""


@pytest.mark.parametrize(("library", "model_type"), [("xgboost", "xgboost_json"), ("lightgbm", "lightgbm")])
@pytest.mark.parametrize(("task", "features", "classes"), [("binary", 30, 2), ("classes", 4, 3)])
def test_trees_with_a_configuration_of_fil_give_probabilities_or_classes(
    tmp_path: Path, library: str, model_type: str, task: str, features: int, classes: int
) -> None:
    name = f"{library}-{task}"
    config = FIL.format(features=features, columns=classes, model_type=model_type, wanted="predict_proba")
    rows, predicted = save(tmp_path, library, task, config)
    probabilities = run(tmp_path, name, rows)
    assert probabilities.shape == (len(rows), classes)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(probabilities[:, -1], predicted[:, -1], rtol=1e-5)
    config = FIL.format(features=features, columns=1, model_type=model_type, wanted="output_class")
    (tmp_path / name / "config.pbtxt").write_text(config)
    chosen = run(tmp_path, name, rows)[:, 0]
    assert chosen.tolist() == probabilities.argmax(axis=1).tolist()
    assert (chosen == data(task)[1]).mean() > 0.95


@pytest.mark.parametrize(
    ("task", "parameters", "reason"),
    [
        ("value", {"predict_proba": "true"}, "the model does not classify"),
        ("binary", {"predict_proba": "yes"}, "parameter predict_proba is 'yes'; it is true or false"),
        ("binary", {"model_type": "treelite_checkpoint"}, "model_type 'treelite_checkpoint'; save it as"),
        ("binary", {"threshold": "much"}, "threshold 'much' is not a number"),
        ("binary", {"half": "true"}, "parameter 'half' is unknown for trees"),
    ],
)
def test_trees_with_what_cannot_be_honoured_are_not_served(
    tmp_path: Path, task: str, parameters: dict[str, str], reason: str
) -> None:
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    save(tmp_path, "xgboost", task, "\n".join(lines))
    with pytest.raises(ModelError, match=re.escape(reason)):
        describe(find_model(tmp_path, f"xgboost-{task}"))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("xgboost.json", "{}", "no model of XGBoost in JSON: Object missing required field `learner`"),
        ("xgboost.json", "{" * 100_000, "no model of XGBoost in JSON"),
        (
            "xgboost.json",
            '{"learner": {"learner_model_param": {"num_feature": 0}, "objective": {"name": ""}}}',
            "0 fea",
        ),
        ("model.txt", "no tree", "no model of LightGBM as text: it does not begin"),
        ("model.txt", "tree\nnum_class=1\n", "no model of LightGBM as text: 'max_feature_idx'"),
        ("model.txt", "tree\nnum_class=1\nmax_feature_idx=-1\n", "0 features and 1 outputs"),
        ("model.joblib", "x", "a pickle is a program, and is not run; convert a model of scikit-learn once"),
    ],
)
def test_file_that_is_no_such_model_says_what_to_do(tmp_path: Path, file: str, content: str, reason: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / file).write_text(content)
    with pytest.raises(ModelError, match=re.escape(reason)):
        describe(find_model(tmp_path, "m"))


def break_trees(folder: Path, library: str) -> None:
    """The head stays, and says what the model takes; the library finds out. LightGBM aborts its process."""
    file = folder / "1" / FILES[library]
    text = file.read_text()
    if library == "xgboost":
        file.write_text(text.replace('"split_conditions":[', '"split_conditions":["x",'))
    else:
        file.write_text(text.replace("split_feature=", "split_feature=x"))


def write_settings(folder: Path, known: Sequence[str]) -> Path:
    """Write settings for the models in a folder, of which the latencies of some are known."""
    (folder / "profiles.csv").write_text(csv(tuple(known)))
    path = folder / "serve.toml"
    path.write_text(
        'model_repository = "models"\nprofiles = "profiles.csv"\n'
        "http_port = 0\ngrpc_port = 0\nmetrics_port = 0\nwarm_workers = 0\n"
        + "".join(f'[[models]]\nname = "{name}"\nslo = "30s"\n' for name in known)
    )
    return path


def test_xgboost_file_whose_trees_are_broken_is_no_model(tmp_path: Path) -> None:
    save(tmp_path, "xgboost", "classes")
    break_trees(tmp_path / "xgboost-classes", "xgboost")
    entry = find_model(tmp_path, "xgboost-classes")
    with pytest.raises(ModelError, match=r"xgboost\.json: XGBoost 3\..* cannot load it: "):
        runners.load_runner(worker_model(entry, describe(entry)), threads=1, fake=False)


def test_files_whose_trees_are_broken_cost_the_server_no_more_than_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for library in FILES:
        save(tmp_path / "models", library, "classes")
        break_trees(tmp_path / "models" / f"{library}-classes", library)
    features, predicted = save(tmp_path / "models", "xgboost", "value")
    # Of the broken ones nothing is known: each is to be measured.
    with cotenant.serve(write_settings(tmp_path, ["xgboost-value"])) as server:
        states = {model.name: model.state for model in server.status().models}
        assert states == {"lightgbm-classes": "UNAVAILABLE", "xgboost-classes": "UNAVAILABLE", "xgboost-value": "READY"}
        answer = server.infer("xgboost-value", {"input__0": features[:2]})["output__0"]
        np.testing.assert_allclose(answer, predicted[:2], rtol=1e-5)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, dict[str, Any]]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    results = {library: save(tmp_path / "models", library, "classes") for library in FILES}
    with cotenant.serve(write_settings(tmp_path, [f"{library}-classes" for library in FILES])) as server:
        yield server, results


def test_trees_answer_stock_clients(served: tuple[Any, dict[str, Any]]) -> None:
    server, results = served
    for client, module in (
        (triton_http.InferenceServerClient(server.addresses.http), triton_http),
        (triton_grpc.InferenceServerClient(server.addresses.grpc), triton_grpc),
    ):
        for library, (features, predicted) in results.items():
            given = module.InferInput("input__0", (5, 4), "FP32")
            given.set_data_from_numpy(features[:5])
            answer = client.infer(f"{library}-classes", [given]).as_numpy("output__0")
            np.testing.assert_allclose(answer, predicted[:5], rtol=1e-5)
        client.close()
