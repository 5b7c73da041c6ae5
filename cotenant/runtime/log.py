"""Record the events and commands of a dispatcher, one JSON line per event, and replay them.

Floats round-trip exactly, so a replay gives the same commands unless there is a bug.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.errors import ConfigError
from cotenant.runtime.applications import Applications
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Command, Event, Reply


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """Hold one event, its time in seconds, and the resulting commands."""

    now: float
    event: Event
    commands: list[Command]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Summarise a replay. outcomes: requests by model and outcome. seconds: from the first event to the last.

    difference: the first line with other commands than logged, with both; empty if there is none.
    """

    events: int
    seconds: float
    outcomes: dict[tuple[str, str], int]
    difference: str = ""


# The JSON form of a request.
_RequestFields = msgspec.defstruct(
    "_RequestFields",
    [("id", int), ("model", str), ("arrived", float), ("deadline", float), ("size", int, 1), ("priority", int, 0)],
)


def _to_builtin(value: object) -> object:
    if isinstance(value, LaneId):
        return str(value)
    assert isinstance(value, Request)
    return _RequestFields(*value.fields())


def _from_builtin(kind: type, value: object) -> Request | LaneId:
    if kind is LaneId:
        return LaneId.parse(msgspec.convert(value, str))
    assert kind is Request
    return Request(*msgspec.structs.astuple(msgspec.convert(value, _RequestFields)))


encode = msgspec.json.Encoder(enc_hook=_to_builtin).encode
_decode = msgspec.json.Decoder(LogLine, dec_hook=_from_builtin).decode


def log_line(now: float, event: Event, commands: list[Command]) -> bytes:
    """Encode one line of an event log."""
    return encode(LogLine(now, event, commands)) + b"\n"


def read_log(lines: Iterable[str | bytes], place: str = "log") -> Iterator[LogLine]:
    """Yield the lines of a log in order. Raises ConfigError, with `place` and the line, for an invalid log."""
    now = -math.inf
    for number, line in enumerate(lines, 1):
        try:
            entry = _decode(line)
        except (msgspec.DecodeError, ConfigError) as error:
            raise ConfigError(f"{place}:{number}: not a line of an event log: {error}") from None
        if entry.now < now:
            raise ConfigError(f"{place}:{number}: time goes backwards, from {now} to {entry.now}")
        now = entry.now
        yield entry


def replay(lines: Iterable[str | bytes], place: str = "log") -> ReplayResult:
    """Feed a log into a fresh dispatcher. Raises ConfigError, with `place` and the line, for an invalid log."""
    handle = Applications(Dispatcher().handle).handle
    outcomes: Counter[tuple[str, str]] = Counter()
    first = now = 0.0
    number = 0
    for number, entry in enumerate(read_log(lines, place), 1):
        now = entry.now
        if number == 1:
            first = now
        commands = handle(entry.event, now)
        if commands != entry.commands:
            difference = f"{place}:{number}: logged {entry.commands}, but now {commands}"
            return ReplayResult(events=number, seconds=now - first, outcomes=dict(outcomes), difference=difference)
        for command in commands:
            if isinstance(command, Reply):
                for request in command.requests:
                    outcomes[request.model, command.outcome.value] += 1
    if not number:
        raise ConfigError(f"{place}: the log is empty; a server writes one with `cotenant serve --event-log FILE`")
    return ReplayResult(events=number, seconds=now - first, outcomes=dict(outcomes))
