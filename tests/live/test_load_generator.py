"""The load generator against a small HTTP server that answers as it is told."""

import asyncio
import json
from collections.abc import Callable

import numpy as np
import pytest
import uvloop

from cotenant.core.model import Model
from cotenant.errors import ConfigError
from cotenant.live.load_generator import RequestBody, generate_load
from cotenant.measure.report import ModelReport, Report
from cotenant.runtime.dispatcher import HOPELESS, PASSED, TOO_LATE
from cotenant.workload.arrivals import Arrivals

MODEL = Model(name="m", slo=0.5)
BODIES = {"m": RequestBody(content=b'{"inputs": []}', headers={"X-Test": "yes"})}


def answer(status: int, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def refusal(reason: str) -> bytes:
    return answer(503, json.dumps({"error": f"model 'm': {reason}"}).encode())


class Stub(asyncio.Protocol):
    """`reply` gives the bytes to answer the n-th request of a server with; none: no answer, the connection closes."""

    def __init__(self, reply: Callable[[int], bytes | None], seen: list[bytes]) -> None:
        self.reply = reply
        self.seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        reply = self.reply(len(self.seen))
        self.seen.append(data)
        if reply is None:
            self.transport.close()
        else:
            self.transport.write(reply)


def arrivals(count: int, gap: float = 0.0002) -> Arrivals:
    return iter([(np.linspace(0.0, count * gap, count), np.zeros(count, dtype=np.intp))])


def loaded(
    reply: Callable[[int], bytes | None],
    count: int,
    seen: list[bytes] | None = None,
    *,
    gap: float = 0.0002,
    **options: object,
) -> Report:
    async def main() -> Report:
        loop = asyncio.get_running_loop()
        requests = [] if seen is None else seen
        server = await loop.create_server(lambda: Stub(reply, requests), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await generate_load(f"127.0.0.1:{port}", [MODEL], BODIES, arrivals(count, gap), 0.1, **options)  # type: ignore[arg-type]

    return uvloop.run(main())


def ends(report: Report) -> dict[str, int]:
    row: ModelReport = report.models[0]
    return {name: count for name, count in row.outcomes.items() if count}


def test_load_sends_whole_requests_and_counts_every_response() -> None:
    seen: list[bytes] = []
    report = loaded(lambda number: answer(200), 50, seen)
    assert ends(report) == {"served": 50}
    assert report.models[0].attainment == 1
    assert report.lag is not None
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nContent-Length: 14\r\nX-Test: yes" in head
    assert body == BODIES["m"].content


def test_load_counts_each_outcome_by_itself() -> None:
    replies = [answer(200), refusal(TOO_LATE), refusal(PASSED), refusal(HOPELESS), answer(500), answer(404)]
    report = loaded(lambda number: replies[number], len(replies))
    assert ends(report) == {"served": 1, "rejected": 1, "expired": 2, "failed": 2}


def test_load_without_arrivals_has_an_empty_report() -> None:
    report = loaded(lambda number: answer(200), 0)
    assert ends(report) == {}
    assert report.lag is report.models[0].attainment is None


def test_load_calls_on_tick_while_it_runs() -> None:
    seen: list[Report] = []
    loaded(lambda number: answer(200), 12, gap=0.1, on_tick=seen.append)
    assert [0 < sum(report.models[0].outcomes.values()) < 12 for report in seen] == [True]


def test_chunked_response_is_read() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert ends(loaded(lambda number: chunked, 5)) == {"served": 5}


def test_connection_closed_by_the_server_is_replaced() -> None:
    assert ends(loaded(lambda number: answer(200, b"{}", "Connection: close"), 20)) == {"served": 20}


def test_lost_connection_or_bad_response_fails_its_own_request_alone() -> None:
    replies = {3: None, 7: b"SSH-2.0-nope\r\n"}
    assert ends(loaded(lambda number: replies.get(number, answer(200)), 20)) == {"served": 18, "failed": 2}


def test_sending_does_not_wait_for_responses() -> None:
    """No request is answered; all are sent nevertheless, and given up after the grace."""
    seen: list[bytes] = []
    report = loaded(lambda number: b"", 40, seen, grace=0.5)
    assert len(seen) == 40
    assert ends(report) == {"failed": 40}


def test_request_without_a_free_connection_waits_for_one() -> None:
    seen: list[bytes] = []
    assert ends(loaded(lambda number: answer(200), 200, seen, connections=2)) == {"served": 200}
    assert ends(loaded(lambda number: b"", 10, connections=2, grace=0.02)) == {"failed": 10}


def test_server_that_goes_away_fails_the_remaining_requests() -> None:
    async def main() -> Report:
        loop = asyncio.get_running_loop()
        seen: list[bytes] = []

        def reply(number: int) -> bytes | None:
            if number < 10:
                return answer(200)
            server.close()
            return None

        server = await loop.create_server(lambda: Stub(reply, seen), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return await generate_load(f"http://127.0.0.1:{port}", [MODEL], BODIES, arrivals(60), 0.1, connections=1)

    found = ends(uvloop.run(main()))
    assert found["served"] == 10
    assert found["failed"] == 50


def test_load_where_nothing_listens_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^no server answers at '127\.0\.0\.1:9': .*; start one with `cotenant serve`$"
    ):
        asyncio.run(generate_load("127.0.0.1:9", [MODEL], BODIES, arrivals(1), 1.0))


@pytest.mark.parametrize("address", ["localhost", "https://localhost:80", "http://:80", "http://localhost:high", ""])
def test_load_to_a_bad_address_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not the address of a server; write it as http://127\.0\.0\.1:8000$"):
        asyncio.run(generate_load(address, [MODEL], BODIES, arrivals(1), 1.0))
