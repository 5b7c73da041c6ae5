"""Observe for how long no batch of a model has run, since nobody knows then how slow the next one would be."""

from __future__ import annotations


class PauseMonitor:
    """Observe whether batches of one model run.

    first: seconds after which a pause is long. That doubles with each time that the model is tried again, up to
    `longest`, until batches have run for as long as `first`.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._patience = first
        self._paused = self._ran = 0.0  # seconds, up to now
        self._has_run = False

    def observe(self, seconds: float, *, ran: bool) -> None:
        """Take an interval of so many seconds. ran: whether a batch ended in it."""
        if not ran:
            self._paused, self._ran = self._paused + seconds, 0.0
            return
        self._has_run = True
        self._paused, self._ran = 0.0, self._ran + seconds
        if self._ran > self._first:
            self._patience = self._first

    def tried(self) -> None:
        """The model is tried again: should it pause again, that is long only later."""
        self._patience = min(2 * self._patience, self._longest)

    @property
    def runs(self) -> bool:
        """Whether batches ran of late."""
        return self._has_run and self._paused < self._first

    @property
    def is_long(self) -> bool:
        """Whether no batch has run for long, or since the beginning."""
        return self._paused >= self._patience
