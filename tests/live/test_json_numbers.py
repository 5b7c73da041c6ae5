"""Long lists of numbers in JSON: read as short ones are, a piece at a time."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.errors import InvalidError
from cotenant.live import codec, json_numbers
from cotenant.live.codec import _flat, _items, listed
from cotenant.live.elements import pack_strings
from cotenant.live.generate import decode_generate, encode_generate
from cotenant.live.json_numbers import packed_numbers
from cotenant.live.limits import MAX_GENERATE
from cotenant.live.oip import InferRequest, InferResponse

REFUSED = [
    *("[[1,2],[3]]", "[[1,2],3]", "[[1],2]", "[[1],[[2]]]", "[1,[2,3],4]", "[[1,2],[3,null]]", "[[],[]]", "[[1],[]]"),
    *("[[[1,2],[3,4]],[[5,6]]]", '{"a":1}', "7", '"[1,2]"', '["[1","2]"]', '[["a"],["b"]]', "[" * 40 + "1" + "]" * 40),
]
NUMBERS = st.integers(-(2**31), 2**31 - 1)


def nested(depth: int) -> st.SearchStrategy[Any]:
    return NUMBERS if depth == 0 else st.lists(nested(depth - 1), min_size=1, max_size=4)


def regular(shape: tuple[int, ...], first: int = 0) -> Any:
    if not shape:
        return first
    return [regular(shape[1:], first * shape[0] + n) for n in range(shape[0])]


def read(text: str, expected: int, kind: str = "INT32") -> tuple[int, bytes]:
    count, packed = packed_numbers(msgspec.Raw(text.encode()), _flat[kind], "i", expected)
    return count, bytes(packed)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes."""
    monkeypatch.setattr(json_numbers, "PIECE", 5)
    monkeypatch.setattr(json_numbers, "_BLOCK", 7)


@pytest.mark.usefixtures("small")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.integers(1, 4).flatmap(nested) | st.lists(NUMBERS | st.lists(NUMBERS, max_size=2), max_size=4),
    spaces=st.sampled_from([(",", ":"), (", ", ": "), (" , ", ":"), (",\n", ":")]),
)
def test_numbers_are_those_that_a_short_list_gives_and_so_are_the_errors(
    value: list[Any], spaces: tuple[str, str]
) -> None:
    text = json.dumps(value, separators=spaces)
    try:
        items = _items(msgspec.Raw(text.encode()), "INT32", _flat["INT32"])
    except (TypeError, ValueError, msgspec.DecodeError):
        with pytest.raises((TypeError, ValueError, msgspec.DecodeError)):
            read(text, 1)
        return
    if items:
        assert read(text, len(items)) == (len(items), struct.pack(f"<{len(items)}i", *items))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(40,), (1, 30), (30, 1), (5, 6), (2, 3, 4), (3, 1, 2, 2)])
def test_nested_lists_of_any_depth_are_read(shape: tuple[int, ...]) -> None:
    value = regular(shape)
    flat = _items(msgspec.Raw(json.dumps(value).encode()), "INT32", _flat["INT32"])
    assert read(json.dumps(value, indent=1), len(flat)) == (len(flat), struct.pack(f"<{len(flat)}i", *flat))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_list_of_numbers_in_equal_rows_is_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError, msgspec.DecodeError)):
        read(text, 4)


@pytest.mark.usefixtures("small")
def test_numbers_that_are_more_or_fewer_than_the_shape_has_take_no_memory() -> None:
    assert read("[1,2,3,4,5,6]", 2)[0] == 6
    count, packed = packed_numbers(msgspec.Raw(b"[1,2,3]"), _flat["INT32"], "i", 1 << 40)
    assert (count, len(packed)) == (3, 0)


def test_other_threads_run_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(json_numbers, "_let_others_run", lambda: pauses.append(1))
    text = json.dumps([[1, 2]] * 50_000, separators=(",", ":"))
    assert read(text, 100_000)[0] == 100_000
    assert len(pauses) >= len(text) / json_numbers.PIECE


LARGE = 70_000  # elements of more bytes than the event loop writes


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
def test_large_output_is_written_in_pieces_as_a_small_one_is(datatype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(json_numbers, "_let_others_run", lambda: pauses.append(1))
    if datatype == "BYTES":
        expected: list[Any] = [f'"{n}"\n' for n in range(LARGE)]
        data = pack_strings([text.encode() for text in expected])
    else:
        numbers = (np.arange(4 * LARGE) % 251 / 2).astype(DTYPES[datatype])
        expected, data = numbers.tolist(), numbers.tobytes()
    output = Tensor("y", datatype, (1, len(expected)), data)
    written = listed(output)
    assert isinstance(written, msgspec.Raw) and json.loads(bytes(written)) == expected
    assert len(pauses) >= len(expected) / json_numbers.VALUES
    with pytest.raises(InvalidError, match=r"^output 'y' takes more than the 67108864 bytes of JSON .* binary_data$"):
        listed(output, len(bytes(written)) - 1)


def test_output_that_is_shorter_as_json_is_written() -> None:
    output = Tensor("y", "INT64", (1, LARGE), bytes(8 * LARGE))
    written = listed(output, 2 * LARGE + 1)
    assert isinstance(written, msgspec.Raw) and len(bytes(written)) == 2 * LARGE + 1


def test_outputs_of_a_response_share_what_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.full(LARGE, 0.5, np.float32).tobytes()
    outputs = tuple(Tensor(name, "FP32", (1, LARGE), data) for name in ("y", "z"))
    specs = tuple(TensorSpec(output.name, "FP32", (1, LARGE)) for output in outputs)
    info = ModelInfo(name="m", version="1", platform="", inputs=(), outputs=specs, max_batch_size=1)
    request, response = InferRequest(model="m", inputs=()), InferResponse(model="m", version="1", outputs=outputs)
    size = len(json.dumps([0.5] * LARGE, separators=(",", ":")))
    monkeypatch.setattr(codec, "MAX_JSON_ANSWER", 2 * size)
    text, _ = codec.encode(request, response, info, codec.ResponseFormat())
    assert [output["data"] for output in json.loads(text)["outputs"]] == [[0.5] * LARGE] * 2
    monkeypatch.setattr(codec, "MAX_JSON_ANSWER", 2 * size - 1)
    with pytest.raises(InvalidError, match=r"^output 'z'"):
        codec.encode(request, response, info, codec.ResponseFormat())


def test_long_text_is_generated_as_a_short_one_is() -> None:
    for text in ("a", "\u20ac" * LARGE * 2):
        output = Tensor("y", "BYTES", (1, 1), pack_strings([text.encode()]))
        response = InferResponse(model="m", version="1", outputs=(output,))
        answer = json.loads(encode_generate(InferRequest(model="m", inputs=()), response))
        assert answer == {"model_name": "m", "model_version": "1", "y": text}


def test_long_request_to_generate_is_refused_unread() -> None:
    """Its shape is read from all of it, which took a second where it was lists of nothing."""
    info = ModelInfo(name="m", version="1", platform="", inputs=(), outputs=(), max_batch_size=1)
    body = b'{"x":[' + b"[]," * (MAX_GENERATE // 3) + b"[]]}"
    with pytest.raises(InvalidError, match=f"to generate; at most {MAX_GENERATE} are read, use infer$"):
        decode_generate(body, info)
