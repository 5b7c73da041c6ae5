"""Calls of gRPC, frame by frame: their ends, flow control, memory, headers."""

from __future__ import annotations

import asyncio
import gzip
import struct
import threading
import time
import zlib

import hpack
import pytest

from cotenant.live.grpc import frames
from cotenant.live.grpc.call import STREAM_WINDOW
from cotenant.live.grpc.compression import unpack
from cotenant.live.grpc.frames import ErrorCode, frame
from cotenant.live.grpc.greeting import MAX_CALLS, WINDOW
from cotenant.live.grpc.headers import MAX_HEADERS
from cotenant.live.http import HttpServer
from cotenant.live.limits import MAX_ERROR, Limits, MemoryBudget
from cotenant.protocol import messages
from tests.live.http2 import (
    END,
    INFER,
    LAST,
    STREAM,
    WHOLE,
    Transport,
    Wire,
    answers,
    block,
    call,
    floats,
    message,
    prefixed,
    raw,
)
from tests.live.stub import StubCore


@pytest.mark.parametrize(
    ("head", "body", "code", "said"),
    [
        (block(b"/inference.GRPCInferenceService/Nope"), b"", b"12", b"Method not found!"),
        (block(b"/"), b"", b"12", b"Method not found!"),
        (block(), b"", b"12", b"a call of this method has exactly one message"),
        (block(), message() * 2, b"12", b"a call of this method has exactly one message"),
        (block(), message()[:-1], b"12", b"a call of this method has exactly one message"),
        (block(), b"\0\x7f\xff\xff\xff", b"8", b"SERVER: Received message larger than max (2147483647 vs. 67108864)"),
        (block(INFER, (b"grpc-encoding", b"br")), b"", b"12", b"there are the encodings identity, deflate and gzip"),
        (block(), prefixed(b"x", 1), b"13", b"a message that is compressed in no encoding that its call names"),
        (block(INFER, (b"grpc-encoding", b"gzip")), prefixed(b"x", 1), b"13", None),
        (
            block(INFER, (b"grpc-encoding", b"gzip")),
            prefixed(gzip.compress(bytes(1 << 24)), 1),
            b"8",
            b"Decompressed message larger than max, of 100 times what was sent",
        ),
        (block(), prefixed(messages.ModelInferRequest(model_name="ü").SerializeToString()), b"5", None),
    ],
)
def test_call_that_cannot_be_answered_ends_with_its_status(
    wire: Wire, head: bytes, body: bytes, code: bytes, said: bytes | None
) -> None:
    wire.hello()
    parts = [body[start : start + 16384] for start in range(0, len(body) or 1, 16384)]
    sent = [frame(frames.DATA, 0, 1, part) for part in parts[:-1]] + [frame(frames.DATA, END, 1, parts[-1])]
    told = wire.trailers(wire.say(frame(frames.HEADERS, WHOLE, 1, head), *sent) or wire.wait())
    assert (told[b":status"], told[b"grpc-status"]) == (b"200", code)
    assert said is None or told[b"grpc-message"] == said
    assert told[b"grpc-message"].isascii()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (block(method=b"GET"), b"405"),
        (block(drop=b"content-type"), b"415"),
        (block(**{"content-type": b"a/b"}), b"415"),
        (block(**{"content-type": b"application/grpc-web+proto"}), b"415"),
    ],
)
def test_request_that_is_no_call_gets_a_status_of_http(wire: Wire, head: bytes, status: bytes) -> None:
    wire.hello()
    assert wire.trailers(wire.say(frame(frames.HEADERS, LAST, 1, head)))[b":status"] == status


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_compressed_message_is_read(wire: Wire, encoding: bytes) -> None:
    wire.hello()
    packed = (gzip if encoding == b"gzip" else zlib).compress(message()[5:])
    sent = call(body=prefixed(packed, 1), head=block(INFER, (b"grpc-encoding", encoding)))
    (answer,) = answers(wire, wire.say(sent))
    assert floats(answer) == [0.0, 1.0]


def test_refused_call_whose_caller_still_sends_is_ended_and_its_rest_ignored(wire: Wire) -> None:
    wire.hello()
    answer = wire.say(frame(frames.HEADERS, WHOLE, 1, block(b"/x")))
    assert answer[-1][:3] == (frames.RST_STREAM, 0, 1) and answer[-1][3] == bytes(4)  # NO_ERROR
    assert not wire.say(frame(frames.DATA, 0, 1, b"late"), frame(frames.DATA, END, 1, b"late"))
    assert wire.trailers(wire.say(call(3)), 3)[b"grpc-status"] == b"0"


