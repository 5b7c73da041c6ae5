"""Record a controller's events and commands among those of a dispatcher, one JSON line per event, and replay both.

A line of the dispatcher is an array (`runtime.log`); one of a controller is an object, and the first of them holds what
the controller was built from. Floats round-trip exactly, so a replay gives the same commands unless there is a bug.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from cotenant.control.adaptation import ControllerCommand, ControllerEvent, Roll, Solve
from cotenant.control.controller import Controller
from cotenant.control.controller_built import ControllerBuilt
from cotenant.core.identity import decode_identity
from cotenant.errors import ConfigError
from cotenant.runtime.log import DispatcherReplay, decode_line


class ControllerLine(msgspec.Struct, frozen=True, kw_only=True, tag="adaptation"):
    """One event, its time in seconds, and the commands that answered it."""

    now: float
    event: ControllerEvent
    commands: list[ControllerCommand]


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found. events: of the dispatcher; outcomes: requests by model and outcome. controller_events: of
    the controller; solves, rolls: what it asked for. seconds: from the first event to the last. difference: the first
    line with other commands than logged, with both; empty if there is none."""

    events: int
    seconds: float
    outcomes: dict[tuple[str, str], int]
    controller_events: int = 0
    solves: int = 0
    rolls: int = 0
    difference: str = ""


_encode = msgspec.json.Encoder(enc_hook=str).encode
_decoder: msgspec.json.Decoder[ControllerBuilt | ControllerLine] = msgspec.json.Decoder(
    ControllerBuilt | ControllerLine, dec_hook=decode_identity
)


def header_line(built: ControllerBuilt) -> bytes:
    """Encode what a controller is built from."""
    return _encode(built) + b"\n"


def controller_line(now: float, event: ControllerEvent, commands: list[ControllerCommand]) -> bytes:
    """Encode one event of a controller."""
    return _encode(ControllerLine(now=now, event=event, commands=commands)) + b"\n"


def replay(lines: Iterable[str | bytes], place: str = "log") -> ReplayResult:
    """Feed a log into a fresh dispatcher and a fresh controller. Raises ConfigError, with `place` and the line, for an
    invalid log."""
    replayed = _Replay()
    for number, line in enumerate(lines, 1):
        if difference := replayed.feed(line, f"{place}:{number}"):
            return replayed.result(difference)
    if math.isnan(replayed.first):
        raise ConfigError(f"{place}: the log is empty; a server writes one with `cotenant serve --event-log FILE`")
    return replayed.result("")


def controller_lines(lines: Iterable[str | bytes], place: str = "log") -> tuple[ControllerBuilt, list[ControllerLine]]:
    """Return how the controller of a log was built, and what it was told and answered, in order. Raises ConfigError
    where there is none, or an invalid line."""
    entries = [_decoded(line, f"{place}:{n}") for n, line in enumerate(lines, 1) if line[:1] in ("{", b"{")]
    built = next((entry for entry in entries if isinstance(entry, ControllerBuilt)), None)
    if built is None:
        raise ConfigError(f"{place}: a log without a controller; serve with `--adapt`")
    return built, [entry for entry in entries if isinstance(entry, ControllerLine)]


class _Replay:
    """first, now: times of the first line and of the latest."""

    def __init__(self) -> None:
        self.first = self.now = math.nan
        self._dispatcher = DispatcherReplay()
        self._controller = _ControllerReplay()

    def feed(self, line: str | bytes, where: str) -> str:
        """Return the difference to what was logged, in words; empty if there is none."""
        if line[:1] not in ("{", b"{"):
            entry = decode_line(line, where)
            self._pass(entry.now, where)
            return self._dispatcher.feed(entry, where)
        decided = _decoded(line, where)
        if isinstance(decided, ControllerBuilt):
            self._controller.build(decided)
            return ""
        self._pass(decided.now, where)
        return self._controller.feed(decided, where)

    def _pass(self, now: float, where: str) -> None:
        if now < self.now:
            raise ConfigError(f"{where}: time goes backwards, from {self.now} to {now}")
        self.now = now
        if math.isnan(self.first):
            self.first = now

    def result(self, difference: str) -> ReplayResult:
        return ReplayResult(
            events=self._dispatcher.events,
            seconds=self.now - self.first,
            outcomes=dict(self._dispatcher.outcomes),
            controller_events=self._controller.events,
            solves=self._controller.asked[Solve],
            rolls=self._controller.asked[Roll],
            difference=difference,
        )


def _decoded(line: str | bytes, where: str) -> ControllerBuilt | ControllerLine:
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{where}: not a line of an event log: {error}") from None


class _ControllerReplay:
    def __init__(self) -> None:
        self.events = 0
        self.asked: Counter[type] = Counter()
        self._controller: Controller | None = None

    def build(self, built: ControllerBuilt) -> None:
        self._controller = built.controller()

    def feed(self, entry: ControllerLine, where: str) -> str:
        """Return the difference to what was logged, in words; empty if there is none."""
        if self._controller is None:
            raise ConfigError(f"{where}: a controller's event, before the line that says how it was built")
        commands = self._controller.handle(entry.event, entry.now)
        if commands != entry.commands:
            return f"{where}: logged {entry.commands}, but now {commands}"
        self.events += 1
        self.asked.update(type(command) for command in commands)
        return ""
