"""Combine rollout and supervisor into one state machine: messages between them stay inside.

Its drivers, one in the simulator and one in the live server, feed it all events and carry out its commands.
"""

from __future__ import annotations

from collections import deque

from cotenant.control.events import (
    LaneNews,
    RolloutCommand,
    RolloutEvent,
    StartLane,
    StopLane,
    SupervisorCommand,
    SupervisorEvent,
)
from cotenant.control.rollout import Rollout
from cotenant.control.supervisor import Supervisor

Event = RolloutEvent | SupervisorEvent
Command = RolloutCommand | SupervisorCommand


class Orchestrator:
    """Decide changes of plan and the life of workers. Feed it events in order of time; carry out its commands in order.
    These include news of lanes (`LaneNews`), for logs and metrics; the rollout has received them already."""

    def __init__(self, rollout: Rollout | None = None, supervisor: Supervisor | None = None) -> None:
        self.rollout = rollout or Rollout()
        self.supervisor = supervisor or Supervisor()

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        commands: list[Command] = []
        pending: deque[Event] = deque([event])
        while pending:
            for command in self._decide(pending.popleft(), now):
                match command:
                    case StartLane() | StopLane():
                        pending.append(command)
                    case _ if isinstance(command, LaneNews):
                        pending.append(command)
                        commands.append(command)
                    case _:
                        commands.append(command)
        return commands

    def _decide(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, SupervisorEvent):
            return [*self.supervisor.handle(event, now)]
        return [*self.rollout.handle(event, now)]

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        self.rollout.invariants()
        self.supervisor.invariants()
        status = self.rollout.status()
        assert status.requested == self.supervisor.lanes().keys()
