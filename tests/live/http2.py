"""A connection of gRPC without sockets, and frames of HTTP/2 as callers send them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import hpack
import numpy as np

from cotenant.live.grpc import GrpcServer, frames
from cotenant.live.grpc.connection import Connection
from cotenant.live.grpc.frames import frame
from cotenant.protocol import messages
from tests.live.stub import StubCore

INFER = b"/inference.GRPCInferenceService/ModelInfer"
STREAM = b"/inference.GRPCInferenceService/ModelStreamInfer"
END = frames.END_STREAM
WHOLE = frames.END_HEADERS
LAST = WHOLE | END
HELLO = frames.PREFACE + frame(frames.SETTINGS, 0, 0)

Fields = list[tuple[bytes, bytes]]


class Transport:
    """What the server writes, instead of a socket."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent += data

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str) -> Any:
        return None


class Wire:
    """A connection to a server without sockets, whose loop turns when `turn` is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: StubCore, **options: Any) -> None:
        self.loop = loop
        self.server = GrpcServer(core, **options)
        self.transport = Transport()
        self.decoder = hpack.Decoder()
        self.protocol = self.open(self.transport)

    def open(self, transport: Transport) -> Connection:
        async def connect() -> Any:
            protocol = self.server.connect()
            protocol.connection_made(transport)  # type: ignore[arg-type]
            return protocol

        opened = self.loop.run_until_complete(connect())
        assert isinstance(opened, Connection)
        return opened

    def turn(self) -> None:
        """Let everything happen that may happen now."""
        self.loop.run_until_complete(self._turns())

    async def _turns(self) -> None:
        for _ in range(32):
            await asyncio.sleep(0)

    def say(self, *data: bytes) -> list[tuple[int, int, int, bytes]]:
        """Send bytes, and return the frames of the answer: type, flags, stream, payload."""
        self.protocol.data_received(b"".join(data))
        self.turn()
        return self.heard()

    def wait(self) -> list[tuple[int, int, int, bytes]]:
        """Wait for what a thread works at, and return the frames of the answer."""
        until = time.monotonic() + 30
        while not self.transport.sent and time.monotonic() < until:
            time.sleep(0.01)
            self.turn()
        return self.heard()

    def heard(self) -> list[tuple[int, int, int, bytes]]:
        """Return the frames that have been sent since they were last asked for."""
        sent, self.transport.sent = self.transport.sent, b""
        answer = []
        while sent:
            head, flags, stream = frames.HEAD.unpack_from(sent)
            end = 9 + (head >> 8)
            answer.append((head & 0xFF, flags, stream, sent[9:end]))
            sent = sent[end:]
        return answer

    def hello(self, *data: bytes) -> None:
        self.say(HELLO, *data)

    def trailers(self, answer: list[tuple[int, int, int, bytes]], stream: int = 1) -> dict[bytes, bytes]:
        """Return all headers that an answer has for a stream."""
        return {
            name: value
            for kind, _, number, payload in answer
            if kind == frames.HEADERS and number == stream
            for name, value in self.decoder.decode(payload, raw=True)
        }


def block(path: bytes = INFER, *more: tuple[bytes, bytes], drop: bytes = b"", **changed: bytes) -> bytes:
    """Return headers of a call, none of them put into the table."""
    fields: Fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    fields = [(name, changed.get(name.decode().strip(":"), value)) for name, value in fields if name != drop]
    return raw(fields)


def raw(fields: Fields) -> bytes:
    return b"".join([b"\0" + length(name) + name + length(value) + value for name, value in fields])


def length(text: bytes) -> bytes:
    """Return a length as HPACK has it, without Huffman's code."""
    if len(text) < 0x7F:
        return bytes((len(text),))
    rest, size = b"\x7f", len(text) - 0x7F
    while size > 0x7F:
        rest, size = rest + bytes((size & 0x7F | 0x80,)), size >> 7
    return rest + bytes((size,))


def message(model: str = "identity", pairs: int = 1, **fields: Any) -> bytes:
    """Return a request of numbers from 0 on, with gRPC's prefix."""
    data = np.arange(2 * pairs, dtype=np.float32).tobytes()
    request = messages.ModelInferRequest(
        model_name=model,
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 2 * pairs]}],
        raw_input_contents=[data],
        **fields,
    )
    return prefixed(request.SerializeToString())


def prefixed(wire: bytes, packed: int = 0) -> bytes:
    return bytes((packed,)) + len(wire).to_bytes(4, "big") + wire


def call(stream: int = 1, body: bytes | None = None, head: bytes | None = None) -> bytes:
    return frame(frames.HEADERS, WHOLE, stream, head or block()) + frame(
        frames.DATA, END, stream, message() if body is None else body
    )


def answers(wire: Wire, answer: list[tuple[int, int, int, bytes]], stream: int = 1) -> list[bytes]:
    """Return the messages of an answer."""
    data = b"".join(payload for kind, _, number, payload in answer if kind == frames.DATA and number == stream)
    found = []
    while data:
        end = 5 + int.from_bytes(data[1:5], "big")
        found.append(data[5:end])
        data = data[end:]
    return found


def floats(wire: bytes) -> list[float]:
    (data,) = messages.ModelInferResponse.FromString(wire).raw_output_contents
    return [float(number) for number in np.frombuffer(data, np.float32)]
