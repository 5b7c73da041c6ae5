"""A log of what a dispatcher was told and what it answered, one JSON line an event; and feeding it to a fresh one.

Floats are written so that they read back exactly, so a replay gives the same commands or there is a bug to be found.
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
    now: float
    event: Event
    commands: list[Command]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """ends: requests by model and outcome. seconds: from the first event to the last. difference: the first line whose
    commands were not the same, with both; empty where there is none."""

    events: int
    seconds: float
    outcomes: dict[tuple[str, str], int]
    difference: str = ""


# A request as it is written.
_Written = msgspec.defstruct(
    "_Written",
    [("id", int), ("model", str), ("arrived", float), ("deadline", float), ("size", int, 1), ("priority", int, 0)],
)


def _written(value: object) -> object:
    if isinstance(value, LaneId):
        return str(value)
    assert isinstance(value, Request)
    return _Written(*value.fields())


def _read(kind: type, value: object) -> Request | LaneId:
    if kind is LaneId:
        return LaneId.parse(msgspec.convert(value, str))
    assert kind is Request
    return Request(*msgspec.structs.astuple(msgspec.convert(value, _Written)))


encode = msgspec.json.Encoder(enc_hook=_written).encode
_decode = msgspec.json.Decoder(LogLine, dec_hook=_read).decode


def log_line(now: float, event: Event, commands: list[Command]) -> bytes:
    return encode(LogLine(now, event, commands)) + b"\n"


def read_log(lines: Iterable[str | bytes], place: str = "log") -> Iterator[LogLine]:
    """The lines of a log, in order. Raises ConfigError, with `place` and the line, for what is not a log."""
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
    """Feed a log into a fresh dispatcher. Raises ConfigError, with `place` and the line, for what is not a log."""
    handle = Applications(Dispatcher().handle).handle
    ends: Counter[tuple[str, str]] = Counter()
    first = now = 0.0
    number = 0
    for number, entry in enumerate(read_log(lines, place), 1):
        now = entry.now
        if number == 1:
            first = now
        commands = handle(entry.event, now)
        if commands != entry.commands:
            difference = f"{place}:{number}: logged {entry.commands}, but now {commands}"
            return ReplayResult(events=number, seconds=now - first, outcomes=dict(ends), difference=difference)
        for command in commands:
            if isinstance(command, Reply):
                for request in command.requests:
                    ends[request.model, command.outcome.value] += 1
    if not number:
        raise ConfigError(f"{place}: the log is empty; a server writes one with `cotenant serve --event-log FILE`")
    return ReplayResult(events=number, seconds=now - first, outcomes=dict(ends))
