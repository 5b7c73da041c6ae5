"""Publish what admission knows of models that HTTP processes ask for."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Protocol

from cotenant.errors import WorkerError
from cotenant.live.http_processes.board import SLOTS, UNKNOWN, Board
from cotenant.live.http_processes.event_loop import EventLoop

logger = logging.getLogger(__name__)

INTERVAL = 0.001  # seconds between two publications
AGAIN = 0.005  # seconds after which a model is published again whose requests HTTP processes have rejected
CROWDED = 512  # requests: with less room, HTTP processes look at the board for each
MAX_ROWS = 1 << 31  # of a request: more than a model takes, and no sum of them exceeds a word


class AdmissionSource(Protocol):
    """What is published."""

    def room(self, model: str) -> tuple[int, float]: ...


class AdmissionPublisher:
    """Keep the board up to date: each model soon after its requests have changed, or were rejected by HTTP processes,
    since room may have come from others. What nobody asks for is not looked at, and expires.
    """

    def __init__(
        self,
        source: AdmissionSource,
        board: Board,
        *,
        loop: EventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._board = board
        self._loop = loop
        self._clock = clock
        self._slots: dict[str, int] = {}
        self._models: list[str] = []
        self._heard: Counter[int] = Counter()  # rows, by slot
        self._heard_of: defaultdict[int, Counter[int]] = defaultdict(Counter)  # the same by HTTP process
        self._changed: set[int] = set()
        self._rejected: set[int] = set()  # slots, to be published again
        self._crowded: set[int] = set()
        self._published = 0.0
        self._due = False

    def slot(self, model: str) -> int:
        """Return a model's place on the board, -1 where there is none left."""
        slot = self._slots.get(model, -1)
        if slot < 0 and len(self._models) < SLOTS:
            slot = self._slots[model] = len(self._models)
            self._models.append(model)
        return slot

    def heard(self, http_process: int, slot: int, rows: int) -> None:
        """Take note of rows that an HTTP process has sent. Raises WorkerError for a place that no model has."""
        if slot >= len(self._models) or not 0 <= rows <= MAX_ROWS:
            raise WorkerError(f"{rows} rows for place {slot} of {len(self._models)} on the board")
        self._heard[slot] += rows
        self._heard_of[http_process][slot] += rows
        self.changed(slot)

    def forget(self, http_process: int) -> None:
        """Forget what an HTTP process has sent that has ended."""
        gone = self._heard_of.pop(http_process, Counter())
        self._heard -= gone
        self._board.clear(http_process)
        for slot in gone:
            self.changed(slot)

    def changed(self, slot: int) -> None:
        """Take note that a model has more requests, or fewer."""
        self._changed.add(slot)
        if not self._due:
            self._due = True
            wait = self._published + INTERVAL - self._clock()
            if wait > 0:
                self._loop.call_later(wait, self._publish)
            else:
                self._loop.call_soon(self._publish)

    def rejected(self, model: str) -> None:
        """Take note that an HTTP process has rejected requests for a model."""
        slot = self._slots.get(model)
        if slot is None:
            return
        if not self._rejected:
            self._loop.call_later(AGAIN, self._look_again)
        self._rejected.add(slot)

    def _publish(self) -> None:
        self._due = False
        changed, self._changed = self._changed, set()
        for slot in changed:
            try:
                room, slack = self._source.room(self._models[slot])
            except Exception:
                logger.exception("the room of model '%s' is not known", self._models[slot])
                room, slack = UNKNOWN, 0.0
            self._board.publish(slot, room, slack, self._heard[slot])
            if UNKNOWN < room < CROWDED:
                self._crowded.add(slot)
            else:
                self._crowded.discard(slot)
        self._board.crowd(len(self._crowded))
        self._published = self._clock()

    def _look_again(self) -> None:
        rejected, self._rejected = self._rejected, set()
        for slot in rejected:
            self.changed(slot)
