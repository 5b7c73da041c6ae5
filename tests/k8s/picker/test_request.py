"""Which model a request is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.k8s.picker.request import MAX_FIELDS, RequestHead, model_in_grpc, model_in_json, read_head
from cotenant.protocol import messages


def head(path: str, content_type: str = "application/json", method: str = "POST", **more: str) -> RequestHead:
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return read_head({":path": path, ":method": method, "content-type": content_type, **named})


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v2/models/resnet/infer", "resnet"),
        ("/v2/models/resnet/versions/3/infer?x=1", "resnet"),
        ("/v2/models/a%2Fb/generate", "a/b"),
        ("/v2/models/resnet/generate_stream", "resnet"),
    ],
)
def test_read_head_finds_the_model_in_the_path(path: str, model: str) -> None:
    assert head(path) == RequestHead(model, False, False, None)


@pytest.mark.parametrize("path", ["/v2/models/resnet", "/v2/models/resnet/ready", "/v2/health/ready", "/metrics", "/"])
def test_read_head_of_what_is_no_inference_names_none(path: str) -> None:
    assert head(path, method="GET") == RequestHead(None, False, False, None)


def test_read_head_of_json_elsewhere_looks_into_the_body() -> None:
    assert head("/v1/chat/completions") == RequestHead(None, True, False, None)
    assert not head("/v1/models", method="GET").in_body
    assert not head("/v1/audio", content_type="multipart/form-data").in_body


def test_read_head_prefers_the_header_of_a_body_based_router() -> None:
    assert head("/v1/completions", x_gateway_model_name="llama") == RequestHead("llama", False, False, None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("100m", 0.1), ("2S", 2.0), ("1H", 3600.0), ("", None), ("x", None), ("123456789m", None)]
)
def test_read_head_of_grpc_has_the_callers_timeout(text: str, seconds: float | None) -> None:
    path = "/inference.GRPCInferenceService/ModelInfer"
    assert head(path, "application/grpc+proto", grpc_timeout=text) == RequestHead(None, True, True, seconds)


def test_read_head_of_other_calls_of_grpc_names_none() -> None:
    assert head("/grpc.health.v1.Health/Check", "application/grpc") == RequestHead(None, False, True, None)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"messages": [{"model": "no"}], "model": "yes"}', "yes"),
        (b'{"prompt": 1}', None),
        (b'{"model": 3}', None),
        (b"[1]", None),
        (b'{"model": "cut', None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_model_in_json(body: bytes, model: str | None) -> None:
    assert model_in_json(body) == model


def wire(name: str = "resnet", *, prefixed: bool = True, **fields: object) -> bytes:
    message = messages.ModelInferRequest(model_name=name, model_version="1", id="x" * 40, **fields)
    data: bytes = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data if prefixed else data


@pytest.mark.parametrize("prefixed", [True, False])
def test_model_in_grpc(prefixed: bool) -> None:
    assert model_in_grpc(wire(prefixed=prefixed), prefixed=prefixed, ended=False) == ("resnet", True)


def test_model_in_grpc_behind_other_fields() -> None:
    fields = b"\x1a\x02id" + b"\x30\x05" + b"\x3d\0\0\0\0" + b"\x41\0\0\0\0\0\0\0\0" + b"\x0a\x03abc"
    assert model_in_grpc(b"\0\0\0\0" + bytes([len(fields)]) + fields, prefixed=True, ended=False) == ("abc", True)


def test_model_in_grpc_looks_no_further_than_some_fields() -> None:
    """A body may have millions, and is read again with each chunk."""
    for many, model in ((MAX_FIELDS - 1, "abc"), (MAX_FIELDS, None)):
        fields = many * b"\x30\x05" + b"\x0a\x03abc"
        body = b"\0" + len(fields).to_bytes(4, "big") + fields
        assert model_in_grpc(body, prefixed=True, ended=False) == (model, True)
    endless = b"\0\0\xff\xff\xff" + (MAX_FIELDS + 1) * b"\x30\x05"
    assert model_in_grpc(endless, prefixed=True, ended=False) == (None, True)


def test_model_in_grpc_waits_for_the_rest_of_a_message() -> None:
    whole = wire()
    answers = [model_in_grpc(whole[:size], prefixed=True, ended=False) for size in range(len(whole))]
    assert answers[0] == answers[5 + 2 + 5] == (None, False)
    assert answers[5 + 2 + 6] == ("resnet", True)


def test_model_in_grpc_without_one_names_none() -> None:
    assert model_in_grpc(wire(""), prefixed=True, ended=False) == (None, True)
    assert model_in_grpc(b"\1\0\0\0\5abcde", prefixed=True, ended=False) == (None, True)  # compressed
    assert model_in_grpc(b"\0\0", prefixed=True, ended=True) == (None, True)
    assert model_in_grpc(b"\0\0\0\0\4\x0a\x02\xff\xff", prefixed=True, ended=False) == (None, True)
    assert model_in_grpc(b"\0\0\0\0\1\x0f", prefixed=True, ended=False) == (None, True)  # no kind of a field


@given(st.binary(max_size=60), st.booleans(), st.booleans())
def test_model_in_grpc_reads_any_bytes(body: bytes, prefixed: bool, ended: bool) -> None:
    model, certain = model_in_grpc(body, prefixed=prefixed, ended=ended)
    assert model is None or certain
    assert certain or not ended