def test_call_after_its_deadline_has_its_status_and_no_request(wire: Wire, core: StubCore) -> None:
    wire.hello()
    head = block(INFER, (b"grpc-timeout", b"1n"))
    told = wire.trailers(wire.say(call(head=head, body=message("held"))))
    assert (told[b"grpc-status"], told[b"grpc-message"]) == (b"4", b"Deadline Exceeded")
    assert not core.held and len(core.cancelled) == 1 and not wire.protocol.calls


def test_caller_that_resets_its_call_cancels_its_request(wire: Wire, core: StubCore) -> None:
    wire.hello()
    wire.say(call(body=message("held")))
    assert len(core.held) == 1
    assert not wire.say(frames.reset(1, ErrorCode.CANCEL))
    assert not core.held and len(core.cancelled) == 1


def test_calls_above_the_most_at_once_are_refused_and_may_be_repeated(wire: Wire) -> None:
    wire.hello()
    opened = b"".join(frame(frames.HEADERS, WHOLE, 2 * n + 1, block()) for n in range(MAX_CALLS + 1))
    ((kind, _, stream, code),) = wire.say(opened)
    assert (kind, stream) == (frames.RST_STREAM, 2 * MAX_CALLS + 1)
    assert int.from_bytes(code, "big") == ErrorCode.REFUSED_STREAM


def test_connection_above_the_most_is_told_so(core: StubCore, loop: asyncio.AbstractEventLoop) -> None:
    wire = Wire(loop, core, limits=Limits(connections=1))
    wire.hello()
    second = Transport()
    other = wire.open(second)
    wire.turn()
    assert second.closed and b"too many connections" in second.sent
    other.connection_lost(None)
    assert wire.trailers(wire.say(call()))[b"grpc-status"] == b"0"


def test_draining_server_ends_connections_after_their_calls(wire: Wire, core: StubCore) -> None:
    wire.hello()
    wire.say(call(body=message("held")))
    stopping = wire.loop.create_task(wire.server.stop(5.0))
    wire.turn()
    # What is on its way is served: the caller cannot know yet.
    answer = wire.say(call(3))
    assert answer[0][0] == frames.GOAWAY and int.from_bytes(answer[0][3][:4], "big") == (1 << 31) - 1
    assert answer[1][:3] == (frames.PING, 0, 0) and wire.trailers(answer, 3)[b"grpc-status"] == b"0"
    (last,) = wire.say(frame(frames.PING, frames.ACK, 0, answer[1][3]))
    assert last[0] == frames.GOAWAY and int.from_bytes(last[3][:4], "big") == 3
    assert wire.say(call(5))[0][:3] == (frames.RST_STREAM, 0, 5)
    assert not wire.transport.closed
    core.release()
    wire.turn()
    assert wire.transport.closed
    wire.protocol.connection_lost(None)
    wire.loop.run_until_complete(stopping)


# Flow control and memory


def test_large_response_is_sent_as_the_caller_takes_it(wire: Wire) -> None:
    wire.hello(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 10}))
    body = message(pairs=20_000)
    parts = [body[start : start + 16384] for start in range(0, len(body), 16384)]
    data = [frame(frames.DATA, END if n == len(parts) - 1 else 0, 1, part) for n, part in enumerate(parts)]
    answer = wire.say(frame(frames.HEADERS, WHOLE, 1, block()), *data)
    assert sum(len(payload) for kind, _, _, payload in answer if kind == frames.DATA) == 10
    held = wire.server._shared.memory.used
    assert held > 100_000
    answer += wire.say(frames.window_update(1, 1 << 20))
    taken = [len(payload) for kind, _, _, payload in answer if kind == frames.DATA]
    assert sum(taken) == frames.DEFAULT_WINDOW and max(taken) <= frames.MAX_FRAME
    assert wire.server._shared.memory.used < held
    answer += wire.say(frames.window_update(0, 1 << 20))
    (whole,) = answers(wire, answer)
    assert floats(whole) == list(range(40_000))
    assert answer[-1][:2] == (frames.HEADERS, LAST)


