"""Callers who wait for their answers: what they ask next follows from what they were told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cotenant.core.request import Outcome, Request
from cotenant.runtime.events import Reply
from cotenant.workload.sources import ClosedLoop

# Who is refused comes back no sooner, as `Retry-After` says to callers of the server.
RETRY = 1.0


class ClosedLoopCallers:
    """The callers of one name. within: seconds that they give a request; numbers: ids of requests; until: nobody asks
    at that time or later."""

    def __init__(
        self,
        name: str,
        source: ClosedLoop,
        rng: np.random.Generator,
        within: float,
        numbers: Iterator[int],
        until: float,
    ) -> None:
        self._name = name
        self._source = source
        self._rng = rng
        self._within = within
        self._numbers = numbers
        self._until = until
        self._open: dict[int, _Query] = {}  # by request

    def first(self) -> list[Request]:
        """What they ask at the beginning, in the order of time."""
        samples = self._source.samples
        times = [time for chunk in self._source.times(self._rng) for time in chunk[::samples].tolist()]
        return [request for time in times for request in self._query(time)]

    def next(self, reply: Reply, now: float) -> list[Request]:
        """The queries that follow, once all that a caller asked for in one has ended."""
        asked: list[Request] = []
        for request in reply.requests:
            query = self._open.pop(request.id, None)
            if query is None:
                continue  # a stage's, of an application
            query.left -= 1
            if reply.outcome is Outcome.REJECTED:
                query.pause = max(query.pause, reply.retry_after, RETRY)
            if not query.left:
                think = float(self._rng.exponential(self._source.think)) if self._source.think else 0.0
                asked += self._query(now + max(think, query.pause))
        return asked

    def _query(self, time: float) -> list[Request]:
        if time >= self._until:
            return []
        query = _Query(self._source.samples)
        requests = [
            Request(next(self._numbers), self._name, time, time + self._within) for _ in range(self._source.samples)
        ]
        self._open.update((request.id, query) for request in requests)
        return requests


class _Query:
    """left: samples that have not ended. pause: seconds before its caller may ask again."""

    __slots__ = ("left", "pause")

    def __init__(self, left: int) -> None:
        self.left = left
        self.pause = 0.0
