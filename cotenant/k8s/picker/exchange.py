"""Speak Envoy's external processing for one HTTP request: messages in, messages out.

The endpoint-picker protocol 1.0 says how a destination is told (header and dynamic metadata alike), which replicas the
gateway allows (the subset hint), and that 503 and 429 are immediate responses. Envoy says which modes there are for
bodies; what matters here:

- `FULL_DUPLEX_STREAMED`, which the protocol asks for: each chunk of a body is sent back, and the answer to the headers
  may wait until the body has named the model;
- `BUFFERED`: the headers are answered first, and the destination goes with the answer to the body;
- without a body, the headers have to do: where they name no model, any replica that is ready is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from cotenant.k8s.picker.picker import Decision, Picked, Rejected, Unavailable
from cotenant.k8s.picker.request import RequestHead, model_in_grpc, model_in_json, read_head
from cotenant.protocol.ext_proc import ext_proc

DESTINATION: Final = "x-gateway-destination-endpoint"
METADATA: Final = "envoy.lb"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
MAX_HELD: Final = 1 << 23  # bytes of a body that are held until it has named the model

_NONE, _STREAMED, _BUFFERED, _BUFFERED_PARTIAL, _DUPLEX, _GRPC = range(6)  # BodySendMode
_OVERWRITE: Final = 2  # HeaderAppendAction: OVERWRITE_IF_EXISTS_OR_ADD
_TOO_LARGE: Final = 413
_TOO_MANY: Final = 429
_UNAVAILABLE: Final = 503
_GRPC_STATUS: Final = {_TOO_LARGE: 8, _TOO_MANY: 8, _UNAVAILABLE: 14}  # RESOURCE_EXHAUSTED, UNAVAILABLE

# model, seconds that the caller waits, addresses to pick from.
Pick = Callable[[str | None, float | None, Collection[str] | None], Decision]


class BrokenMessageError(ValueError):
    """What came is no message of the protocol."""


class Exchange:
    """Answer what Envoy tells of one request.

    done: the request has been answered at once, and nothing more is said about it.
    """

    def __init__(self, pick: Pick) -> None:
        self._pick = pick
        self._head: RequestHead | None = None
        self._subset: Collection[str] | None = None
        self._modes: tuple[int, int] | None = None  # of the bodies of request and response; None: not told
        self._decided = False
        self._waiting = False  # the answer to the headers waits for the body
        self._held: list[tuple[bytes, bool]] = []  # chunks of the body, and whether each is the last
        self._body = bytearray()
        self.done = False

    @property
    def held(self) -> int:
        """The bytes of the body that are held until the model is known."""
        return len(self._body)

    def handle(self, wire: bytes) -> list[bytes]:
        """Take a message; return those that answer it. Raises BrokenMessageError."""
        try:
            message = ext_proc.ProcessingRequest.FromString(wire)
        except DecodeError:
            raise BrokenMessageError(f"not the message {ext_proc.ProcessingRequest.DESCRIPTOR.full_name}") from None
        if self._modes is None and message.HasField("protocol_config"):
            config = message.protocol_config
            self._modes = config.request_body_mode, config.response_body_mode
        if self.done or message.observability_mode:
            return []
        match message.WhichOneof("request"):
            case "request_headers":
                return self._on_headers(message)
            case "request_body":
                return self._on_body(message.request_body.body, message.request_body.end_of_stream)
            case "request_trailers":
                return self._on_trailers()
            case "response_headers":
                return [_RESPONSE_HEADERS]
            case "response_body":
                body = message.response_body
                return [_body_response("response_body", body.body, body.end_of_stream, echo=self._echoes(1))]
            case "response_trailers":
                return [_RESPONSE_TRAILERS]
        return []

    def _echoes(self, direction: int) -> bool:
        return self._modes is not None and self._modes[direction] in (_DUPLEX, _GRPC)

    def _on_headers(self, message: Any) -> list[bytes]:
        headers = {header.key: _value(header) for header in message.request_headers.headers.headers}
        self._head = head = read_head(headers)
        self._subset = _subset(message)
        if head.in_body and not message.request_headers.end_of_stream:
            if self._echoes(0):
                self._waiting = True
                return []
            if self._modes is not None and self._modes[0] in (_BUFFERED, _BUFFERED_PARTIAL):
                return [_REQUEST_HEADERS]
            # A body may come even so, and say better; it does not where Envoy sends none.
            answer = self._decide(None)
            self._decided = self._modes is not None
            return answer
        return self._decide(head.model)

    def _on_body(self, chunk: bytes, last: bool) -> list[bytes]:
        echo = self._echoes(0)
        if self._decided or self._head is None:
            return [_body_response("request_body", chunk, last, echo=echo)]
        self._body += chunk
        self._held.append((chunk, last))
        if len(self._body) > MAX_HELD:
            return self._respond(_TOO_LARGE, f"a body that names its model has at most {MAX_HELD} bytes")
        model, certain = self._read_model(self._head, last=last or not echo)  # without chunks, there is one message
        return self._decide(model) if certain else []

    def _read_model(self, head: RequestHead, *, last: bool) -> tuple[str | None, bool]:
        """Return the model that the body names as far as it is known, and whether that is certain."""
        if head.grpc:
            framed = self._modes is None or self._modes[0] != _GRPC
            return model_in_grpc(self._body, prefixed=framed, ended=last)
        return (model_in_json(self._body) if last else None), last

    def _on_trailers(self) -> list[bytes]:
        answers = []
        if self._waiting and not self._decided and self._head is not None:
            answers = self._decide(self._read_model(self._head, last=True)[0])
        return answers if self.done else [*answers, _REQUEST_TRAILERS]

    def _decide(self, model: str | None) -> list[bytes]:
        assert self._head is not None
        self._decided = True
        decision = self._pick(model, self._head.timeout, self._subset)
        match decision:
            case Picked(addresses):
                return self._send_to(",".join(addresses))
            case Rejected(reason, wait):
                return self._respond(_TOO_MANY, reason, wait)
            case Unavailable(reason):
                return self._respond(_UNAVAILABLE, reason)

    def _send_to(self, destination: str) -> list[bytes]:
        held, self._held = self._held, []
        self._body = bytearray()
        if held and not self._waiting:  # the headers have been answered
            return [_destination("request_body", destination)]
        return [
            _destination("request_headers", destination),
            *(_body_response("request_body", chunk, last, echo=True) for chunk, last in held),
        ]

    def _respond(self, code: int, reason: str, retry_after: float | None = None) -> list[bytes]:
        """Answer the request at once."""
        self.done = True
        self._held.clear()
        self._body = bytearray()
        response = ext_proc.ProcessingResponse()
        immediate = response.immediate_response
        immediate.status.code = code
        immediate.body = msgspec.json.encode({"error": reason})
        immediate.details = f"cotenant_endpoint_picker_{code}"
        headers = {"content-type": "application/json"}
        if retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(retry_after)))
        if self._head is not None and self._head.grpc:
            immediate.grpc_status.status = _GRPC_STATUS[code]
            immediate.body = reason.encode()
            del headers["content-type"]
        for name, value in headers.items():
            _set(immediate.headers, name, value)
        return [response.SerializeToString()]


def _value(header: Any) -> str:
    raw: bytes = header.raw_value
    return raw.decode("utf-8", "replace") if raw else str(header.value)


def _subset(message: Any) -> Collection[str] | None:
    """Return the addresses that the gateway allows; None where it says nothing of it."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_METADATA not in metadata or SUBSET not in metadata[SUBSET_METADATA].fields:
        return None
    value = metadata[SUBSET_METADATA].fields[SUBSET]
    if value.WhichOneof("kind") == "string_value":
        return frozenset(text.strip() for text in value.string_value.split(",") if text.strip())
    return frozenset(each.string_value for each in value.list_value.values)