def test_negative_window_lets_nothing_through_until_it_is_made_up_for(wire: Wire, core: StubCore) -> None:
    wire.hello(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 20}))
    wire.say(call(body=message("held")))
    wire.say(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
    wire.protocol.calls[1].window = -10  # as if some had been sent before
    core.release()
    assert [kind for kind, *_ in wire.say(frames.window_update(1, 10))] == [frames.HEADERS]
    assert [len(payload) for kind, _, _, payload in wire.say(frames.window_update(1, 3)) if kind == 0] == [3]


def test_socket_that_takes_nothing_stops_reading_and_writing(wire: Wire, core: StubCore) -> None:
    wire.hello()
    wire.say(call(body=message("held")))
    wire.protocol.pause_writing()
    assert wire.transport.paused
    core.release()
    wire.turn()
    assert frames.HEAD.pack(5 << 8, 0, 1) not in wire.transport.sent
    wire.protocol.resume_writing()
    assert not wire.transport.paused
    answer = wire.say(b"")
    assert floats(*answers(wire, answer)) == [0.0, 1.0]


def test_more_than_a_window_is_refused(wire: Wire) -> None:
    wire.hello()
    wire.say(frame(frames.HEADERS, WHOLE, 1, block(STREAM)))
    wire.protocol.calls[1].unacknowledged = STREAM_WINDOW
    assert wire.say(frame(frames.DATA, 0, 1, b"x"))[-1][:3] == (frames.RST_STREAM, 0, 1)
    wire.protocol._unacknowledged = WINDOW
    assert wire.say(frame(frames.DATA, 0, 1, b"x"))[-1][0] == frames.GOAWAY


def test_stream_that_does_not_take_its_messages_holds_no_more_than_a_window(wire: Wire, core: StubCore) -> None:
    wire.hello(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 30}), frames.window_update(0, 1 << 30))
    one = message("held", pairs=1000)
    many = one * (frames.MAX_FRAME // len(one))
    answer = wire.say(frame(frames.HEADERS, WHOLE, 1, block(STREAM)))
    sent = 0
    while sent + len(many) <= STREAM_WINDOW:
        answer += wire.say(frame(frames.DATA, 0, 1, many))
        sent += len(many)
    assert len(core.held) == 64
    assert not [kind for kind, _, stream, _ in answer if (kind, stream) == (frames.WINDOW_UPDATE, 1)]
    assert STREAM_WINDOW // 2 < wire.server._shared.memory.used <= STREAM_WINDOW
    for _ in range(40):
        core.release()
        answer += wire.say(b"")
        updates = [data for kind, _, stream, data in answer if (kind, stream) == (frames.WINDOW_UPDATE, 1)]
        # Room for what is taken, and for no more.
        assert sum(int.from_bytes(data, "big") for data in updates) <= len(one) * (len(core.requests) + 1)
    assert len(core.requests) > 128
    assert [kind for kind, _, stream, _ in answer if (kind, stream) == (frames.WINDOW_UPDATE, 1)]


def test_memory_above_the_budget_is_refused_and_comes_back(core: StubCore, loop: asyncio.AbstractEventLoop) -> None:
    wire = Wire(loop, core, limits=Limits(memory=100_000))
    wire.hello()
    body = message(pairs=60_000)
    parts = [frame(frames.DATA, 0, 1, body[start : start + 16384]) for start in range(0, 160_000, 16384)]
    told = wire.trailers(wire.say(frame(frames.HEADERS, WHOLE, 1, block()), *parts))
    assert told[b"grpc-status"] == b"14" and b"too much memory" in told[b"grpc-message"]
    assert wire.server._shared.memory.used == 0
    assert wire.trailers(wire.say(call(3)), 3)[b"grpc-status"] == b"0"
    wire.server._shared.memory.used += 100_001
    assert wire.trailers(wire.say(call(5)), 5)[b"grpc-status"] == b"14"


def test_caller_that_holds_most_of_the_memory_without_progress_is_cut_off(
    core: StubCore, loop: asyncio.AbstractEventLoop
) -> None:
    wire = Wire(loop, core, limits=Limits(memory=100_000))
    wire.hello()
    body = message(pairs=60_000)
    wire.say(frame(frames.HEADERS, WHOLE, 5, block()), frame(frames.DATA, 0, 5, body[:16384]))
    wire.server._shared.memory.used += 40_000
    for _ in range(31):
        assert not wire.transport.closed
        wire.say(frame(frames.PING, 0, 0, bytes(8)), frame(frames.DATA, 0, 5, b"x"))  # so little is none
        wire.protocol.tick()
    assert wire.transport.closed


def test_caller_that_waits_for_its_response_is_not_cut_off(core: StubCore, loop: asyncio.AbstractEventLoop) -> None:
    wire = Wire(loop, core, limits=Limits(memory=100_000))
    wire.hello()
    body = message("held", pairs=10_000)
    parts = [frame(frames.DATA, 0, 1, body[start : start + 16384]) for start in range(0, len(body), 16384)]
    wire.say(frame(frames.HEADERS, WHOLE, 1, block()), *parts, frame(frames.DATA, END, 1))
    assert len(core.held) == 1 and wire.server._shared.memory.scarce
    for _ in range(100):
        wire.protocol.tick()
    assert not wire.transport.closed


def test_responses_of_a_stream_that_wait_to_be_sent_count_as_memory(wire: Wire) -> None:
    wire.hello(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}))
    one = message(pairs=1000)
    wire.say(frame(frames.HEADERS, WHOLE, 1, block(STREAM)), *[frame(frames.DATA, 0, 1, one)] * 20)
    memory = wire.server._shared.memory
    assert memory.used > 20 * 8000
    answer = wire.say(frames.window_update(1, 1 << 20), frames.window_update(0, 1 << 20))
    assert len(answers(wire, answer)) == 20 and memory.used == 0
    wire.say(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 0}), *[frame(frames.DATA, 0, 1, one)] * 20)
    wire.protocol.calls[1].window = 0
    wire.say(*[frame(frames.DATA, 0, 1, one)] * 20)
    wire.say(frames.reset(1, ErrorCode.CANCEL))
    assert memory.used == 0


