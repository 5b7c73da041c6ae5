"""Publish what admission knows in shared memory, so that HTTP processes reject without asking.

Each word has one writer. The server's process writes, by model, how many more requests of one row would be admitted
(`room`), how many seconds the first of them may have lost (`slack`), and how many rows it had heard of by then
(`heard`). Each HTTP process writes how many rows it has sent (`sent`). So what all of them have sent since the last
publication is known to each, and a room for ten requests is not taken by ten in each process.

A record is written between two increments of its version (a sequence lock); a reader that finds it odd, or changed
meanwhile, does not reject. A record expires where nothing was sent since: whoever asks first for a model that nobody
has asked for is passed on, and has it published again. Readers run on the processor architectures whose stores other
processors see in order, or read a record that is torn once in a while: then one request is passed on, or rejected, by
an estimate of a moment ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SLOTS = 1000  # models that have a place on the board; requests for further ones are passed on
MAX_HTTP_PROCESSES = 64
UNKNOWN = -1  # room: the server does not say
FRESH = 0.1  # seconds for which a record holds of a model of which nothing was sent since

_WORD = 8  # bytes
_HEADER = 8  # words before what belongs to HTTP processes
_MODELS, _CROWDED, _SHORTEST = range(3)  # of these; `_SHORTEST` in µs
_OWN = 8  # words of each HTTP process: a cache line
_FRAMES, _BEAT = range(2)  # of these: frames that the server has taken of it; when it was last alive, in ms
_RECORD = 5  # words of a model
_VERSION, _ROOM, _SLACK, _HEARD, _WHEN = range(5)  # of these; `_SLACK` and `_WHEN` in µs

_HTTP_PROCESSES = _HEADER
_SENT = _HTTP_PROCESSES + MAX_HTTP_PROCESSES * _OWN
_RECORDS = _SENT + MAX_HTTP_PROCESSES * SLOTS
SIZE = (_RECORDS + SLOTS * _RECORD) * _WORD


class Board:
    """Read and write the board. view: its `SIZE` bytes, 0 at first. count: HTTP processes. clock: the same for all."""

    def __init__(self, view: memoryview, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._words = view.cast("B").cast("q")
        self._count = count
        self._clock = clock

    @property
    def models(self) -> int:
        """The number of the models as they are offered now: another one after each change."""
        return self._words[_MODELS]

    @property
    def crowded(self) -> int:
        """The number of models with little room; 0: nothing would be rejected."""
        return self._words[_CROWDED]

    @property
    def shortest_target(self) -> float:
        """The shortest target of a model in seconds; 0 where none is known."""
        return self._words[_SHORTEST] / 1e6

    # What the server's process writes

    def change_models(self, shortest_target: float = 0.0) -> None:
        """Say that the models that are offered have changed. shortest_target: of them, in seconds."""
        self._words[_SHORTEST] = int(shortest_target * 1e6)
        self._words[_MODELS] += 1

    def crowd(self, models: int) -> None:
        """Say how many models have little room."""
        self._words[_CROWDED] = models

    def publish(self, slot: int, room: int, slack: float, heard: int) -> None:
        """Write a model's record. room: UNKNOWN where the server does not say. slack: seconds."""
        words, at = self._words, _RECORDS + slot * _RECORD
        words[at + _VERSION] += 1
        words[at + _ROOM] = room
        words[at + _SLACK] = int(slack * 1e6)
        words[at + _HEARD] = heard
        words[at + _WHEN] = int(self._clock() * 1e6)
        words[at + _VERSION] += 1

    def take_frame(self, http_process: int) -> None:
        """Count a frame of an HTTP process that was taken."""
        self._words[_HTTP_PROCESSES + http_process * _OWN + _FRAMES] += 1

    def clear(self, http_process: int) -> None:
        """Forget an HTTP process that has ended."""
        start = _HTTP_PROCESSES + http_process * _OWN
        for word in range(start, start + _OWN):
            self._words[word] = 0
        start = _SENT + http_process * SLOTS
        for word in range(start, start + SLOTS):
            self._words[word] = 0

    # What HTTP processes write

    def send(self, http_process: int, slot: int, rows: int) -> None:
        """Count rows that an HTTP process sends."""
        self._words[_SENT + http_process * SLOTS + slot] += rows

    def beat(self, http_process: int, now: float) -> None:
        """Say that an HTTP process is alive."""
        self._words[_HTTP_PROCESSES + http_process * _OWN + _BEAT] = int(now * 1e3)

    # What both read

    def last_beat(self, http_process: int) -> float:
        """Return when an HTTP process was last alive, in seconds; 0 if it has not said so."""
        return self._words[_HTTP_PROCESSES + http_process * _OWN + _BEAT] / 1e3

    def frames_taken(self, http_process: int) -> int:
        """Return how many frames of an HTTP process the server has taken."""
        return self._words[_HTTP_PROCESSES + http_process * _OWN + _FRAMES]

    def room(self, slot: int) -> tuple[int, float]:
        """Return how many more requests of one row would be admitted for a model, and how many seconds the first may
        have lost; UNKNOWN where the server does not say, or has said so too long ago."""
        words, at = self._words, _RECORDS + slot * _RECORD
        version, room = words[at + _VERSION], words[at + _ROOM]
        slack, sent, when = words[at + _SLACK], -words[at + _HEARD], words[at + _WHEN]
        if not version or room < 0 or version & 1 or words[at + _VERSION] != version:
            return UNKNOWN, 0.0
        for place in range(_SENT + slot, _SENT + self._count * SLOTS, SLOTS):
            sent += words[place]
        if sent <= 0 and self._clock() - when / 1e6 > FRESH:
            return UNKNOWN, 0.0
        return max(0, room - sent), slack / 1e6
