"""Combine rollout and supervisor into one state machine: messages between them stay inside.

Its drivers, one in the simulator and one in the live server, feed it all events and carry out its commands.
"""

from __future__ import annotations

from collections import deque

from cotenant.control.events import (
    Assigned,
    KeepStandbys,
    LaneNews,
    RolloutCommand,
    RolloutEvent,
    StartLane,
    StopLane,
    SupervisorCommand,
    SupervisorEvent,
)
from cotenant.control.revision import PlannedLane
from cotenant.control.rollout import Rollout
from cotenant.control.standby import choose_standbys, fitting_standbys
from cotenant.control.supervisor import Supervisor
from cotenant.core.identity import DeviceId, LaneId

Event = RolloutEvent | SupervisorEvent
Command = RolloutCommand | SupervisorCommand


class Orchestrator:
    """Decide changes of plan and the life of workers. Feed it events in order of time; carry out its commands in order.
    These include news of lanes (`LaneNews`), for logs and metrics; the rollout has received them already.

    standbys: standby workers for each device. They are chosen when a rollout has ended. Where one needs their memory,
    it begins once they are gone.
    """

    def __init__(
        self, rollout: Rollout | None = None, supervisor: Supervisor | None = None, *, standbys: int = 0
    ) -> None:
        self.rollout = rollout or Rollout()
        self.supervisor = supervisor or Supervisor()
        self._standbys = standbys
        self._capacity: dict[DeviceId, int] = {}  # bytes of memory
        self._kept: frozenset[LaneId] = frozenset()  # lanes that are to have standby workers
        self._chosen = True  # since the last rollout
        self._waiting: Assigned | None = None  # for standby workers to leave

    def handle(self, event: Event, now: float) -> list[Command]:
        """Decide what to do about an event at the time `now`, in seconds of any monotonic clock."""
        commands: list[Command] = []
        pending: deque[Event] = deque([event])
        while pending:
            event = pending.popleft()
            if isinstance(event, Assigned) and self._standbys:
                pending.extend(self._make_room(event))
                if self._waiting is not None:
                    continue
            for command in self._decide(event, now):
                match command:
                    case StartLane() | StopLane():
                        pending.append(command)
                    case _ if isinstance(command, LaneNews):
                        pending.append(command)
                        commands.append(command)
                    case _:
                        commands.append(command)
            if not pending and self._standbys:
                pending.extend(self._next_step())
        return commands

    def _decide(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, SupervisorEvent):
            return [*self.supervisor.handle(event, now)]
        return [*self.rollout.handle(event, now)]

    def _make_room(self, assigned: Assigned) -> list[Event]:
        """Let standby workers leave that do not fit while old and new workers are there."""
        self._waiting, during = None, self.rollout.workers_during(assigned)
        if during is None:
            return []
        self._capacity |= assigned.capacity
        self._chosen = False
        self._kept = fitting_standbys(self._kept, during.values(), self._capacity)
        if not self.supervisor.standbys <= self._kept:
            self._waiting = assigned
        return [KeepStandbys(self._kept)]  # also where none is there: one may be about to start

    def _next_step(self) -> list[Event]:
        """Go on with a rollout that has waited for standby workers to leave, or choose them anew after one."""
        if self._waiting is not None:
            if not self.supervisor.standbys <= self._kept:
                return []
            assigned, self._waiting = self._waiting, None
            return [assigned]
        if self._chosen or self.rollout.status().phase is not None:
            return []
        self._chosen = True
        self._kept = choose_standbys(self.rollout.workers.values(), self._capacity, self._standbys, self._death_cost)
        return [KeepStandbys(self._kept)]

    def _death_cost(self, lane: PlannedLane) -> float:
        """Return how many requests arrive while a new worker of a lane starts."""
        return lane.rate * self.supervisor.start_seconds(lane.id)

    def invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself. Tests call this after every event."""
        self.rollout.invariants()
        self.supervisor.invariants()
        status = self.rollout.status()
        assert status.requested == self.supervisor.lanes().keys()
