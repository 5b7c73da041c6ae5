"""Configs as people write them for Triton, what is wrong with others, and that what is written reads back."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cotenant.errors import ModelError
from cotenant.protocol import messages
from cotenant.worker.repository import Config, Use, read_config, uses_of, write_config
from cotenant.worker.repository.config import (
    DynamicBatching,
    EnsembleScheduling,
    EnsembleStep,
    Parameter,
    TensorConfig,
    VersionPolicy,
    Warmup,
    WarmupInput,
)
from cotenant.worker.repository.config_fields import FIELDS


def read(tmp_path: Path, text: str) -> Config:
    folder = tmp_path / "resnet"
    folder.mkdir(exist_ok=True)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    return read_config(folder)


def test_read_config_text_as_people_write_it_gives_its_values(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        r"""
        # The name of the folder.
        name: "res" 'net'  platform: 'onnxruntime_onnx';
        max_batch_size: 8,
        input [ { name: "x\303\251" data_type: TYPE_FP32 dims: [ 3, -1, 0x10 ] } ]
        output { name: "y" dims: 10 dims: 2 }
        version_policy: { all { } }
        dynamic_batching < max_queue_delay_microseconds: 100 >
        parameters { key: "a" value: { string_value: "b" } }
        parameters { key: "empty" }
        instance_group [ { count: 2 kind: KIND_CPU } ]
        model_warmup { inputs { key: "x" value { dims: [7] zero_data: true } } }
        optimization { priority: PRIORITY_MAX, graph { level: -1 } cuda { graphs: true } }
        """,
    )
    assert (config.name, config.platform, config.max_batch_size) == ("resnet", "onnxruntime_onnx", 8)
    assert config.input == (TensorConfig("xé", "TYPE_FP32", (3, -1, 16)),)
    assert config.output == (TensorConfig("y", dims=(10, 2)),)
    assert config.version_policy == VersionPolicy(all={})
    assert config.dynamic_batching == DynamicBatching(100)
    assert config.parameters == {"a": Parameter("b"), "empty": Parameter()}
    assert config.model_warmup == (Warmup({"x": WarmupInput((7,), zero_data=True)}),)
    assert config.optimization.cuda and config.optimization.cuda.graphs
    assert config.fields["instance_group"] == [{"count": 2, "kind": "KIND_CPU"}]


def test_read_config_ensemble_gives_its_steps(tmp_path: Path) -> None:
    text = 'ensemble_scheduling { step { model_name: "m" input_map { key: "x" value: "IMAGE" } model_version: 2 } }'
    assert read(tmp_path, text).ensemble_scheduling == EnsembleScheduling((EnsembleStep("m", 2, {"x": "IMAGE"}),))
    step = read(tmp_path, 'ensemble_scheduling { step [{ model_name: "m" }] }').ensemble_scheduling
    assert step == EnsembleScheduling((EnsembleStep("m", -1),))


@pytest.mark.parametrize(("text", "size"), [("", None), ("max_batch_size: 0", 0), ("max_batch_size: 3", 3)])
def test_read_config_max_batch_size_zero_is_not_absent(tmp_path: Path, text: str, size: int | None) -> None:
    assert read(tmp_path, text).max_batch_size == size


@pytest.mark.parametrize(
    ("text", "place", "error"),
    [
        ("max_batch: 8\nmax_bach_size: 8", "1:1", "unknown field 'max_batch'; did you mean 'max_batch_size'?"),
        ("\n  max_bach_size: 8", "2:3", "unknown field 'max_bach_size'; did you mean 'max_batch_size'?"),
        ('input { name: "x"\n dim: 3 }', "2:2", "unknown field 'dim'; did you mean 'dims'?"),
        ("dynamic_batching { zzz: 3 }", "1:20", "unknown field 'zzz'; available: default_priority_level, "),
        ("name: 3", "1:7", "Expected string but found: '3'; expected protobuf text, such as `max_batch_size: 8`"),
        ("max_batch_size: 'a'", "1:17", "Couldn't parse integer: 'a'; expected "),
        ("max_batch_size: 3000000000", "1:17", "Value out of range: 3000000000; expected "),
        ("input { data_type: TYPE_FP33 }", "1:20", 'Enum type "inference.DataType" has no value named TYPE_FP33; '),
        (
            "max_batch_size: 1 max_batch_size: 2",
            "1:35",
            'Message type "inference.ModelConfig" should not have multiple',
        ),
        ("dynamic_batching {} ensemble_scheduling {}", "1:21", 'Field "ensemble_scheduling" is specified along with '),
        ("dynamic_batching {\n", "1:18", 'Expected "}"; expected '),
        ("name: 'unfinished\n", "1:7", 'String missing ending quote: "\'unfinished"; expected '),
    ],
)
def test_read_config_text_that_is_no_model_config_gives_line_and_column(
    tmp_path: Path, text: str, place: str, error: str
) -> None:
    with pytest.raises(ModelError, match="^" + re.escape(f"{tmp_path}/resnet/config.pbtxt:{place}: {error}")):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["ensemble_scheduling { step {} }", "input {}", "version_policy { specific {} }"])
def test_read_config_message_without_what_it_needs_raises_model_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match="Object missing required field"):
        read(tmp_path, text)


FRAGMENTS = st.sampled_from([
    "name", "input", "dims", "parameters", "key", ":", "{", "}", "[", "]", "<", ">", ",", ";", "#", "'", '"', "\\x",
    "\\777", "\\ud800", "\xff", "-1", "0x", "-inf", "1e999", "TYPE_FP32", "\n", "[a.b/c]",
])  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text() | st.lists(FRAGMENTS).map(" ".join))
@example("max_batch_size: " + 5000 * "9")
@example("a{" * 5000)
@example("input{" * 5000)
def test_read_config_any_text_is_read_or_raises_model_error(tmp_path: Path, text: str) -> None:
    """An error names the file; what is accepted is what protobuf itself reads."""
    config, message = None, ""
    try:
        config = read(tmp_path, text)
    except ModelError as error:
        message = str(error)
    if config is None:
        assert message.startswith(f"{tmp_path}/resnet/config.pbtxt")
    else:
        assert config.platform == text_format.Parse(text, messages.ModelConfig()).platform


TENSORS = st.fixed_dictionaries(
    {"name": st.text(min_size=1), "data_type": st.sampled_from(["TYPE_FP32", "TYPE_STRING", "TYPE_BF16"])},
    optional={"dims": st.lists(st.integers(-1, 2**62), min_size=1)},
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "platform": st.text(min_size=1),
        "max_batch_size": st.integers(0, 2**31 - 1),
        "input": st.lists(TENSORS, min_size=1),
        "parameters": st.dictionaries(st.text(), st.fixed_dictionaries({"string_value": st.text()}), min_size=1),
        "dynamic_batching": st.fixed_dictionaries({"max_queue_delay_microseconds": st.integers(1, 2**64 - 1)}),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS)
def test_write_config_any_fields_read_back(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = read(tmp_path, write_config(fields))
    assert config.platform == fields.get("platform", "")
    assert config.max_batch_size == fields.get("max_batch_size")
    assert [(it.name, it.data_type, list(it.dims)) for it in config.input] == [
        (it["name"], it["data_type"], it.get("dims", [])) for it in fields.get("input", [])
    ]
    assert {key: it.string_value for key, it in config.parameters.items()} == {
        key: it["string_value"] for key, it in fields.get("parameters", {}).items()
    }
    if "dynamic_batching" in fields:
        assert config.dynamic_batching == DynamicBatching(**fields["dynamic_batching"])


def fields_of(descriptor: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Every field of a message and of those in it, by path."""
    found: dict[str, Any] = {}
    for field in descriptor.fields:
        inner = f"{path}.{field.name}" if path else field.name
        found[inner] = field
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            message = message.fields_by_name["value"].message_type
        if message is not None and depth < 6:
            found |= fields_of(message, inner, depth + 1)
    return found