def test_call_of_one_message_that_goes_on_ends_before_its_caller_does(wire: Wire) -> None:
    wire.hello()
    opened = frame(frames.HEADERS, WHOLE, 1, block())
    told = wire.trailers(wire.say(opened, frame(frames.DATA, 0, 1, message()), frame(frames.DATA, 0, 1, b"more")))
    assert (told[b"grpc-status"], told[b"grpc-message"]) == (b"12", b"a call of this method has exactly one message")


def test_stream_that_ends_for_want_of_memory_leaves_nothing_at_work(
    core: StubCore, loop: asyncio.AbstractEventLoop
) -> None:
    wire = Wire(loop, core, limits=Limits(memory=20_000))
    wire.hello()
    watch = frame(frames.HEADERS, WHOLE, 1, block(b"/grpc.health.v1.Health/Watch"))
    wire.say(watch, frame(frames.DATA, 0, 1, prefixed(b"")))
    assert asyncio.all_tasks(loop)
    told = wire.trailers(wire.say(*[frame(frames.DATA, 0, 1, bytes(16384))] * 2))
    assert told[b"grpc-status"] == b"14" and wire.server._shared.memory.used == 0
    assert not asyncio.all_tasks(loop)


def test_method_that_takes_no_tensors_takes_no_large_message(wire: Wire) -> None:
    """Some are for everybody, and memory is not."""
    wire.hello()
    head = block(b"/inference.GRPCInferenceService/ServerLive")
    told = wire.trailers(wire.say(frame(frames.HEADERS, WHOLE, 1, head), frame(frames.DATA, 0, 1, b"\0\0\1\0\1")))
    assert told[b"grpc-status"] == b"8" and told[b"grpc-message"].endswith(b"(65537 vs. 65536)")


def test_message_of_a_status_is_of_bounded_length(wire: Wire) -> None:
    wire.hello()
    name = prefixed(b"\x0a\x80\x7d" + b"s" * 16000)  # a service
    told = wire.trailers(wire.say(call(body=name, head=block(b"/grpc.health.v1.Health/Check"))))
    assert told[b"grpc-status"] == b"5" and len(told[b"grpc-message"]) <= MAX_ERROR


def test_caller_that_says_nothing_is_cut_off(wire: Wire) -> None:
    wire.say(frames.PREFACE)
    for _ in range(11):
        assert not wire.transport.closed
        wire.protocol.tick()
    assert wire.transport.closed


# Headers


