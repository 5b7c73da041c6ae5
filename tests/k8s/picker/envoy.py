"""Messages as Envoy sends and reads them: its own classes, not ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc_pb2
from google.protobuf import struct_pb2

ProcessingRequest = ext_proc_pb2.ProcessingRequest
Mode = processing_mode_pb2.ProcessingMode


def headers(path: str, mode: int | None, *, ended: bool = False, subset: Any = None, **more: str) -> Any:
    """What Envoy sends first. mode: of bodies, in both directions; None: an Envoy that tells none."""
    message = ProcessingRequest()
    values: Mapping[str, str] = {":method": "POST", ":path": path, "content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in more.items()
    }
    for name, value in values.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ended
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = mode
    if subset is not None:
        hint = struct_pb2.Struct()
        hint.update({"x-gateway-destination-endpoint-subset": subset})
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return message


def body(data: bytes, *, last: bool = False) -> Any:
    return ProcessingRequest(request_body=ext_proc_pb2.HttpBody(body=data, end_of_stream=last))


def trailers() -> Any:
    return ProcessingRequest(request_trailers=ext_proc_pb2.HttpTrailers(trailers=base_pb2.HeaderMap()))


def destination(answer: Any) -> str:
    """The addresses that an answer names, the same in header and metadata."""
    kind = answer.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), answer
    options = getattr(answer, kind).response.header_mutation.set_headers
    [option] = [each for each in options if each.header.key == "x-gateway-destination-endpoint"]
    assert option.append_action == base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    told: str = option.header.raw_value.decode()
    assert dict(answer.dynamic_metadata["envoy.lb"]) == {"x-gateway-destination-endpoint": told}
    return told


def streamed(answers: Collection[Any], kind: str = "request_body") -> list[tuple[bytes, bool]]:
    """The chunks that are sent back."""
    chunks = [getattr(answer, kind).response.body_mutation.streamed_response for answer in answers]
    return [(chunk.body, chunk.end_of_stream) for chunk in chunks]


def header_values(mutation: Any) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
