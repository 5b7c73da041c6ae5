"""Read from a request which model it is for, and how long its caller waits.

The name stands in a header, in the path (the Open Inference Protocol over HTTP), or in the body: JSON with `model`, as
OpenAI's clients send it, or the message of gRPC's ModelInfer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

import msgspec

MODEL_HEADER: Final = "x-gateway-model-name"  # from a body-based router before us

_INFERENCE = re.compile(r"/v2/models/([^/?]+)(?:/versions/[^/?]+)?/(?:infer|generate|generate_stream)(?:\?.*)?")
_GRPC_INFERENCE: Final = (
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelStreamInfer",
)
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_PREFIX: Final = 5  # bytes before a message of gRPC: whether it is compressed, and its length
_MODEL_NAME: Final = 1  # field of ModelInferRequest
MAX_FIELDS: Final = 100  # of a message that are looked at, again with each chunk: encoders put the name first


class RequestHead(msgspec.Struct, frozen=True):
    """What the headers of a request tell. model: None for none. in_body: the body names it. grpc: it is a call of gRPC.
    timeout: seconds that the caller waits; None for any time."""

    model: str | None
    in_body: bool
    grpc: bool
    timeout: float | None


class _Body(msgspec.Struct):
    model: str | None = None


_decode_body = msgspec.json.Decoder(_Body).decode


def read_head(headers: Mapping[str, str]) -> RequestHead:
    """Read the headers of a request, by name in lower case."""
    content_type = headers.get("content-type", "")
    path = headers.get(":path", "")
    grpc = content_type.startswith("application/grpc")
    timeout = _read_timeout(headers.get("grpc-timeout", "")) if grpc else None
    model = headers.get(MODEL_HEADER)
    if model:
        return RequestHead(model, False, grpc, timeout)
    if grpc:
        return RequestHead(None, path in _GRPC_INFERENCE, True, timeout)
    match = _INFERENCE.fullmatch(path)
    if match is not None:
        return RequestHead(unquote(match[1]), False, False, None)
    names_model = headers.get(":method") == "POST" and "json" in content_type and not path.startswith("/v2/")
    return RequestHead(None, names_model, False, None)


def _read_timeout(text: str) -> float | None:
    match = _TIMEOUT.fullmatch(text)
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def model_in_json(body: bytes | bytearray) -> str | None:
    """Return the model that a body of JSON names; None where there is none, or no JSON."""
    try:
        return _decode_body(body).model
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def model_in_grpc(body: bytes | bytearray, *, prefixed: bool, ended: bool) -> tuple[str | None, bool]:
    """Return the model that a call's first message names, and whether that is certain: more of the message may have to
    come. prefixed: the message has gRPC's prefix. What is compressed or broken names none, nor does what has more than
    `MAX_FIELDS` fields before the name."""
    position = _PREFIX if prefixed else 0
    if len(body) < position:
        return None, ended
    if prefixed and body[0]:
        return None, True
    end = position + int.from_bytes(body[1:_PREFIX], "big") if prefixed else len(body)
    complete = len(body) >= end
    try:
        for _ in range(MAX_FIELDS):
            if position >= end:
                break
            key, position = _varint(body, position)
            field, kind = key >> 3, key & 7
            size = 0
            if kind == 0:
                _, position = _varint(body, position)
            elif kind == 1:
                size = 8
            elif kind == 2:
                size, position = _varint(body, position)
            elif kind == 5:
                size = 4
            else:
                return None, True
            if position + size > len(body):
                break
            if field == _MODEL_NAME and kind == 2:
                return body[position : position + size].decode(), True
            position += size
        else:
            return None, True
    except (IndexError, UnicodeDecodeError) as error:
        return None, isinstance(error, UnicodeDecodeError) or complete or ended
    return None, complete or ended


def _varint(data: bytes | bytearray, position: int) -> tuple[int, int]:
    """Return a number, and where the next begins. Raises IndexError where it goes on beyond the data."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError
