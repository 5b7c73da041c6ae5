"""The errors of HTTP/2 by which gRPC ends connections and streams.

The cases follow the sections of RFC 9113, as the conformance suite h2spec does.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest

from cotenant.live.grpc import frames
from cotenant.live.grpc.call import Call
from cotenant.live.grpc.frames import ErrorCode, frame
from cotenant.live.grpc.misuse import MAX_RAPID, MAX_SETTINGS
from tests.live.http2 import (
    END,
    HELLO,
    INFER,
    LAST,
    WHOLE,
    Transport,
    Wire,
    block,
    call,
    length,
    message,
    raw,
)

HEAD = frame(frames.HEADERS, WHOLE, 1, block())
OPEN = HEAD  # a stream whose caller has more to send
DONE = call()
FATAL: dict[str, tuple[bytes, ErrorCode]] = {
    "3.4 no preface": (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "3.4 no settings first": (frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "4.2 frame above the largest": (HELLO + HEAD + frame(frames.DATA, 0, 1, bytes(16385)), ErrorCode.FRAME_SIZE_ERROR),
    "4.3 headers that are none": (HELLO + frame(frames.HEADERS, LAST, 1, b"\xbf\xff"), ErrorCode.COMPRESSION_ERROR),
    "4.3 headers cut short": (HELLO + frame(frames.HEADERS, LAST, 1, b"\x40"), ErrorCode.COMPRESSION_ERROR),
    "4.3 another frame within headers": (
        HELLO + frame(frames.HEADERS, END, 1, block()) + frame(frames.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "4.3 headers go on in another stream": (
        HELLO + frame(frames.HEADERS, END, 1, block()) + frame(frames.CONTINUATION, WHOLE, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.1 data of an idle stream": (HELLO + frame(frames.DATA, END, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "5.1 reset of an idle stream": (HELLO + frame(frames.RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "5.1 window of an idle stream": (HELLO + frames.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
    "5.1 headers of a stream that has ended": (HELLO + DONE + HEAD, ErrorCode.STREAM_CLOSED),
    "5.1.1 stream of even number": (HELLO + frame(frames.HEADERS, LAST, 2, block()), ErrorCode.PROTOCOL_ERROR),
    "5.1.1 stream before the last": (HELLO + call(5) + call(3), ErrorCode.STREAM_CLOSED),
    # A fault of the connection: the headers are not decompressed, and the tables would differ from here on.
    "5.3.1 stream that depends on itself": (
        HELLO + frame(frames.HEADERS, LAST | 0x20, 1, struct.pack(">IB", 1, 0) + block()),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "5.3.1 priority that depends on itself": (
        HELLO + OPEN + frame(frames.PRIORITY, 0, 1, struct.pack(">IB", 1, 0)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.1 data of stream 0": (HELLO + frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "6.1 padding above the frame": (HELLO + HEAD + frame(frames.DATA, 8, 1, b"\5abc"), ErrorCode.PROTOCOL_ERROR),
    "6.1 padding without length": (HELLO + HEAD + frame(frames.DATA, 8, 1), ErrorCode.PROTOCOL_ERROR),
    "6.2 headers of stream 0": (HELLO + frame(frames.HEADERS, LAST, 0, block()), ErrorCode.PROTOCOL_ERROR),
    "6.2 padding above the headers": (
        HELLO + frame(frames.HEADERS, LAST | 8, 1, b"\xff" + block()[:99]),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "6.2 no room for the priority": (HELLO + frame(frames.HEADERS, LAST | 0x20, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
    "6.3 priority of stream 0": (HELLO + frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "6.4 reset of stream 0": (HELLO + frame(frames.RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "6.4 reset of another size": (HELLO + HEAD + frame(frames.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
    "6.5 acknowledgement with settings": (HELLO + frame(frames.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "6.5 settings of a stream": (HELLO + frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "6.5 settings of another size": (HELLO + frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "6.5.2 push neither on nor off": (HELLO + frames.settings_frame({2: 2}), ErrorCode.PROTOCOL_ERROR),
    "6.5.2 window above the largest": (HELLO + frames.settings_frame({4: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
    "6.5.2 frames below the smallest": (HELLO + frames.settings_frame({5: 16383}), ErrorCode.PROTOCOL_ERROR),
    "6.5.2 frames above the largest": (HELLO + frames.settings_frame({5: 1 << 24}), ErrorCode.PROTOCOL_ERROR),
    "6.6 push": (HELLO + frame(frames.PUSH_PROMISE, WHOLE, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "6.7 ping of a stream": (HELLO + frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "6.7 ping of another size": (HELLO + frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "6.8 goaway of a stream": (HELLO + frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "6.8 goaway cut short": (HELLO + frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "6.9 window grows by nothing": (HELLO + frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "6.9 window update of another size": (
        HELLO + frame(frames.WINDOW_UPDATE, 0, 0, b"abc"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "6.9.1 window above the largest": (
        HELLO + frames.window_update(0, frames.MAX_WINDOW),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.9.2 initial window moves one above the largest": (
        HELLO + OPEN + frames.window_update(1, frames.MAX_WINDOW - 65535) + frames.settings_frame({4: 65536}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "6.10 headers go on without a beginning": (
        HELLO + frame(frames.CONTINUATION, WHOLE, 1, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "10.5 headers go on for ever": (
        HELLO + frame(frames.HEADERS, 0, 1, block()) + frame(frames.CONTINUATION, 0, 1) * 200,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5 headers above the limit": (
        HELLO + frame(frames.HEADERS, 0, 1, block()) + frame(frames.CONTINUATION, 0, 1, bytes(16384)) * 3,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5.1 headers that grow when they are decompressed": (
        HELLO
        + frame(frames.HEADERS, LAST, 1, block() + b"\x40\x01x" + length(b"y" * 3000) + b"y" * 3000 + b"\xbe" * 9),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5 calls that are reset at once": (
        HELLO
        + b"".join(
            frame(frames.HEADERS, WHOLE, 2 * n + 1, block()) + frames.reset(2 * n + 1, ErrorCode.CANCEL)
            for n in range(2 * MAX_RAPID)  # should some take longer on a busy machine
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5 calls that the server is made to reset": (
        HELLO
        + b"".join(
            frame(frames.HEADERS, WHOLE, 2 * n + 1, block()) + frames.window_update(2 * n + 1, 0)
            for n in range(MAX_RAPID + 1)
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "10.5 settings that change all the time": (
        HELLO + frames.settings_frame({4: 1}) * MAX_SETTINGS,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize(("sent", "code"), FATAL.values(), ids=FATAL)
def test_error_of_the_connection_ends_it_and_says_why(wire: Wire, sent: bytes, code: ErrorCode) -> None:
    kind, _, stream, payload = wire.say(sent)[-1]
    assert (kind, stream) == (frames.GOAWAY, 0)
    assert struct.unpack(">I", payload[4:8])[0] == code and payload[8:].isascii()
    assert wire.transport.closed and not wire.protocol.calls
    wire.protocol.data_received(call(7))  # nothing is read any more
    wire.turn()
    assert not wire.transport.sent


ODD: dict[str, bytes] = {
    "name in capitals": block(INFER, (b"X-Y", b"1")),
    "unknown pseudo-header": raw([(b":x", b"1")]) + block(),
    "pseudo-header after others": block(INFER, (b":path", b"/")),
    "pseudo-header twice": raw([(b":path", b"/")]) + block(),
    "pseudo-header of responses": raw([(b":status", b"200")]) + block(),
    "header of the connection": block(INFER, (b"connection", b"close")),
    "te that is not trailers": block(te=b"gzip"),
    "value with a line's end": block(INFER, (b"x", b"1\r\ny: 2")),
    "value with a zero": block(INFER, (b"x", b"1\0")),
    "value that begins with a space": block(INFER, (b"x", b" 1")),
    "value that ends with a tab": block(INFER, (b"x", b"1\t")),
    "no method": block(drop=b":method"),
    "no scheme": block(drop=b":scheme"),
    "no path": block(drop=b":path"),
    "empty path": block(path=b""),
    "length that is none": block(INFER, (b"content-length", b"-1")),
    "length above the body": block(INFER, (b"content-length", b"9999")),
    "length below the body": block(INFER, (b"content-length", b"3")),
}
RESETS: dict[str, tuple[bytes, ErrorCode]] = {
    **{f"8.2, 8.3 {name}": (call(head=odd), ErrorCode.PROTOCOL_ERROR) for name, odd in ODD.items()},
    "5.1 data of a stream that has ended": (DONE + frame(frames.DATA, END, 1, b"x"), ErrorCode.STREAM_CLOSED),
    "5.1 data after the last": (
        call(body=message("held")) + frame(frames.DATA, END, 1, b"x"),
        ErrorCode.STREAM_CLOSED,
    ),
    "5.1 headers after the last": (call(body=message("held")) + HEAD, ErrorCode.STREAM_CLOSED),
    "6.3 priority of another size": (OPEN + frame(frames.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    "6.9 window grows by nothing": (OPEN + frames.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "6.9.1 window above the largest": (OPEN + frames.window_update(1, frames.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    "8.1 trailer that does not end": (OPEN + HEAD, ErrorCode.PROTOCOL_ERROR),
    "8.1 trailer with a pseudo-header": (OPEN + frame(frames.HEADERS, LAST, 1, block()), ErrorCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("sent", "code"), RESETS.values(), ids=RESETS)
def test_error_of_a_stream_ends_it_and_leaves_others(wire: Wire, sent: bytes, code: ErrorCode) -> None:
    wire.hello()
    kind, _, stream, payload = wire.say(sent)[-1]
    assert (kind, stream, int.from_bytes(payload, "big")) == (frames.RST_STREAM, 1, code)
    assert 1 not in wire.protocol.calls
    assert wire.trailers(wire.say(call(3)), 3)[b"grpc-status"] == b"0"


HARMLESS: dict[str, bytes] = {
    "unknown frame": frame(0x2A, 0xFF, 7, b"anything"),
    "unknown setting": frames.settings_frame({0x2A2A: 7}),
    "unknown flags of a ping": frame(frames.PING, 0xFE & ~1, 0, bytes(8)),
    "acknowledged ping": frame(frames.PING, 1, 0, bytes(8)),
    "priority of an idle stream": frame(frames.PRIORITY, 0, 9, struct.pack(">IB", 7, 1)),
    "window of a stream that has ended": call(1) + frames.window_update(1, 5) + frames.reset(1, ErrorCode.CANCEL),
}


@pytest.mark.parametrize("sent", HARMLESS.values(), ids=HARMLESS)
def test_frame_that_means_nothing_here_is_ignored(wire: Wire, sent: bytes) -> None:
    wire.hello()
    wire.say(sent)
    assert wire.trailers(wire.say(call(11)), 11)[b"grpc-status"] == b"0"


@pytest.mark.parametrize(
    ("kind", "sent", "expected"),
    [
        (frames.PING, frame(frames.PING, 0, 0, b"12345678"), (frames.PING, 1, 0, b"12345678")),
        (frames.SETTINGS, frames.settings_frame({4: 70000}), (frames.SETTINGS, 1, 0, b"")),
    ],
)
def test_ping_and_settings_are_acknowledged(wire: Wire, kind: int, sent: bytes, expected: Any) -> None:
    wire.hello()
    assert wire.say(sent) == [expected]


def test_initial_windows_of_one_frame_count_by_the_last(wire: Wire) -> None:
    """Each would go through all calls, and a frame has room for thousands."""
    wire.hello(frames.window_update(0, 1000))
    wire.say(OPEN, frames.window_update(1, frames.MAX_WINDOW - 65535))
    both = struct.pack(">HIHI", 4, 65536, 4, 65535)
    assert wire.say(frame(frames.SETTINGS, 0, 0, both)) == [(frames.SETTINGS, 1, 0, b"")]


def test_window_of_the_connection_goes_through_no_call_that_waits_for_its_own(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a frame of 13 bytes would cost as much as there are calls."""
    wire.hello(frames.settings_frame({4: 0}))
    for n in range(50):
        wire.say(call(2 * n + 1))
    assert len(wire.protocol.calls) == 50
    pumped: list[Call] = []
    pump = wire.protocol.pump

    def count(call: Call) -> None:
        pumped.append(call)
        pump(call)

    monkeypatch.setattr(wire.protocol, "pump", count)
    assert not wire.say(frames.window_update(0, 1) * 50)
    assert not pumped
    answer = wire.say(frames.settings_frame({4: 1000}))
    assert len([kind for kind, flags, *_ in answer if kind == frames.HEADERS and flags == LAST]) == 50
    assert len(pumped) == 50 and not wire.protocol.calls