def test_headers_mean_what_the_table_says_now(wire: Wire) -> None:
    """Blocks of references are remembered, and forgotten when the table changes."""
    wire.hello()
    encoder = hpack.Encoder()
    fields = [(field[0], field[1]) for field in hpack.Decoder().decode(block(), raw=True)]
    stream = 1
    for model_path in (INFER, b"/a/B", INFER, b"/c/D"):
        for _ in range(3):  # the first puts the path into the table
            fields[2] = (b":path", model_path)
            told = wire.trailers(wire.say(call(stream, head=encoder.encode(fields))), stream)
            assert told[b"grpc-status"] == (b"0" if model_path == INFER else b"12")
            stream += 2
    # The same addition to the table twice is two additions.
    addition = b"\x40\x01x\x011"
    for head in (block() + addition, block() + addition, block() + b"\xbe\xbf"):
        assert wire.trailers(wire.say(call(stream, head=head)), stream)[b"grpc-status"] == b"0"
        stream += 2
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    assert wire.trailers(wire.say(call(stream, head=encoder.encode(fields))), stream)[b"grpc-status"] == b"12"


def test_caller_without_a_table_of_headers_is_told_that_there_is_none(wire: Wire) -> None:
    wire.hello(frames.settings_frame({frames.HEADER_TABLE_SIZE: 0}))
    wire.decoder.max_allowed_table_size = 0
    assert wire.trailers(wire.say(call(1)), 1)[b"grpc-status"] == b"0"
    assert wire.trailers(wire.say(call(3)), 3)[b"grpc-status"] == b"0"


def test_headers_may_come_in_parts_with_padding_and_priority(wire: Wire) -> None:
    wire.hello()
    whole = block()
    first = bytes((3,)) + struct.pack(">IB", 0, 16) + whole[:50] + bytes(3)
    answer = wire.say(
        frame(frames.HEADERS, 0x28, 1, first),
        frame(frames.CONTINUATION, 0, 1, whole[50:90]),
        frame(frames.CONTINUATION, WHOLE, 1, whole[90:]),
        frame(frames.DATA, 8, 1, bytes((4,)) + message()[:9] + bytes(4)),
        frame(frames.DATA, 0, 1, message()[9:]),
        frame(frames.HEADERS, LAST, 1, raw([(b"x-checksum", b"1")])),
    )
    assert floats(*answers(wire, answer)) == [0.0, 1.0]


def test_headers_of_many_bytes_are_read_up_to_the_limit(wire: Wire) -> None:
    wire.hello()
    head = block(INFER, (b"x", b"y" * (MAX_HEADERS - 500)))
    pieces = [frame(frames.HEADERS, 0, 1, head[:9000]), frame(frames.CONTINUATION, WHOLE, 1, head[9000:])]
    told = wire.trailers(wire.say(*pieces, frame(frames.DATA, END, 1, message())))
    assert told[b"grpc-status"] == b"0"


# Compressed messages

PACKED = block(INFER, (b"grpc-encoding", b"gzip"))


def packed(pairs: int = 1 << 17) -> bytes:
    """Return a request of so many pairs of numbers, compressed."""
    return prefixed(gzip.compress(message(pairs=pairs)[5:], 1), 1)


def in_frames(stream: int, body: bytes, *, last: bool = True) -> list[bytes]:
    parts = [body[start : start + frames.MAX_FRAME] for start in range(0, len(body), frames.MAX_FRAME)]
    return [frame(frames.DATA, END if last and part is parts[-1] else 0, stream, part) for part in parts]


