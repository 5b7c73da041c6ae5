from __future__ import annotations

import fcntl
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from cotenant import zoo
from cotenant.errors import ConfigError
from cotenant.worker import repository
from cotenant.zoo.graph import MAX_BATCH
from tests.zoo.conftest import Run

SMALL = ["lenet", "wine"]


def test_build_every_model_matches_its_config_and_runs(models: Path, run: Run) -> None:
    entries = repository.scan_repository(models)
    assert len(entries) == 7
    for entry in entries:
        assert not entry.reason
        info = repository.describe(entry)
        assert info.max_batch_size == MAX_BATCH
        assert {tensor.name for tensor in entry.config.input} == {tensor.name for tensor in info.inputs}
        assert {tensor.name for tensor in entry.config.output} == {tensor.name for tensor in info.outputs}
        outputs = run(entry.name, repository.sample_inputs(entry, info, 2, np.random.default_rng(0)))
        for spec, output in zip(info.outputs, outputs, strict=True):
            assert output.shape == (2, *spec.shape[1:]) and np.isfinite(output.array()).all()


def test_build_again_builds_nothing(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    first = zoo.build_models(tmp_path, SMALL, progress=lambda *it: told.append(it))
    second = zoo.build_models(tmp_path, SMALL)
    assert told == [("lenet", 0, 2), ("wine", 1, 2)]
    assert [model.fresh for model in first + second] == [True, True, False, False]
    assert [model.notes for model in first] == [model.notes for model in second]
    assert [model.path for model in first] == [model.path for model in second]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".zoo.lock", "lenet", "wine"]


def test_build_model_of_one_seed_is_independent_of_others(tmp_path: Path) -> None:
    def lenet(names: list[str], seed: int) -> bytes:
        return {it.name: it for it in zoo.build_models(tmp_path, names, seed)}["lenet"].path.read_bytes()

    first = lenet(["lenet"], 0)
    assert lenet(["lenet"], 1) != first
    assert lenet(["wine", "lenet"], 0) == first


def test_build_corrupt_model_is_built_again(tmp_path: Path) -> None:
    (built,) = zoo.build_models(tmp_path, ["lenet"])
    whole = built.path.read_bytes()
    shutil.rmtree(built.path.parent)
    (tmp_path / ".lenet.new").mkdir()  # a build that was killed
    (again,) = zoo.build_models(tmp_path, ["lenet"])
    assert again.fresh and again.path.read_bytes() == whole


def test_build_keeps_a_model_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "lenet" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    error = f"{tmp_path}/lenet was not built by Cotenant and is left alone; move it, or leave 'lenet' out"
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        zoo.build_models(tmp_path, ["lenet"])
    assert file.read_text() == "mine"


def test_build_unknown_name_raises(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^no model 'resnet5' in the zoo; did you mean 'resnet50'\?; it has digits, "
    ):
        zoo.build_models(tmp_path / "models", ["resnet5"])
    assert not (tmp_path / "models").exists()


def test_build_unwritable_directory_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = f"cannot write models into '{tmp_path}/file/models': Not a directory; name another folder"
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        zoo.build_models(tmp_path / "file" / "models", SMALL)


def test_build_while_another_process_builds_raises(tmp_path: Path) -> None:
    with (tmp_path / ".zoo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^another process is building models in .*; wait until it is done$"):
            zoo.build_models(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("package", "model"), [("onnx", "lenet"), ("sklearn", "wine"), ("safetensors.numpy", "minilm")]
)
def test_build_without_a_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, model: str
) -> None:
    for module in [name for name in sys.modules if name.startswith("cotenant.zoo.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"^the zoo needs '{package}'; run `pip install 'cotenant\\[zoo\\]'`$"):
        zoo.build_models(tmp_path, [model])


def test_demo_models_have_targets_weights_and_summaries() -> None:
    assert len(zoo.DEMO) == 8
    for recipe in zoo.ZOO.values():
        assert recipe.slo > 0 and recipe.weight > 0 and recipe.summary