def _set(mutation: Any, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = _OVERWRITE


@lru_cache(4096)
def _destination(kind: str, destination: str) -> bytes:
    """Return the answer to headers or a body that sends a request to these addresses."""
    response = ext_proc.ProcessingResponse()
    common = getattr(response, kind).response
    common.clear_route_cache = True
    _set(common.header_mutation, DESTINATION, destination)
    response.dynamic_metadata.update({METADATA: {DESTINATION: destination}})
    return bytes(response.SerializeToString())


def _body_response(kind: str, chunk: bytes, last: bool, *, echo: bool) -> bytes:
    if not echo:
        return _BODY[kind]
    response = ext_proc.ProcessingResponse()
    streamed = getattr(response, kind).response.body_mutation.streamed_response
    streamed.body = chunk
    streamed.end_of_stream = last
    return bytes(response.SerializeToString())


def _unchanged(kind: str) -> bytes:
    response = ext_proc.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return bytes(response.SerializeToString())


_REQUEST_HEADERS: Final = _unchanged("request_headers")
_REQUEST_TRAILERS: Final = _unchanged("request_trailers")
_RESPONSE_HEADERS: Final = _unchanged("response_headers")
_RESPONSE_TRAILERS: Final = _unchanged("response_trailers")
_BODY: Final = {kind: _unchanged(kind) for kind in ("request_body", "response_body")}