def test_large_compressed_message_is_unpacked_beside_the_loop(
    wire: Wire, core: StubCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(message: bytes, encoding: bytes, limit: int) -> bytes:
        assert go_on.wait(30)
        return unpack(message, encoding, limit)

    monkeypatch.setattr("cotenant.live.grpc.call.unpack", slow)
    wire.hello()
    assert not wire.say(frame(frames.HEADERS, WHOLE, 1, PACKED), *in_frames(1, packed()))
    assert wire.trailers(wire.say(call(3)), 3)[b"grpc-status"] == b"0", "others are served meanwhile"
    memory = wire.server._shared.memory
    assert memory.used >= 1 << 20 and len(core.requests) == 1
    go_on.set()
    assert wire.wait()
    assert len(core.requests[1].inputs[0].data) == 1 << 20
    wire.say(frames.reset(1, ErrorCode.CANCEL))  # it has not taken its response
    assert memory.used == 0


def test_memory_that_unpacking_may_take_is_counted(core: StubCore, loop: asyncio.AbstractEventLoop) -> None:
    wire = Wire(loop, core, limits=Limits(memory=1 << 20))
    wire.hello()
    told = wire.trailers(wire.say(frame(frames.HEADERS, WHOLE, 1, PACKED), *in_frames(1, packed(1 << 20))))
    assert told[b"grpc-status"] == b"14" and not core.requests
    assert wire.server._shared.memory.used == 0


def test_caller_that_leaves_while_its_message_is_unpacked_gets_nothing(wire: Wire, core: StubCore) -> None:
    wire.hello()
    sent = [frame(frames.HEADERS, WHOLE, 1, PACKED), *in_frames(1, packed()), frames.reset(1, ErrorCode.CANCEL)]
    assert not wire.say(*sent)
    for _ in range(20):
        time.sleep(0.01)
        wire.turn()
    assert not core.requests and not wire.protocol.calls and wire.server._shared.memory.used == 0


def test_compressed_messages_of_a_stream_are_answered_in_order(wire: Wire, core: StubCore) -> None:
    wire.hello()
    head = block(STREAM, (b"grpc-encoding", b"gzip"))
    small = prefixed(gzip.compress(message("nowhere")[5:]), 1)
    wire.protocol.window = 1 << 30
    wire.say(frame(frames.HEADERS, WHOLE, 1, head), *in_frames(1, packed(), last=False))
    wire.say(*in_frames(1, small))
    while wire.protocol.calls and not core.requests:
        wire.turn()
    assert len(core.requests) == 1, "the second is for no model"


# Draining, the access log, traces


def test_caller_that_does_not_answer_the_ping_is_refused_after_the_notice(
    wire: Wire, core: StubCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.live.grpc.drain.NOTICE", 0.05)
    wire.hello()
    wire.say(call(body=message("held")))
    wire.protocol.drain()
    wire.protocol.drain()  # twice is once
    assert [kind for kind, *_ in wire.say()] == [frames.GOAWAY, frames.PING]
    ((kind, _, _, payload),) = wire.wait()
    assert kind == frames.GOAWAY and int.from_bytes(payload[:4], "big") == 1
    core.release()
    wire.turn()
    assert wire.transport.closed


def test_caller_that_goes_away_itself_is_not_asked(wire: Wire) -> None:
    wire.hello()
    ((kind, _, _, payload),) = wire.say(frames.goaway(0, ErrorCode.NO_ERROR))
    assert kind == frames.GOAWAY and payload[:4] == bytes(4) and wire.transport.closed


def test_access_log_has_a_line_for_each_call(
    core: StubCore, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire(loop, core, log_access=True)
    wire.hello()
    with caplog.at_level("INFO", "cotenant.access"):
        wire.say(call())
        wire.say(call(3, message("nowhere")))
        wire.say(call(5, head=block(b"/nowhere")))
        wire.say(call(7, message("held")))
        wire.say(frames.reset(7, ErrorCode.CANCEL))
        wire.say(frame(frames.HEADERS, WHOLE, 9, block(STREAM)), *in_frames(9, message()))
    logged = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [line["grpc_status"] for line in logged] == ["OK", "NOT_FOUND", "UNIMPLEMENTED", "CANCELLED", "OK"]
    assert logged[0]["url"] == INFER.decode() and logged[0]["bytes"] > 20 and logged[4]["bytes"] > logged[0]["bytes"]
    assert "gRPC /inference.GRPCInferenceService/ModelInfer OK" in caplog.messages[0]


def test_callers_place_in_a_trace_goes_with_its_request(wire: Wire, core: StubCore) -> None:
    wire.hello()
    wire.say(call(head=block(INFER, (b"traceparent", b"00-1-2-01"))), call(3))
    assert [request.traceparent for request in core.requests] == ["00-1-2-01", ""]


def test_front_ends_share_one_budget_of_memory(core: StubCore, loop: asyncio.AbstractEventLoop) -> None:
    memory = MemoryBudget(1 << 20)
    wire = Wire(loop, core, memory=memory)
    assert HttpServer(core, memory=memory)._handler.memory is memory is wire.server._shared.memory
