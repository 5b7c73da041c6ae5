"""The reader of protobuf text, also against protobuf's own."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.errors import ModelError
from cotenant.worker import pbtxt


def read(text: str, *repeated: str) -> pbtxt.Message:
    return pbtxt.read_pbtxt(text, repeated, "config.pbtxt")


def test_a_config_as_people_write_it() -> None:
    text = """
    # The name of the folder.
    name: "resnet"  platform: 'onnxruntime_onnx';
    max_batch_size: 8,
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1, 0x10 ] } ]
    output { name: "y" dims: 10 dims: 2 }
    version_policy: { all { } }
    dynamic_batching < max_queue_delay_microseconds: 100 >
    parameters { key: "a" value: { string_value: "b" } }
    parameters { key: "empty" }
    optimization { priority: PRIORITY_MAX, level: -1.5e3 eager: true ratio: .5f none: -inf }
    """
    assert read(text, "input", "output", "dims") == {
        "name": "resnet",
        "platform": "onnxruntime_onnx",
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1, 16]}],
        "output": [{"name": "y", "dims": [10, 2]}],
        "version_policy": {"all": {}},
        "dynamic_batching": {"max_queue_delay_microseconds": 100},
        "parameters": {"a": {"string_value": "b"}, "empty": {}},
        "optimization": {
            "priority": "PRIORITY_MAX", "level": -1500.0, "eager": True, "ratio": 0.5, "none": float("-inf")
        },
    }  # fmt: skip


def test_strings() -> None:
    assert read(r"""s: "a\n\"\x41\101" 'é\u00e9' "\303\251" """) == {"s": 'a\n"AAééé'}
    assert read('s: ""') == {"s": ""}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nb: ?", "config.pbtxt:2: cannot read '?'"),
        ("a: 1\n\nb {\n", "config.pbtxt:4: 'the end' where a field or '}' was due"),
        ("a 1", "config.pbtxt:1: '1' where ':' or '{' was due"),
        ("a: }", "config.pbtxt:1: '}' where a value was due"),
        ("a: -b", "config.pbtxt:1: 'b' where a number was due"),
        ("}", "config.pbtxt:1: '}' where a field was due"),
        ("a: [1 2]", "config.pbtxt:1: '2' where ',' or ']' was due"),
        ("a: 5x", "config.pbtxt:1: cannot read '5x'"),
        ('a: "unfinished\n', "config.pbtxt:1: cannot read '\"unfinished'"),
        (r'a: "\q"', r'config.pbtxt:1: no escape \q in "\q"'),
        (r'a: "\777"', r'config.pbtxt:1: no such character in "\777"'),
        (r'a: "\xff"', "config.pbtxt:1: a string that is not UTF-8"),
        (r'a: "\ud800"', r'config.pbtxt:1: no such character in "\ud800"'),
        ("a: " + 5000 * "9", "config.pbtxt:1: a number of 5000 digits"),
        ("a{" * 5000, "config.pbtxt:1: 'a' where no message nested more than 100 deep was due"),
    ],
)
def test_an_error_gives_the_line(text: str, error: str) -> None:
    with pytest.raises(ModelError, match=f"^{re.escape(error)}; expected protobuf text, such as `max_batch_size: 8`$"):
        read(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ModelError):
        read(text)


NAMES = st.sampled_from(["name", "dims", "value_2", "X"])
SCALARS = st.text() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False)
MESSAGES = st.recursive(
    st.dictionaries(NAMES, SCALARS),
    lambda inner: st.dictionaries(NAMES, SCALARS | inner | st.lists(SCALARS, min_size=2) | st.lists(inner, min_size=2)),
    max_leaves=20,
)


@given(MESSAGES)
def test_what_is_written_reads_back(message: dict[str, Any]) -> None:
    assert read(pbtxt.write_pbtxt(message)) == message


def test_agrees_with_protobuf() -> None:
    """On `FileDescriptorProto`, a schema that protobuf itself brings."""
    from google.protobuf import descriptor_pb2, json_format, text_format

    text = r"""
    name: "a\tb" 'c' package: "\u00e9"
    dependency: ["x", "y"] dependency: "z"
    message_type { name: "M" field < name: "f" number: 0x1F label: LABEL_OPTIONAL > field { number: 017 } }
    options: { cc_enable_arenas: true }
    """
    theirs = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    ours = read(text, "dependency", "message_type", "field")
    assert ours == json_format.MessageToDict(theirs, preserving_proto_field_name=True)
