from collections.abc import Iterator

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import (
    Applied,
    Command,
    Died,
    Event,
    Finished,
    LaneModel,
    LaneSpec,
    Ready,
    Reply,
    Run,
    Woke,
)
from cotenant.sim.loop import Script, play

LANE = LaneSpec(id=LaneId.parse("cpu-0/0"), models=(LaneModel(model="m", latencies=(1.0, 1.5)),))
UP: list[tuple[float, Event]] = [(0.0, Applied((LANE,))), (0.0, Ready(LaneId.parse("cpu-0/0")))]


def ends(requests: list[Request], events: list[tuple[float, Event]]) -> list[tuple[float, int, Outcome]]:
    found: list[tuple[float, int, Outcome]] = []

    def ended(reply: Reply, now: float) -> tuple[()]:
        found.extend((now, request.id, reply.outcome) for request in reply.requests)
        return ()

    def service(run: Run, now: float) -> float:
        return LANE.models[0].latencies[len(run.requests) - 1]

    play(Dispatcher().handle, requests, service, ended, Script(UP + events))
    return found


def test_play_batches_take_their_latency_and_answer_at_their_end() -> None:
    requests = [Request(number, "m", at, at + 10) for number, at in enumerate((0.5, 0.6, 0.7))]
    assert ends(requests, []) == [(1.5, 0, Outcome.SERVED), (3.0, 1, Outcome.SERVED), (3.0, 2, Outcome.SERVED)]


def test_play_worker_death_loses_the_batch_but_no_request() -> None:
    requests = [Request(0, "m", 0.5, 10.0)]
    events: list[tuple[float, Event]] = [
        (1.0, Died(LaneId.parse("cpu-0/0"), "test")),
        (1.2, Ready(LaneId.parse("cpu-0/0"))),
    ]
    assert ends(requests, events) == [(2.2, 0, Outcome.SERVED)]


def test_play_batch_lost_with_its_worker_never_finishes() -> None:
    heard: list[tuple[float, str]] = []
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        heard.append((now, type(event).__name__))
        return dispatcher.handle(event, now)

    script = Script([*UP, (1.0, Died(LaneId.parse("cpu-0/0"), "test"))])
    play(handle, [Request(0, "m", 0.5, 4.0)], lambda run, now: 3.0, lambda reply, now: (), script)
    assert heard[-2:] == [
        (4.0, "Woke"),
        (5.0, "Woke"),
    ]  # of its deadline, and of the grace after that; nothing finishes


def test_play_follow_up_of_a_response_arrives_at_its_time() -> None:
    told: list[tuple[float, int]] = []

    def ended(reply: Reply, now: float) -> list[Request]:
        told.extend((now, request.id) for request in reply.requests)
        return [Request(9, "m", now + 2.0, now + 5.0)] if reply.requests[0].id == 0 else []

    last = play(Dispatcher().handle, [Request(0, "m", 0.5, 10.0)], lambda run, now: 1.0, ended, Script(UP))
    assert told == [(1.5, 0), (4.5, 9)]
    assert last >= 4.5


def test_play_request_that_waits_too_long_expires_at_its_deadline() -> None:
    events: list[tuple[float, Event]] = [(1.0, Died(LaneId.parse("cpu-0/0"), "test"))]
    assert ends([Request(0, "m", 0.5, 3.0)], events) == [(3.0, 0, Outcome.EXPIRED)]


def test_play_events_are_in_time_order_with_arrivals_last() -> None:
    heard: list[tuple[float, str]] = []
    dispatcher = Dispatcher()

    def handle(event: Event, now: float) -> list[Command]:
        heard.append((now, type(event).__name__))
        commands = dispatcher.handle(event, now)
        dispatcher.invariants()
        return commands

    requests = [Request(0, "m", 1.0, 9.0), Request(1, "m", 2.0, 9.0)]
    last = play(handle, requests, lambda run, now: 1.0, lambda reply, now: (), Script(UP))
    at_two = [name for now, name in heard if now == 2.0]
    assert [now for now, _ in heard] == sorted(now for now, _ in heard)
    assert at_two == [Finished.__name__, "Arrived"]
    assert last == heard[-1][0]


def test_play_other_events_may_depend_on_earlier_ones() -> None:
    """A worker that comes up only when a reply has been seen."""
    told: list[float] = []

    def events() -> Iterator[tuple[float, Event]]:
        yield from UP
        yield 2.0, Woke(LaneId.parse("nowhere-0/0"), 2.0)
        assert told == [1.5]
        yield 2.0, Died(LaneId.parse("cpu-0/0"), "test")
        yield 4.0, Ready(LaneId.parse("cpu-0/0"))

    def ended(reply: Reply, now: float) -> tuple[()]:
        told.append(now)
        return ()

    requests = [Request(number, "m", at, at + 10) for number, at in enumerate((0.5, 1.8))]
    play(Dispatcher().handle, requests, lambda run, now: 1.0, ended, Script(events()))
    assert told == [1.5, 5.0]
