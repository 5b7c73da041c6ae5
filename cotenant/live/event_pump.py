"""Feed a state machine on the event loop, and have its commands carried out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Event = TypeVar("Event")
Command = TypeVar("Command")


class EventPump(Generic[Event, Command]):
    """Keep events in order, and a command that fails from affecting others.

    handle: decides, given an event and the time. perform: carries a command out, and may feed further events. failed:
    is told of a command that raised something, to feed what the machine waits for in vain otherwise.
    """

    def __init__(
        self,
        handle: Callable[[Event, float], Iterable[Command]],
        perform: Callable[[Command, float], None],
        failed: Callable[[Command, Exception], None],
        clock: Callable[[], float],
    ) -> None:
        self._handle = handle
        self._perform = perform
        self._failed = failed
        self._clock = clock
        self._pending: deque[Event] = deque()
        self._busy = False

    def feed(self, event: Event) -> None:
        """Give the machine an event, and carry out its commands. Events that these cause are queued. A command that
        fails is logged."""
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                now = self._clock()
                for command in self._handle(self._pending.popleft(), now):
                    try:
                        self._perform(command, now)
                    except Exception as error:
                        logger.exception("a command was not carried out: %s", command)
                        self._failed(command, error)
        finally:
            self._busy = False
