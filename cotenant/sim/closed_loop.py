"""Simulate closed-loop callers: each sends its next request after the reply to the last one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cotenant.core.request import Outcome, Request
from cotenant.runtime.events import Reply
from cotenant.workload.sources import ClosedLoop

# Minimum seconds before a rejected caller retries, as the server's `Retry-After` says.
RETRY = 1.0


class ClosedLoopCallers:
    """Simulate the callers of one model or application.

    within: seconds from arrival to deadline. numbers: ids of requests. until: time from which no request is sent.
    """

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
        """Return the initial requests in order of time."""
        samples = self._source.samples
        times = [time for chunk in self._source.times(self._rng) for time in chunk[::samples].tolist()]
        return [request for time in times for request in self._query(time)]

    def next(self, reply: Reply, now: float) -> list[Request]:
        """Return the requests of callers whose last query has ended with this reply."""
        requests: list[Request] = []
        for request in reply.requests:
            query = self._open.pop(request.id, None)
            if query is None:
                continue  # a request of a stage
            query.left -= 1
            if reply.outcome is Outcome.REJECTED:
                query.pause = max(query.pause, reply.retry_after, RETRY)
            if not query.left:
                think = float(self._rng.exponential(self._source.think)) if self._source.think else 0.0
                requests += self._query(now + max(think, query.pause))
        return requests

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
    """A query. left: samples that have not ended. pause: seconds before its caller may send again."""

    __slots__ = ("left", "pause")

    def __init__(self, left: int) -> None:
        self.left = left
        self.pause = 0.0
