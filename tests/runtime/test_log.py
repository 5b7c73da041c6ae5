from __future__ import annotations

import pytest

from cotenant.control.event_log import replay
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.request import Outcome, Request
from cotenant.errors import ConfigError
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Arrived, Event, Finished, LaneModel, LaneSpec, Ready, Reply
from cotenant.runtime.log import log_line, read_log

LANE_A = LaneId(DeviceId("cpu"), 0)


def recorded() -> list[bytes]:
    dispatcher = Dispatcher()
    events: list[tuple[float, Event]] = [
        (0.0, Applied((LaneSpec(id=LANE_A, models=(LaneModel(model="m", latencies=(0.1, 0.15)),)),))),
        (0.1, Ready(LANE_A)),
        (0.2, Arrived(Request(1, "m", 0.2, 1.2))),
        (0.25, Arrived(Request(2, "m", 0.25, 1.25))),
        (0.1 + 0.2, Finished(LANE_A, 1)),
    ]
    return [log_line(now, event, dispatcher.handle(event, now)) for now, event in events]


def test_replay_of_a_log_gives_the_same_commands() -> None:
    replayed = replay(recorded())
    assert replayed.difference == ""
    assert replayed.events == 5
    assert replayed.outcomes == {("m", "served"): 1}


def test_read_log_returns_written_events() -> None:
    cancelled = [Reply((Request(1, "m", 0.1, 0.1 + 0.2, size=2, priority=3),), Outcome.CANCELLED, "the caller left")]
    (entry,) = read_log([log_line(0.2, Arrived(Request(2, "n", 0.2, 1 / 3)), [*cancelled])])
    assert entry.event == Arrived(Request(2, "n", 0.2, 1 / 3))
    assert entry.commands == cancelled
    assert entry.commands != [
        Reply((Request(1, "m", 0.1, 0.3, size=2, priority=3),), Outcome.CANCELLED, "the caller left")
    ]


def test_replay_stops_at_the_first_difference_and_shows_both() -> None:
    lines = recorded()
    lines[3] = lines[3].replace(b'"time":1.25', b'"time":9.25')
    replayed = replay(lines, "x.jsonl")
    assert replayed.difference.startswith("x.jsonl:4: logged ")
    assert " but now " in replayed.difference


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"^x: the log is empty; a server writes one with `cotenant serve --event-log FILE`$"),
        ([b"1\n"], r"^x:1: not a line of an event log: Expected `array`, got `int`$"),
        (
            [recorded()[2].replace(b'"id":1', b'"id":"1"')],
            r"^x:1: not a line of an event log: Expected `int`, got `str`",
        ),
        (recorded()[:4] + recorded()[:1], r"^x:5: time goes backwards, from 0\.25 to 0\.0$"),
    ],
)
def test_read_log_of_other_text_names_the_line(lines: list[bytes], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(lines, "x")
