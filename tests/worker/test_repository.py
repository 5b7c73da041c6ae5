from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import ConfigError, ModelError, NotFoundError
from cotenant.worker import repository

FILES = "model.onnx or model.pt or model.pt2 or model.py or xgboost.json or model.txt"


def onnx_bytes(
    dims: tuple[int | str, ...] = ("n", 3), kind: int = TensorProto.FLOAT, opset: int = 20, op: str = "Identity"
) -> bytes:
    """A model from `x` to `y`, both of that shape."""
    x, y = (helper.make_tensor_value_info(name, kind, dims) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [x], [y])
    opsets = [helper.make_opsetid("", opset)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def put(root: Path, name: str = "m", config: str | None = None, model: bytes | None = None, version: str = "1") -> Path:
    """The model's file."""
    file = root / name / version / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(onnx_bytes() if model is None else model)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return file


def describe(root: Path) -> ModelInfo:
    return repository.describe(repository.find_model(root, "m"))


def assert_rejected(root: Path, error: str) -> None:
    with pytest.raises(ModelError, match=f"^{re.escape(error)}$"):
        describe(root)


def test_scan_repository_model_without_config_is_described_from_its_file(tmp_path: Path) -> None:
    file = put(tmp_path)
    (entry,) = repository.scan_repository(tmp_path)
    assert (entry.name, entry.version, entry.path, entry.reason) == ("m", "1", file, "")
    assert repository.describe(entry) == ModelInfo(
        name="m",
        version="1",
        platform="onnxruntime_onnx",
        inputs=(TensorSpec("x", "FP32", (-1, 3)),),
        outputs=(TensorSpec("y", "FP32", (-1, 3)),),
        max_batch_size=repository.DEFAULT_MAX_BATCH,
    )


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["9", "10"]),
        ("version_policy: { all: {} }", ["2", "9", "10"]),
        ("version_policy { specific { versions: [9, 2, 7] } }", ["2", "9"]),
    ],
)
def test_scan_repository_version_policy_selects_numbered_versions(
    tmp_path: Path, policy: str, served: list[str]
) -> None:
    for version in ("2", "10", "9", "007", ".3", "old", "0"):
        put(tmp_path, version=version)
    (tmp_path / "m" / "config.pbtxt").write_text(policy)
    assert [entry.version for entry in repository.scan_repository(tmp_path)] == served
    assert repository.find_model(tmp_path, "m").version == served[-1]
    assert repository.find_model(tmp_path, "m", served[0]).version == served[0]
    with pytest.raises(NotFoundError, match=f"^model 'm' has no version '007' to serve; it has {', '.join(served)}$"):
        repository.find_model(tmp_path, "m", "007")


def test_scan_repository_bad_model_gives_its_reason_and_stops_no_other(tmp_path: Path) -> None:
    put(tmp_path, "good")
    put(tmp_path, "bad_config", "max_batch_size: -")
    put(tmp_path, "bad_type", 'max_batch_size: "8"')
    put(tmp_path, "empty", model=b"")
    (tmp_path / "no_version").mkdir()
    (tmp_path / "no_file" / "1").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "README").write_text("not a model")
    reasons = {entry.name: entry.reason for entry in repository.scan_repository(tmp_path)}
    assert reasons == {
        "bad_config": f"{tmp_path}/bad_config/config.pbtxt:1:17: Couldn't parse integer: -; "
        "expected protobuf text, such as `max_batch_size: 8`",
        "bad_type": f'{tmp_path}/bad_type/config.pbtxt:1:17: Couldn\'t parse integer: "8"; '
        "expected protobuf text, such as `max_batch_size: 8`",
        "empty": f"{tmp_path}/empty/1/model.onnx: the file is empty; export the model again",
        "good": "",
        "no_file": f"{tmp_path}/no_file/1: no model file; put {FILES} there",
        "no_version": f"{tmp_path}/no_version: no version; put the model into {tmp_path}/no_version/1/model.onnx",
    }
    with pytest.raises(ModelError, match="^" + re.escape(reasons["empty"])):
        repository.describe(repository.find_model(tmp_path, "empty"))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../m", "m/1", "m/", "/etc", "m\0", "M", "x" * 300, "\ud800", ".hidden"]
)
def test_find_model_name_that_is_no_folder_is_not_found(tmp_path: Path, name: str) -> None:
    root = tmp_path / "models"
    put(root)
    put(tmp_path)
    put(root, ".hidden")
    error = f"no model {name!r} in '{root}'; a model is one of its folders"
    with pytest.raises(NotFoundError, match=f"^{re.escape(error)}$"):
        repository.find_model(root, name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(), version=st.text())
def test_find_model_any_name_stays_inside_the_repository(tmp_path: Path, name: str, version: str) -> None:
    root = tmp_path / "models"
    if not root.exists():
        put(root)
        put(tmp_path, "outside")
    try:
        entry = repository.find_model(root, name, version)
    except NotFoundError:
        return
    assert entry.path == root / "m" / "1" / "model.onnx"


