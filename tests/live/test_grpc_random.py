"""gRPC at random: against a client on h2, which checks all that it gets, and with frames that are wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import h2.settings
import hpack
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cotenant.live.grpc import frames
from cotenant.live.grpc.frames import ErrorCode, frame
from tests.live.http2 import HELLO, INFER, STREAM, Wire, block, call, floats, message
from tests.live.stub import StubCore


class Client:
    """A client on h2, which checks every frame that it gets."""

    def __init__(self) -> None:
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.state.initiate_connection()
        self.headers: dict[int, dict[bytes, bytes]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def take(self, data: bytes) -> None:
        for event in self.state.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self.headers.setdefault(event.stream_id, {}).update(dict(event.headers))
            elif isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
                self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            else:
                assert not isinstance(event, h2.events.ConnectionTerminated), event


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    pairs=st.lists(st.one_of(st.integers(1, 64), st.just(500)), min_size=1, max_size=12),
    window=st.sampled_from([100, 65_535, 1 << 20]),
    seed=st.integers(0, 1 << 30),
)
def test_client_on_h2_gets_each_answer_however_bytes_and_calls_are_mixed(
    pairs: list[int], window: int, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311  # to be repeated
    core, loop = StubCore(), asyncio.new_event_loop()
    try:
        wire, client = Wire(loop, core), Client()
        client.state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        fields = [*hpack.Decoder().decode(block(), raw=True)]
        bodies = {}
        for index, count in enumerate(pairs):
            stream = 2 * index + 1
            client.state.send_headers(stream, fields)
            bodies[stream] = message(("identity", "held")[rng.random() < 0.3], pairs=count)

        def exchange() -> None:
            data = client.state.data_to_send()
            while data:
                cut = rng.choice((1, 7, 100, len(data)))
                wire.protocol.data_received(data[:cut])
                data = data[cut:]
            wire.turn()
            sent, wire.transport.sent = wire.transport.sent, b""
            while sent:
                cut = rng.choice((1, 50, len(sent)))
                client.take(sent[:cut])
                sent = sent[cut:]

        while any(bodies.values()):
            stream = rng.choice([stream for stream, body in bodies.items() if body])
            room = min(client.state.local_flow_control_window(stream), len(bodies[stream]), frames.MAX_FRAME)
            cut = rng.randint(1, room)
            client.state.send_data(stream, bodies[stream][:cut], end_stream=cut == len(bodies[stream]))
            bodies[stream] = bodies[stream][cut:]
            if rng.random() < 0.5:
                exchange()
            core.release()
        for _ in range(200):
            exchange()
            core.release()
            if len(client.ended) == len(pairs):
                break
        for index, count in enumerate(pairs):
            stream = 2 * index + 1
            assert client.headers[stream][b"grpc-status"] == b"0"
            assert floats(client.data[stream][5:]) == list(range(2 * count))
        wire.protocol.connection_lost(None)
        assert not wire.protocol.calls and wire.server._shared.memory.used == 0
    finally:
        loop.close()
        core.arena.close()


def some_frames(rng: random.Random) -> bytes:
    """Return frames of which some are right, and some bytes changed."""
    heads = [block(INFER), block(STREAM), block(b"/x")]
    parts: list[Callable[[], bytes]] = [
        lambda: call(rng.randrange(1, 9)),
        lambda: frame(rng.randrange(12), rng.choice((0, 1, 4, 5, 8, 0x2D)), rng.randrange(6), rng.randbytes(9)),
        lambda: frame(frames.HEADERS, rng.choice((0, 1, 4, 5)), 2 * rng.randrange(20) + 1, rng.choice(heads)),
        lambda: frame(frames.DATA, rng.choice((0, 1)), 2 * rng.randrange(20) + 1, message("held")[: rng.randrange(99)]),
        lambda: frames.window_update(rng.randrange(4), rng.choice((0, 1, 1 << 30))),
        lambda: frames.settings_frame({rng.randrange(8): rng.choice((0, 1, 16384, 1 << 20))}),
        lambda: frames.reset(2 * rng.randrange(5) + 1, ErrorCode.CANCEL),
    ]
    data = bytearray(HELLO + b"".join(rng.choice(parts)() for _ in range(rng.randrange(1, 30))))
    for _ in range(rng.choice((0, 0, 1, 3))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@hypothesis_settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_random_frames_raise_nothing_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # to be repeated
    core, loop = StubCore(), asyncio.new_event_loop()
    try:
        wire = Wire(loop, core)
        data = some_frames(rng)
        while data:
            cut = rng.choice((1, 30, len(data)))
            wire.say(data[:cut])
            data = data[cut:]
        assert b"error in the server" not in wire.transport.sent
        wire.protocol.connection_lost(None)
        wire.turn()
        assert not wire.protocol.calls and not core.held and wire.server._shared.memory.used == 0
    finally:
        loop.close()
        core.arena.close()