def test_calls_that_wait_for_the_window_of_the_connection_get_it_in_turns(wire: Wire) -> None:
    body = message(pairs=1500)
    wire.hello()
    for n in range(10):
        wire.say(call(2 * n + 1, body))
    waiting = sorted(wire.protocol.calls)
    assert len(waiting) > 2
    served = [wire.say(frames.window_update(0, 1))[0][2] for _ in range(2 * len(waiting))]
    assert served[: len(waiting)] == served[len(waiting) :]
    assert sorted(set(served)) == waiting


def test_many_small_answers_go_out_within_a_turn(wire: Wire) -> None:
    """So that a caller who takes none of them is noticed before they pile up."""
    wire.hello()
    wire.protocol.data_received(frame(frames.PING, 0, 0, bytes(8)) * 200)
    assert len(wire.transport.sent) >= 100 * 17
    assert len(wire.say()) == 200


EMPTY: dict[str, bytes] = {
    "data": frame(frames.DATA, 0, 1),
    "priority": frame(frames.PRIORITY, 0, 1, bytes(5)),
    "window": frames.window_update(0, 1),
    "ping": frame(frames.PING, 0, 0, bytes(8)),
    "unknown": frame(0xEE, 0, 0),
}


@pytest.mark.parametrize("sent", EMPTY.values(), ids=EMPTY)
def test_flood_of_small_frames_leaves_turns_to_others(wire: Wire, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop reads on while there is more: some millions of empty frames stopped all others for 2 s."""
    wire.hello(OPEN)
    read: list[int] = []
    on_frame = wire.protocol._on_frame

    def spy(*frame: Any) -> None:
        read.append(frame[0])
        on_frame(*frame)

    monkeypatch.setattr(wire.protocol, "_on_frame", spy)
    data = sent * 1000 + DONE[len(OPEN) :] + sent[:5]
    wire.protocol.data_received(data)
    assert len(read) < 500 and wire.transport.paused
    wire.protocol.data_received(sent[5:])  # what was underway, as over TLS
    wire.protocol.pause_writing()
    wire.protocol.resume_writing()
    assert len(read) < 500 and wire.transport.paused
    answer = wire.say()
    assert len(read) == 1002 and not wire.transport.paused
    assert wire.trailers(answer)[b"grpc-status"] == b"0"


def test_connection_that_ends_within_a_flood_reads_no_more(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.hello()
    wire.protocol.data_received(EMPTY["unknown"] * 1000)
    wire.transport.close()
    wire.protocol.connection_lost(None)
    read: list[int] = []
    monkeypatch.setattr(wire.protocol, "_on_frame", lambda kind, *_: read.append(kind))
    wire.turn()
    assert read == []


def test_connection_that_drains_still_says_what_is_wrong(wire: Wire) -> None:
    wire.hello()
    wire.say(call(body=message("held")))
    wire.protocol.drain()
    kind, _, _, payload = wire.say(frame(frames.PING, 0, 1, bytes(8)))[-1]
    assert (kind, payload[7]) == (frames.GOAWAY, ErrorCode.PROTOCOL_ERROR)


def test_connection_that_opens_when_the_server_stops_is_closed(wire: Wire) -> None:
    wire.server._shared.draining = True
    late = Transport()
    wire.open(late)
    assert late.closed
