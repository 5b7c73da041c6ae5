"""What is said of ensembles whose steps do not fit together: the file and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker.ensemble import NESTED, Ensemble, describe_ensemble
from cotenant.worker.repository import find_model, scan_repository


def info(
    name: str, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]], rows: int = 8
) -> ModelInfo:
    """Tensors of floats, shapes without rows; those that begin with `i` are of whole numbers."""

    def specs(tensors: dict[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
        lead = (-1,) if rows else ()
        return tuple(TensorSpec(it, "INT64" if it[0] == "i" else "FP32", lead + dims) for it, dims in tensors.items())

    return ModelInfo(
        name=name, version="1", platform="onnx", inputs=specs(inputs), outputs=specs(outputs), max_batch_size=rows
    )


INFOS = {
    "find": info("find", {"x": (3, -1)}, {"y": (4,), "ids": (1,)}),
    "name": info("name", {"x": (4,)}, {"y": (10,)}, rows=4),
    "both": info("both", {"a": (-1,), "b": (10,)}, {"y": (10,)}),
    "whole": info("whole", {"x": (4,)}, {"y": (10,)}, rows=0),
    "search": info("search", {"x": (3, 32)}, {"y": (-1, 4), "strings": (-1, 4)}, rows=0),
}
CONFIG = """platform: "ensemble"
input [ { name: "picture" data_type: TYPE_FP32 dims: [ 3, 32 ] } ]
output [ { name: "names" data_type: TYPE_FP32 dims: [ 10 ] } ]
ensemble_scheduling { step [
  { model_name: "name" model_version: -1
    input_map { key: "x" value: "boxes" } output_map { key: "y" value: "names" } },
  { model_name: "find" model_version: 1
    input_map { key: "x" value: "picture" } output_map { key: "y" value: "boxes" } }
] }
"""


def described(root: Path, config: str) -> Ensemble:
    (root / "street").mkdir()
    (root / "street" / "config.pbtxt").write_text(config)
    return describe_ensemble(find_model(root, "street"), INFOS, {"bad": "its file is empty", "nest": NESTED})


def test_ensemble_steps_are_ordered_by_their_inputs(tmp_path: Path) -> None:
    street = described(tmp_path, CONFIG)
    assert [(step.name, step.after) for step in street.steps] == [("find", ()), ("name", ("find",))]
    assert street.info == ModelInfo(
        name="street",
        version="1",
        platform="ensemble",
        inputs=(TensorSpec("picture", "FP32", (-1, 3, 32)),),
        outputs=(TensorSpec("names", "FP32", (-1, 10)),),
        max_batch_size=4,
    )
    assert street.application(0.5).length({"find": 0.2, "name": 0.3}) == pytest.approx(0.5)


def test_ensemble_may_use_a_model_twice(tmp_path: Path) -> None:
    again = """{ model_name: "name" model_version: -1
    input_map { key: "x" value: "boxes" } output_map { key: "y" value: "more" } }, { model_name: "find" """
    street = described(tmp_path, CONFIG.replace('{ model_name: "find" ', again))
    assert [(step.name, step.model) for step in street.steps] == [
        ("find", "find"),
        ("name", "name"),
        ("name 2", "name"),
    ]


def test_ensemble_needs_no_version_folder(tmp_path: Path) -> None:
    described(tmp_path, CONFIG)
    (entry,) = scan_repository(tmp_path)
    assert (entry.version, entry.platform, entry.reason) == ("1", "ensemble", "")
    (tmp_path / "street" / "3").mkdir()
    assert scan_repository(tmp_path)[0].version == "3"


STEP = "ensemble_scheduling.step"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"find"', '"fin"', f"{STEP}[1].model_name: 'fin' cannot be served: the repository has no such model; put it"),
        ('"find"', '"bad"', f"{STEP}[1].model_name: 'bad' cannot be served: its file is empty"),
        (
            '"find"',
            '"nest"',
            f"{STEP}[1].model_name: 'nest' cannot be served: it is an ensemble itself; list its steps",
        ),
        (
            "model_version: 1",
            "model_version: 2",
            f"{STEP}[1].model_version: 2 of 'find' is not served, 1 is; name that",
        ),
        ('key: "x" value: "picture"', 'key: "z" value: "picture"', f"{STEP}[1].input_map: lacks input 'x' of 'find'"),
        (
            '"find" model_version: 1\n    input_map {',
            '"find" model_version: 1\n    input_map { key: "z" value: "picture" } input_map {',
            f"{STEP}[1].input_map: 'find' has no input 'z'; it has x",
        ),
        (
            'value: "boxes" } output_map',
            'value: "box" } output_map',
            f"{STEP}[0].input_map: nothing makes 'box'; it is",
        ),
        (
            'key: "y" value: "boxes"',
            'key: "z" value: "boxes"',
            f"{STEP}[1].output_map: 'find' has no output 'z'; it has",
        ),
        ('output_map { key: "y" value: "boxes" }', "", f"{STEP}[1].output_map: takes nothing from 'find'; map one of"),
        ('value: "boxes" } }', 'value: "names" } }', f"{STEP}[1].output_map: 'names' is made twice; give one of them"),
        ('value: "boxes" } }', 'value: "picture" } }', f"{STEP}[1].output_map: 'picture' is made twice; give one of"),
        (
            'key: "y" value: "boxes"',
            'key: "ids" value: "boxes"',
            f"{STEP}[0].input_map: 'boxes' is INT64 [-1, 1], but 'name' takes FP32 [-1, 4] as 'x'",
        ),
        ('value: "picture" }', 'value: "names" }', f"{STEP}[1].input_map: 'names' is FP32 [-1, 10], but 'find' takes"),
        ('name: "names"', 'name: "name"', "output 'name' is made by no step; name it in an output_map"),
        ("input [ {", 'input [ { name: "sound" data_type: TYPE_FP32 dims: [ 1 ] }, {', "input 'sound' is used by no"),
        ("dims: [ 3, 32 ]", "dims: [ 4, 32 ]", "input 'picture' has dims [4, 32], but [3, -1] in street"),
        ("TYPE_FP32 dims: [ 10 ]", "TYPE_FP16 dims: [ 10 ]", "output 'names' is TYPE_FP16, but FP32 in street"),
        ("input [", "max_batch_size: 5\ninput [", "max_batch_size 5, but 'name' takes 4; write no more"),
        ("input [", "max_batch_size: 0\ninput [", "max_batch_size 0, but its steps take batches; write 1 to 4"),
        (
            'model_name: "name"',
            'model_name: "whole"',
            f"{STEP}[0].input_map: 'boxes' is FP32 [-1, 4], but 'whole' takes",
        ),
    ],
)
def test_ensemble_mistake_names_the_file_and_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CONFIG
    with pytest.raises(ModelError, match="^" + re.escape(f"{tmp_path}/street/config.pbtxt: {message}")):
        described(tmp_path, CONFIG.replace(old, new, 1))


EACH = CONFIG.replace("find", "search").replace("dims: [ 10 ]", "dims: [ -1, 10 ]")


def test_ensemble_without_batches_runs_batched_steps_for_each_row(tmp_path: Path) -> None:
    street = described(tmp_path, EACH)
    assert [(step.name, step.each) for step in street.steps] == [("search", False), ("name", True)]
    assert (street.info.max_batch_size, street.info.outputs[0].shape) == (0, (-1, 10))
    before, after = street.application(1.0).stages
    assert (before.counted, before.fanout.mean) == (False, 1.0)
    assert (after.counted, after.fanout.mean) == (True, 1.0)


def test_ensemble_parameters_give_the_usual_number_of_rows(tmp_path: Path) -> None:
    street = described(tmp_path, EACH + 'parameters { key: "items" value { string_value: "2.5" } }')
    assert street.application(1.0).stages[1].fanout.mean == 2.5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '{ key: "y" value: "names" } },',
            '{ key: "y" value: "names" } },\n  { model_name: "name" input_map { key: "x" value: "given" }'
            ' output_map { key: "y" value: "other" } },',
            "'name' takes batches and the ensemble does not, so that it runs for each row; let all that it takes come",
        ),
        (
            '{ key: "y" value: "names" } },',
            '{ key: "y" value: "named" } },\n  { model_name: "name" input_map { key: "x" value: "boxes" }'
            ' output_map { key: "y" value: "names" } },\n  { model_name: "both" input_map { key: "a" value: "named" }'
            ' input_map { key: "b" value: "named" } output_map { key: "y" value: "other" } },',
            "'name' takes batches and the ensemble does not, so that it runs for each row, and 'both' cannot come",
        ),
        (
            "input [",
            'parameters { key: "items" value { string_value: "few" } }\ninput [',
            "parameters 'items': 'few' is",
        ),
        (
            "input [",
            'parameters { key: "items" value { string_value: "nan" } }\ninput [',
            "parameters 'items': 'nan' is",
        ),
    ],
)
def test_ensemble_rows_that_cannot_run_one_by_one_are_rejected(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in EACH
    config = EACH.replace(old, new, 1)
    if '"given"' in new:
        config = config.replace("input [ {", 'input [ { name: "given" }, {', 1)
    with pytest.raises(ModelError, match="^" + re.escape(f"{tmp_path}/street/config.pbtxt: {message}")):
        described(tmp_path, config)


def test_ensemble_cycle_names_its_steps(tmp_path: Path) -> None:
    config = """platform: "ensemble"
input [ { name: "in" } ]
output [ { name: "one" } ]
ensemble_scheduling { step [
  { model_name: "both" input_map { key: "a" value: "in" } input_map { key: "b" value: "two" }
    output_map { key: "y" value: "one" } },
  { model_name: "both" input_map { key: "a" value: "in" } input_map { key: "b" value: "one" }
    output_map { key: "y" value: "two" } }
] }"""
    message = f"config.pbtxt: {STEP}: its stages form a cycle: both after both 2 after both"
    with pytest.raises(ModelError, match=re.escape(message)):
        described(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('platform: "ensemble"', "an ensemble without steps; list them in ensemble_scheduling"),
        ('platform: "ensemble" ensemble_scheduling { }', "an ensemble without steps; list them in ensemble_scheduling"),
        (
            'ensemble_scheduling { step { model_name: "a" } }',
            "ensemble_scheduling in a model of platform ''; write platform: \"ensemble\"",
        ),
        (
            'platform: "ensemble" ensemble_scheduling { step { model_version: 1 } }',
            "Object missing required field `model_name` - at `$.ensemble_scheduling.step[0]`",
        ),
    ],
)
def test_ensemble_invalid_config_costs_no_other_model(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "street").mkdir()
    (tmp_path / "street" / "config.pbtxt").write_text(config)
    (entry,) = scan_repository(tmp_path)
    assert entry.reason.startswith(f"{tmp_path}/street/config.pbtxt: {message}")
