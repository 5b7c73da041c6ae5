"""Count the results of a simulated run, batch by batch and reply by reply. A file of its own, to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cotenant.core.identity import LaneId
from cotenant.core.request import Request
from cotenant.measure.ledger import OutcomeLedger
from cotenant.runtime.events import Reply, Run
from cotenant.sim.loop import LONG
from cotenant.sim.service import Service


class CountingService:
    """Count batches and replies in ledgers by model, by `serve` and `ended`, which are for `loop.play`.

    follow: gives the requests that follow from a reply; None where none ever do. began: hears of batches that take
    `LONG` seconds or more, which may hang: the batch, its predicted and its true seconds, and when it begins. busy: the
    seconds of batches are added up there, by lane.
    """

    def __init__(
        self,
        ledgers: Mapping[str, OutcomeLedger],
        service: Service,
        follow: Callable[[Reply, float], Iterable[Request]] | None,
        began: Callable[[Run, float, float, float], None] | None = None,
        busy: dict[LaneId, float] | None = None,
    ) -> None:
        self._ledgers = dict(ledgers)
        self._service = service
        self._follow = follow
        self._began = began
        self._busy = busy

    def serve(self, run: Run, now: float) -> float:
        rows, predicted, took = self.draw(run, now)
        self.count(run, rows, predicted, took)
        return took

    def draw(self, run: Run, now: float) -> tuple[int, float, float]:
        """Return the rows of a batch that begins, its predicted seconds, and its true seconds."""
        rows, predicted, took = self._service.takes(run, now)
        if took >= LONG and self._began is not None:
            self._began(run, predicted, took, now)
        return rows, predicted, took

    def count(self, run: Run, rows: int, predicted: float, took: float, lent: float = 0.0) -> None:
        """Count a batch. lent: seconds that it ended earlier than on its share alone; to its model they count as if it
        had taken them."""
        self._ledgers[run.model].ran(rows, predicted, took + lent)
        if self._busy is not None:
            self._busy[run.lane] = self._busy.get(run.lane, 0.0) + took

    def ended(self, reply: Reply, now: float) -> Iterable[Request]:
        requests = reply.requests
        self._ledgers[requests[0].model].ended(requests, reply.outcome, now)
        return () if self._follow is None else self._follow(reply, now)
