"""What the page is told: its stream, what it says of the last minute, and what it alarms of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotenant.control.revision import RolloutOutcome
from cotenant.errors import UnavailableError
from cotenant.live import page as page_package
from cotenant.live.access import Access, Role
from cotenant.live.http import HttpServer
from cotenant.live.limits import MAX_STREAMS
from cotenant.live.page import PageFeed
from cotenant.live.page.alarms import health
from cotenant.live.page.history import POINTS, STEP
from cotenant.measure.histogram import Histogram, quantiles
from tests.live.page_source import WrittenSource
from tests.live.stub import StubCore
from tests.live.test_http import Wire, request

STATIC = Path(page_package.__file__).parent / "static"


class Watching:
    """A feed whose clock the test turns, and the last of each event that one listener got."""

    def __init__(self, *names: str) -> None:
        self.source = WrittenSource(names or ("a", "b"))
        self.source.settle()
        self.feed = PageFeed(self.source, clock=lambda: self.source.now)
        self.events: list[tuple[str, Any]] = []

    def got(self, data: bytes) -> None:
        for event in data.decode().split("\n\n")[:-1]:
            name, text = event.split("\n")
            self.events.append((name.removeprefix("event: "), msgspec.json.decode(text.removeprefix("data: "))))

    def last(self, name: str) -> Any:
        return next(value for each, value in reversed(self.events) if each == name)

    def step(self, seconds: float = STEP) -> None:
        self.source.now += seconds
        self.feed._advance()

    def model(self, name: str = "a") -> Any:
        return next(view for view in self.last("tick")["models"] if view["name"] == name)

    def alarms(self) -> list[tuple[str, str]]:
        return [(alarm["level"], alarm["text"]) for alarm in self.last("tick")["alarms"]]


@asynccontextmanager
async def watching(*names: str) -> AsyncIterator[Watching]:
    watched = Watching(*names)
    watched.feed.start()
    watched.feed.subscribe(watched.got)
    try:
        yield watched
    finally:
        watched.feed.stop()


def test_last_minute_forgets_what_was_before() -> None:
    async def main() -> None:
        async with watching() as watched:
            watched.source.counts["a"].add(0, late=50)
            watched.step()
            assert watched.model()["attainment"] == 0.0 and watched.model()["health"] == "bad"
            for _ in range(12):
                watched.source.counts["a"].add(50)
                watched.step()
            seen = watched.model()
            assert (seen["attainment"], seen["health"]) == (1.0, "good")
            assert seen["rate"] == pytest.approx(10.0) and seen["goodput"] == pytest.approx(10.0)
            assert seen["p50"] == pytest.approx(0.02, rel=0.02) and seen["p99"] == pytest.approx(0.0238, rel=0.03)
            assert watched.model("b")["attainment"] is None and watched.model("b")["health"] == "idle"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("attainment", "stayed", "judged"),
    [
        (0.03, 1000, "bad"),
        (0.96, 1000, "warn"),
        (0.99, 1000, "good"),
        (0.5, 4, "warn"),
        (0.25, 4, "bad"),
        (None, 0, "idle"),
    ],
)
def test_health_against_an_slo_of_99_percent(attainment: float | None, stayed: int, judged: str) -> None:
    assert health(attainment, stayed, 0.99) == judged


def test_charts_have_ten_minutes_and_new_models_a_gap_before_them() -> None:
    async def main() -> None:
        async with watching("a", "b") as watched:
            for _ in range(POINTS + 3):
                watched.source.counts["a"].add(5)
                watched.step()
            assert len(watched.last("charts")["times"]) == 1  # one point each, once the page has those before
            source = watched.source
            source.names, source.counts["c"] = ("a", "b", "c"), type(source.counts["a"])()
            source.shares = [500, 500]
            watched.step()
            watched.feed.subscribe(watched.got)
            charts = watched.last("charts")
            assert charts["points"] == POINTS + 4 and len(charts["times"]) == POINTS
            assert charts["models"]["a"]["rate"] == [1.0] * (POINTS - 1) + [0.0]
            assert charts["models"]["c"]["rate"] == [None] * (POINTS - 1) + [0.0]
            assert [view["partition"] for view in charts["partitions"]] == ["0", "1"]

    asyncio.run(main())


def test_alarm_of_an_slo_that_is_just_missed_does_not_say_that_it_is_met() -> None:
    async def main() -> None:
        async with watching() as watched:
            watched.source.counts["a"].add(9896, refused=104)
            watched.step()
            assert watched.alarms()[0][1].startswith("a: 98.9 % within 50 ms in the last minute; 99 % is its SLO.")

    asyncio.run(main())


def test_partition_shows_what_each_model_took_of_the_last_minute() -> None:
    async def main() -> None:
        async with watching("a", "b", "c") as watched:
            watched.step()
            watched.source.work(0, "a", 1.0)
            watched.source.work(0, "b", 0.5)
            watched.step()
            first, second = watched.last("tick")["partitions"]
            assert first["busy"] == {"a": pytest.approx(0.1), "b": pytest.approx(0.05)} and second["busy"] == {}
            assert [view["busy"] for view in watched.last("charts")["partitions"]] == [[0.3], [0.0]]

    asyncio.run(main())


def test_partition_shows_the_slowdown_of_its_batches_of_the_last_minute() -> None:
    async def main() -> None:
        async with watching("a", "b", "c") as watched:
            watched.source.work(0, "a", 60.0, slowdown=3.0)
            for _ in range(13):  # that was before the last minute
                watched.step()
            watched.source.work(0, "a", 1.0, slowdown=1.0)
            watched.source.work(0, "b", 3.0, slowdown=1.5)
            watched.step()
            first, second = watched.last("tick")["partitions"]
            assert first["slowdown"] == pytest.approx(4 / 3) and first["predicted_slowdown"] == pytest.approx(1.2)
            assert second["slowdown"] is None and second["predicted_slowdown"] is None

    asyncio.run(main())


def test_alarms_tell_what_is_wrong_the_worst_first() -> None:
    async def main() -> None:
        async with watching() as watched:
            assert watched.alarms() == []
            source = watched.source
            source.counts["a"].add(3, refused=97)
            source.broken = {"c": "no such file"}
            source.failures = {"b": "served as before, since it could not be loaded again: no ONNX model"}
            source.states = {0: "failed"}
            source.reload_error = "reload rejected: rate -1"
            source.file_errors = ("the event log has ended",)
            source.foreign, source.slowdown, source.short = 0.45, 1.6, "a is offered 9 requests/s more than fit"
            source.roll("load of c", RolloutOutcome.ROLLED_BACK, "it exited")
            watched.step()
            assert watched.alarms() == [
                (
                    "bad",
                    "a: 3 % within 50 ms in the last minute; 99 % is its SLO."
                    " 19.4 requests/s rejected: it would finish after its deadline.",
                ),
                ("bad", "c is not served: no such file."),
                ("bad", "Partition 0 of cpu-0 is failed: killed by SIGKILL."),
                ("warn", "b is served as before, since it could not be loaded again: no ONNX model."),
                ("warn", "Reload rejected: rate -1."),
                ("warn", "The event log has ended."),
                ("warn", "A is offered 9 requests/s more than fit."),
                ("warn", "Other programs use 0.9 of 2 processors."),
                ("warn", "Batches take 1.6 × as long as predicted."),
                ("warn", "Revision 2 (load of c) was rolled-back: it exited."),
            ]
            source.accepting = False
            watched.step()
            assert watched.last("tick")["state"] == "stopping"
            assert watched.alarms()[0] == ("bad", "The server takes no requests: it stops.")

    asyncio.run(main())


def test_plan_is_sent_again_only_once_it_changes() -> None:
    async def main() -> None:
        async with watching() as watched:
            watched.step()
            watched.step()
            assert [name for name, _ in watched.events].count("plan") == 1
            watched.source.roll("a is offered more", RolloutOutcome.COMPLETED)
            watched.source.decisions.append((watched.source.now, "in force", "revision 2"))
            watched.step()
            plan = watched.last("plan")
            assert (plan["revision"], plan["reason"], plan["rollout"]) == (2, "a is offered more", "")
            assert plan["rollouts"][0]["outcome"] == "completed" and plan["decisions"][0]["action"] == "in force"
            assert plan["rollouts"][0]["phases"] == "prepare 800 ms, switch 10 ms, drain 200 ms"
            assert plan["rollouts"][0]["late"] == 3
            assert plan["validation"] == "simulated before use, 5210 requests: every SLO met"
            watched.source.late = 4
            watched.step()
            assert watched.last("plan")["late"] == 3 + 4
            watched.source.solved = 1
            watched.step()
            assert watched.last("plan")["durations"][0]["count"] == 1 + 1

    asyncio.run(main())


def test_feed_with_an_error_in_its_source_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with watching() as watched:
            totals = watched.source.totals
            watched.source.totals = None  # type: ignore[assignment,method-assign]
            watched.source.now += STEP
            watched.feed._tick()
            watched.source.totals = totals  # type: ignore[method-assign]
            watched.step()
            assert watched.last("tick")["state"] == "serving"

    asyncio.run(main())
    assert "the page was not brought up to date" in caplog.text


def test_quantiles_of_no_values_are_nan() -> None:
    histogram = Histogram()
    before = histogram.counts()
    assert [value != value for value in quantiles(histogram.counts() - before, (0.5, 0.99))] == [True, True]


# Over HTTP


@pytest.fixture
def core() -> Iterator[StubCore]:
    core = StubCore()
    yield core
    core.arena.close()


@asynccontextmanager
async def serving(core: StubCore, access: Access | None = None) -> AsyncIterator[tuple[HttpServer, Watching]]:
    async with watching() as watched:
        yield HttpServer(core, page=watched.feed, access=access), watched


def test_stream_sends_everything_at_once_then_what_changes_until_the_caller_leaves(core: StubCore) -> None:
    async def main() -> None:
        async with serving(core) as (server, watched):
            wire = Wire(server)
            wire.say(request("GET", "/cotenant/events"))
            head, _, body = wire.got.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
            assert [line for line in body.split(b"\n") if line.startswith(b"event")] == [
                b"event: charts",
                b"event: plan",
                b"event: tick",
            ]
            before = len(wire.got)
            watched.step(1.0)
            assert wire.got[before:].startswith(b"event: tick") and not wire.closed
            server.advance(3600)
            assert not wire.closed
            wire.say(request("GET", "/v2/health/live"))  # nothing follows a stream
            assert b"live" not in wire.got
            wire.protocol.connection_lost(None)
            assert len(watched.feed._listeners) == 1  # the test's own

    asyncio.run(main())


def test_stream_leaves_out_what_a_slow_caller_does_not_take_and_ends_a_stalled_one(core: StubCore) -> None:
    async def main() -> None:
        async with serving(core) as (server, watched):
            wire = Wire(server)
            wire.say(request("GET", "/cotenant/events"))
            wire.protocol.pause_writing()
            before, wire.unsent = wire.got, 100
            watched.step()
            assert wire.got == before
            server.advance(1)
            server.advance(31)
            assert wire.aborted

    asyncio.run(main())


def test_stream_ends_when_the_server_drains(core: StubCore) -> None:
    async def main() -> None:
        async with serving(core) as (server, _):
            wire = Wire(server)
            wire.say(request("GET", "/cotenant/events"))
            stopping = asyncio.create_task(server.stop(60.0))
            await asyncio.sleep(0)
            assert wire.closed
            wire.protocol.connection_lost(None)
            await stopping

    asyncio.run(main())


def test_streams_beyond_the_limit_are_told_to_come_again(core: StubCore) -> None:
    async def main() -> None:
        async with serving(core) as (server, watched):
            wires = [Wire(server) for _ in range(MAX_STREAMS)]
            for wire in wires:
                wire.say(request("GET", "/cotenant/events"))
            assert b"503" in wires[-1].got[:20] and b"Retry-After: 5" in wires[-1].got
            wires[0].protocol.connection_lost(None)
            again = Wire(server)
            again.say(request("GET", "/cotenant/events"))
            assert b"200" in again.got[:20]
            with pytest.raises(UnavailableError):
                watched.feed.admit()

    asyncio.run(main())


@pytest.mark.parametrize(("token", "status"), [("", 401), ("infer-0123456789", 403), ("observe-01234567", 200)])
def test_stream_needs_a_token_that_may_observe_and_the_files_need_none(core: StubCore, token: str, status: int) -> None:
    access = Access({Role.INFER: ["infer-0123456789"], Role.OBSERVE: ["observe-01234567"]})

    async def main() -> None:
        async with serving(core, access) as (server, _):
            wire, files = Wire(server), Wire(server)
            authorization = {"Authorization": f"Bearer {token}"} if token else {}
            wire.say(request("GET", "/cotenant/events", b"", **authorization))
            assert f" {status} ".encode() in wire.got[:20]
            files.say(request("GET", "/"))
            assert files.answers[0].status == 200

    asyncio.run(main())


def test_head_of_the_stream_has_no_body(core: StubCore) -> None:
    async def main() -> None:
        async with serving(core) as (server, watched):
            wire = Wire(server)
            wire.say(request("HEAD", "/cotenant/events"))
            assert wire.got.endswith(b"\r\n\r\n") and wire.closed and len(watched.feed._listeners) == 1

    asyncio.run(main())


def test_every_file_is_served_with_a_policy_that_fetches_nothing_from_elsewhere(core: StubCore) -> None:
    async def main() -> None:
        async with serving(core) as (server, _):
            for path in ["/", *(f"/cotenant/page/{file.name}" for file in STATIC.iterdir())]:
                wire = Wire(server)
                wire.say(request("GET", path))
                (answer,) = wire.answers
                assert answer.status == 200, path
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
            wire = Wire(server)
            wire.say(request("GET", "/cotenant/page/..%2ffeed.py"))
            assert wire.answers[0].status == 404

    asyncio.run(main())


def test_files_name_nothing_of_another_site_but_the_library_its_own() -> None:
    for file in STATIC.iterdir():
        if not file.name.startswith("uPlot"):
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text and "innerHTML" not in text, file.name
    assert "MIT License" in (STATIC / "uPlot.LICENSE.txt").read_text()
