"""Record the events and commands of a dispatcher, one JSON line per event, and replay them.

Floats round-trip exactly, so a replay gives the same commands unless there is a bug.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from cotenant.core.identity import LaneId, decode_identity
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


def _from_builtin(kind: type, value: object) -> Any:
    if kind is Request:
        return Request(*msgspec.structs.astuple(msgspec.convert(value, _RequestFields)))
    return decode_identity(kind, value)


encode = msgspec.json.Encoder(enc_hook=_to_builtin).encode
_decode = msgspec.json.Decoder(LogLine, dec_hook=_from_builtin).decode


def log_line(now: float, event: Event, commands: list[Command]) -> bytes:
    """Encode one line of an event log."""
    return encode(LogLine(now, event, commands)) + b"\n"


def decode_line(line: str | bytes, where: str) -> LogLine:
    """Decode one line. Raises ConfigError, with the place, for one that is invalid."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{where}: not a line of an event log: {error}") from None


def read_log(lines: Iterable[str | bytes], place: str = "log") -> Iterator[LogLine]:
    """Yield the dispatcher's lines of a log in order; those of a controller are objects, and left out. Raises
    ConfigError, with `place` and the line, for an invalid log."""
    now = -math.inf
    for number, line in enumerate(lines, 1):
        if line[:1] in ("{", b"{"):
            continue
        entry = decode_line(line, f"{place}:{number}")
        if entry.now < now:
            raise ConfigError(f"{place}:{number}: time goes backwards, from {now} to {entry.now}")
        now = entry.now
        yield entry


class DispatcherReplay:
    """Feed the lines of a log into a fresh dispatcher. outcomes: requests by model and outcome. events: lines that gave
    the same commands."""

    def __init__(self) -> None:
        self.events = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._handle = Applications(Dispatcher().handle).handle

    def feed(self, entry: LogLine, where: str) -> str:
        """Return the difference to what was logged, in words; empty if there is none."""
        commands = self._handle(entry.event, entry.now)
        if commands != entry.commands:
            return f"{where}: logged {entry.commands}, but now {commands}"
        self.events += 1
        for command in commands:
            if isinstance(command, Reply):
                for request in command.requests:
                    self.outcomes[request.model, command.outcome.value] += 1
        return ""
