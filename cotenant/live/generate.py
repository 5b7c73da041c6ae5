"""Translate Triton's generate extension: a JSON object of inputs by name, and one of outputs.

A value is what an input holds: a number, a text or a list. It gets the dimensions that the input lacks, of size 1; an
output of one element is that element. What is no input is a parameter of the request, as what `parameters` holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import CotenantError, InvalidError, MalformedError
from cotenant.live.codec import InputTensor, check_json_outputs, listed, read_tensor
from cotenant.live.limits import MAX_GENERATE, MAX_JSON_ANSWER, MAX_RANK
from cotenant.live.oip import Data, InferRequest, InferResponse, check_request, public_message, scheduling

EVENTS = "text/event-stream; charset=utf-8"

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_scalar = msgspec.json.Decoder(bool | int | float | str | None)
_any = msgspec.json.Decoder()


def decode_generate(body: Data, info: ModelInfo) -> InferRequest:
    """Return the request for a model, checked against it. Raises MalformedError, InvalidError."""
    if len(body) > MAX_GENERATE:
        raise InvalidError(f"a request of {len(body)} bytes to generate; at most {MAX_GENERATE} are read, use infer")
    given = _decoded(body)
    specs = {spec.name: spec for spec in info.inputs}
    request_id = _parameter("id", given.pop("id")) if "id" in given and "id" not in specs else ""
    if "parameters" in given and "parameters" not in specs:
        given = _decoded(given.pop("parameters")) | given
    tensors = [_tensor(specs[name], raw, info) for name, raw in given.items() if name in specs]
    check_request(info, tensors, ())
    parameters = {name: _parameter(name, raw) for name, raw in given.items() if name not in specs}
    timeout, priority = scheduling(parameters)
    request = InferRequest(
        model=info.name,
        version=info.version,
        id=str(request_id),
        inputs=tuple(map(read_tensor, tensors)),
        timeout=timeout,
        priority=priority,
        parameters=parameters,
    )
    check_json_outputs(info)
    return request


def encode_generate(request: InferRequest, response: InferResponse) -> bytes:
    """Return the JSON of a response. Raises InvalidError for an output that JSON cannot carry."""
    answer: dict[str, Any] = {"id": request.id} if request.id else {}
    answer |= {"model_name": response.model, "model_version": response.version}
    room = MAX_JSON_ANSWER
    for tensor in response.outputs:
        values = listed(tensor, room)
        if isinstance(values, msgspec.Raw):
            room -= len(memoryview(values))
        if math.prod(tensor.shape) != 1:
            answer[tensor.name] = values
        elif isinstance(values, msgspec.Raw):
            answer[tensor.name] = msgspec.Raw(bytes(values)[1:-1])
        else:
            answer[tensor.name] = values[0]
    return msgspec.json.encode(answer)


def event(data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: %s\n\n" % data


def error_event(error: CotenantError) -> bytes:
    """Return an error as Triton sends it in a stream, whose status was sent before."""
    return event(msgspec.json.encode({"error": public_message(error)}))


def _decoded(body: Data | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return _object.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError(f"not an object of inputs by name: {error}") from None
    except RecursionError:
        raise MalformedError("not an object of inputs by name: it is nested too deeply") from None


def _parameter(name: str, raw: msgspec.Raw) -> bool | int | float | str:
    try:
        value = _scalar.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidError(
            f"{name!r} is not an input of the model, and a parameter is a number, a text or a flag"
        ) from None
    return "" if value is None else value


def _tensor(spec: TensorSpec, raw: msgspec.Raw, info: ModelInfo) -> InputTensor:
    shape = _shape(spec.name, raw)
    data = raw if shape else msgspec.Raw(b"[" + bytes(raw) + b"]")
    missing = len(spec.shape) - len(shape)
    return InputTensor(spec.name, (*[1] * missing, *shape), spec.datatype, data)


def _shape(name: str, raw: msgspec.Raw) -> tuple[int, ...]:
    """Return the dimensions of nested lists, by the first of each level; reading the data finds what differs."""
    try:
        value = _any.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"input {name!r} cannot be read: {error}") from None
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        if len(shape) > MAX_RANK:
            raise MalformedError(f"input {name!r} is nested in more than {MAX_RANK} levels")
        value = value[0] if value else None
    if isinstance(value, Mapping):
        raise MalformedError(f"input {name!r} is an object; give a number, a text or a list")
    return tuple(shape)