def test_scan_repository_links_that_lead_out_are_rejected(tmp_path: Path) -> None:
    """A link within the repository, such as a mounted volume has, is fine."""
    root = tmp_path / "models"
    outside = put(tmp_path, "outside")
    put(root, ".data")
    (root / "inside").symlink_to(".data")
    (root / "folder").symlink_to(outside.parents[1])
    (root / "file" / "1").mkdir(parents=True)
    (root / "file" / "1" / "model.onnx").symlink_to(outside)
    (root / "loop" / "1").mkdir(parents=True)
    (root / "loop" / "1" / "model.onnx").symlink_to("model.onnx")
    reasons = {entry.name: entry.reason for entry in repository.scan_repository(root)}
    assert reasons == {
        "file": f"{root}/file/1/model.onnx: leads out of the repository, to {outside}; move the model into {root}",
        "folder": f"{root}/folder: leads out of the repository, to {outside.parents[1]}; move the model into {root}",
        "inside": "",
        "loop": f"{root}/loop/1: no model file; put {FILES} there",
    }


def test_scan_repository_missing_folder_raises_config_error(tmp_path: Path) -> None:
    error = f"no model repository at '{tmp_path}/models': No such file or directory; name a folder of "
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}<model>/<version>/model.onnx$"):
        repository.scan_repository(tmp_path / "models")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_describe_unreadable_file_raises_model_error(tmp_path: Path) -> None:
    put(tmp_path).chmod(0)
    assert_rejected(tmp_path, f"{tmp_path}/m/1/model.onnx: no permission to read it; let this user read it")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('name: "other"', "name 'other' in the folder 'm'; make them the same"),
        ("max_batch_size: -1", "max_batch_size -1 is below 0; 0 means no batch dimension"),
        (
            "sequence_batching {}",
            "sequence_batching is not supported: requests of a sequence may run anywhere, in any order; remove it, or "
            "serve this model elsewhere",
        ),
        (
            'backend: "dali"',
            "unsupported platform or backend 'dali'; give platform: \"onnxruntime_onnx\" or platform: "
            '"pytorch_libtorch" or platform: "pytorch_export" or platform: "pytorch_module" or platform: '
            '"xgboost_json" or platform: "lightgbm_text" or backend: "python"',
        ),
        (
            'default_model_filename: "../2/model.onnx"',
            "'../2/model.onnx' is not the name of a file; give one, without folders",
        ),
        (
            'output { name: "y" label_filename: "a\\000b" }',
            "'a\\x00b' is not the name of a file; give one, without folders",
        ),
        (
            'input { name: "x" reshape { shape: [1, 3] } }',
            "input.reshape is not supported: give dims as the model has them; remove it, or serve this model elsewhere",
        ),
        (
            "version_policy { specific { versions: 3 } }",
            "version_policy asks for none of the versions that are there: [1]",
        ),
        ('input { name: "z" }', "input 'z' is not in model.onnx; it has x"),
        (
            'input { name: "x" data_type: TYPE_INT64 }',
            "input 'x' is TYPE_INT64, but FP32 in model.onnx; make them the same",
        ),
        (
            'max_batch_size: 4 output { name: "y" dims: [4] }',
            "output 'y' has dims [4], but [3] in model.onnx after the batch dimension; make them the same",
        ),
        (
            'max_batch_size: 4 output { name: "y" dims: [3, 1] }',
            "output 'y' has dims [3, 1], but [3] in model.onnx after the batch dimension; make them the same",
        ),
    ],
)
def test_describe_wrong_config_raises_model_error(tmp_path: Path, config: str, reason: str) -> None:
    put(tmp_path, config=config)
    assert_rejected(tmp_path, f"{tmp_path}/m/config.pbtxt: {reason}")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (onnx_bytes(opset=99), "Opset 99 is under development and support for this is limited"),
        (onnx_bytes(op="Frobnicate"), "No Op registered for Frobnicate"),
        (onnx_bytes().replace(b"\x01x", b"\x01\xff"), "'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["opset", "operator", "name"],
)
def test_describe_model_that_cannot_be_loaded_raises_a_short_error(tmp_path: Path, model: bytes, reason: str) -> None:
    put(tmp_path, model=model)
    with pytest.raises(ModelError) as caught:
        describe(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/m/1/model.onnx: no model that ONNX Runtime ") and reason in message
    assert message.endswith("; export it again as ONNX, with an opset that this version knows")
    assert len(message.splitlines()) == 1 and "/onnxruntime" not in message


@pytest.mark.parametrize("model", [b"not a model at all", onnx_bytes()[:-20]], ids=["text", "cut"])
def test_describe_file_that_is_no_model_raises_a_short_error(tmp_path: Path, model: bytes) -> None:
    put(tmp_path, model=model)
    with pytest.raises(ModelError, match=r"/m/1/model\.onnx: no ONNX model: a field .*; export it again as ONNX$"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("dims", "config", "batch"),
    [
        (("n", 3), "max_batch_size: 8", 8),
        (("n", 3), "max_batch_size: 0", 0),
        (("n", 3), 'input { name: "x" dims: [3] }', 32),
        (("n", 3), 'input { name: "x" dims: [-1, 3] }', 0),
        ((1, 3), "", 0),
        ((), "", 0),
    ],
)
def test_describe_shape_and_config_give_the_batch_dimension(
    tmp_path: Path, dims: tuple[int | str, ...], config: str, batch: int
) -> None:
    put(tmp_path, config=config, model=onnx_bytes(dims))
    assert describe(tmp_path).max_batch_size == batch


def test_describe_max_batch_size_of_a_fixed_shape_raises_model_error(tmp_path: Path) -> None:
    put(tmp_path, config="max_batch_size: 8", model=onnx_bytes((1, 3)))
    assert_rejected(
        tmp_path,
        f"{tmp_path}/m/config.pbtxt: max_batch_size 8, but 'x' of model.onnx has the shape [1, 3]; "
        "export it with a dynamic first dimension, or set max_batch_size: 0",
    )


def test_describe_config_dims_refine_dynamic_ones(tmp_path: Path) -> None:
    put(tmp_path, config='input { name: "x" dims: [16, -1] }', model=onnx_bytes(("n", "length", 8)))
    assert describe(tmp_path).inputs == (TensorSpec("x", "FP32", (-1, 16, 8)),)


def test_find_model_config_keeps_fields_that_are_not_honoured(tmp_path: Path) -> None:
    put(tmp_path, config="max_batch_size: 8 instance_group [ { count: 2 kind: KIND_CPU } ]")
    assert repository.find_model(tmp_path, "m").config.fields == {
        "max_batch_size": 8,
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
    }


def test_read_labels_gives_the_lines_of_the_file(tmp_path: Path) -> None:
    put(tmp_path, config='output { name: "y" label_filename: "y.txt" }')
    entry = repository.find_model(tmp_path, "m")
    with pytest.raises(ModelError, match=r"y\.txt: cannot read the labels of 'y'"):
        repository.read_labels(entry, "y")
    (tmp_path / "m" / "y.txt").write_text("cat\ndog\n")
    assert repository.read_labels(entry, "y") == ("cat", "dog")
    assert repository.read_labels(entry, "x") == ()


@pytest.mark.parametrize("kind", sorted(set(TensorProto.DataType.values()) - {0}))
def test_sample_inputs_every_type_has_the_right_shape_and_range(tmp_path: Path, kind: int) -> None:
    """A type that ONNX Runtime cannot take is rejected by name; all others get a sample."""
    put(tmp_path, model=onnx_bytes(("n", 3), kind))
    entry = repository.find_model(tmp_path, "m")
    try:
        info = repository.describe(entry)
    except ModelError:
        assert TensorProto.DataType.Name(kind).startswith(("FLOAT", "COMPLEX", "INT", "UINT"))
        return
    (tensor,) = repository.sample_inputs(entry, info, 5, np.random.default_rng(0))
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", info.inputs[0].datatype, (5, 3))
    if tensor.datatype == "BYTES":
        assert bytes(tensor.data) == 15 * b"\x04\0\0\0text"
        return
    values = tensor.array()
    if tensor.datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    expected = onnx.helper.tensor_dtype_to_np_dtype(kind)
    assert 0 <= values.min() <= values.max() <= 1 and values.std() > 0
    assert tensor.array().dtype.itemsize == expected.itemsize


def test_sample_inputs_dynamic_dimension_needs_model_warmup(tmp_path: Path) -> None:
    put(tmp_path, model=onnx_bytes(("n", "length", 8)))
    rng = np.random.default_rng(0)
    entry = repository.find_model(tmp_path, "m")
    info = repository.describe(entry)
    hint = 'model_warmup { inputs { key: "x" value { dims: [16, 8] } } }'
    with pytest.raises(ModelError) as caught:
        repository.sample_inputs(entry, info, 1, rng)
    assert str(caught.value) == (
        f"input 'x' has dims [-1, 8], and nothing says which are usual; put into {tmp_path}/m/config.pbtxt: `{hint}`"
    )
    (tmp_path / "m" / "config.pbtxt").write_text(hint.replace("dims", "zero_data: true dims"))
    entry = repository.find_model(tmp_path, "m")
    (tensor,) = repository.sample_inputs(entry, info, 4, rng)
    assert tensor.shape == (4, 16, 8) and not tensor.array().any()


@pytest.mark.parametrize(("dims", "most"), [((1, 3), 1), (("n", 3), 32)])
def test_sample_inputs_rows_beyond_the_maximum_raise_model_error(
    tmp_path: Path, dims: tuple[int | str, ...], most: int
) -> None:
    put(tmp_path, model=onnx_bytes(dims))
    entry = repository.find_model(tmp_path, "m")
    info = repository.describe(entry)
    assert repository.sample_inputs(entry, info, most, np.random.default_rng(0))[0].shape == (most, 3)
    for rows in (0, most + 1):
        with pytest.raises(ModelError, match=f"{rows} rows at once; this model takes 1 to {most}$"):
            repository.sample_inputs(entry, info, rows, np.random.default_rng(0))