def test_every_field_of_triton_has_a_fate_that_the_reference_tells() -> None:
    known = fields_of(messages.ModelConfig.DESCRIPTOR)
    assert FIELDS.keys() <= known.keys()
    assert {path for path in known if "." not in path} <= FIELDS.keys()
    reference = (Path(__file__).parent.parent.parent / "docs" / "reference.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (honoured|ignored|refused) \| (.+) \|$", reference, re.M)
    assert rows == [(path, use.use.value, use.why) for path, use in FIELDS.items()]


def test_every_field_that_is_honoured_is_read_and_every_other_is_not() -> None:
    """Of the fields that `Config` has, none is said to be ignored or refused."""

    def read_by(kind: Any, path: str = "") -> set[str]:
        found = set()
        for name in kind.__struct_fields__:
            inner = f"{path}.{name}" if path else name
            found.add(inner)
            hint = typing.get_type_hints(kind)[name]
            for part in (hint, *typing.get_args(hint)):
                if isinstance(part, type) and issubclass(part, msgspec.Struct):
                    found |= read_by(part, inner)
        return found - {"fields"}

    refused_or_ignored = {path for path, use in FIELDS.items() if use.use is not Use.HONOURED}
    read_ = read_by(Config)
    leaves = {path for path in read_ if not any(other.startswith(f"{path}.") for other in read_)}
    assert leaves and not leaves & refused_or_ignored


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("max_batch_size: 4", {"max_batch_size": Use.HONOURED}),
        ("instance_group { count: 2 kind: KIND_GPU gpus: [0] }", {"instance_group": Use.IGNORED}),
        ('parameters { key: "instance_group" value { string_value: "x" } }', {"parameters": Use.HONOURED}),
        (
            "optimization { cuda { graphs: true busy_wait_events: true } }",
            {"optimization.cuda.graphs": Use.HONOURED, "optimization.cuda": Use.HONOURED},
        ),
        (
            "dynamic_batching { preferred_batch_size: [4, 8] default_queue_policy { max_queue_size: 3 } }",
            {
                "dynamic_batching.preferred_batch_size": Use.IGNORED,
                "dynamic_batching.default_queue_policy.max_queue_size": Use.IGNORED,
            },
        ),
        ("model_transaction_policy { decoupled: false }", {"model_transaction_policy": Use.HONOURED}),
    ],
)
def test_uses_of_the_fields_that_are_set(tmp_path: Path, text: str, uses: dict[str, Use]) -> None:
    assert {path: use.use for path, use in uses_of(read(tmp_path, text).fields).items()} == uses


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "model_transaction_policy { decoupled: true }",
            "decoupled is not supported: a request has",
        ),
        ('model_repository_agents { agents { name: "checksum" } }', "agents, which may have to verify or decrypt"),
        ("dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 1 } } }", "they share one timeout"),
        (
            "dynamic_batching { default_queue_policy { timeout_action: DELAY } }",
            "timeout_action DELAY is not supported",
        ),
        ('cc_model_filenames { key: "8.0" value: "a.onnx" }', "cc_model_filenames is not supported"),
    ],
)
def test_field_whose_loss_would_matter_keeps_the_model_out(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ModelError, match=re.escape(reason)):
        read(tmp_path, text)
