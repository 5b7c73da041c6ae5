"""Counts what a simulated run comes to, batch by batch and reply by reply. A file of its own, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cotenant.core.request import Request
from cotenant.measure.stats import Tally
from cotenant.runtime.events import Reply, Run
from cotenant.sim.service import Service


class CountingService:
    """`serve` and `ended` are for `loop.play`. The tallies, by model, are filled as requests end.

    follow: gives the requests that follow from a reply, None where none ever do.
    """

    def __init__(
        self,
        tallies: Mapping[str, Tally],
        service: Service,
        follow: Callable[[Reply, float], Iterable[Request]] | None,
    ) -> None:
        self._tallies = dict(tallies)
        self._service = service
        self._follow = follow

    def serve(self, run: Run, now: float) -> float:
        rows, predicted, took = self._service.takes(run, now)
        self._tallies[run.model].ran(rows, predicted, took)
        return took

    def ended(self, reply: Reply, now: float) -> Iterable[Request]:
        requests = reply.requests
        self._tallies[requests[0].model].ended(requests, reply.outcome, now)
        return () if self._follow is None else self._follow(reply, now)
