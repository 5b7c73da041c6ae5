from __future__ import annotations

import pytest

from cotenant.live.event_pump import EventPump


class Machine:
    """Answers an event by its letters as commands."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.pump = EventPump[str, str](lambda event, now: event, self.perform, self.failed, lambda: 0.0)

    def perform(self, command: str, now: float) -> None:
        self.done.append(command)
        if command == "a":
            self.pump.feed("x")
        if command == "!":
            raise RuntimeError("it cannot be done")

    def failed(self, command: str, error: Exception) -> None:
        self.pump.feed("f")


def test_event_that_a_command_causes_waits_for_the_other_commands() -> None:
    machine = Machine()
    machine.pump.feed("abc")
    assert machine.done == ["a", "b", "c", "x"]


def test_command_that_fails_keeps_no_other_from_being_carried_out(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.pump.feed("b!c")
    assert machine.done == ["b", "!", "c", "f"]
    assert "a command was not carried out: !" in caplog.text
    machine.pump.feed("d")
    assert machine.done[-1] == "d"
