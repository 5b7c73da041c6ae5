"""Keep the open requests, and end them: each exactly once."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.core.identity import LaneId
from cotenant.core.request import Outcome, Request
from cotenant.runtime.events import Command, Reply, Split
from cotenant.runtime.lane import Batch, Lane, Queue
from cotenant.runtime.splitting import SplitRequests


class OpenRequests:
    """Track every request that has arrived and not ended; `end` is the only place that ends one.

    held: by id of each request or part of one, the queue that holds it or held it. tried: those whose batch was lost
    with its worker once. place: updates the routing order after a lane's queues changed.
    """

    __slots__ = ("_place", "by_part", "held", "parts", "tried")

    def __init__(self, place: Callable[[Lane], None]) -> None:
        self.held: dict[int, Queue] = {}
        self.tried: set[int] = set()
        self.parts = SplitRequests()
        self.by_part = self.parts.by_part
        self._place = place

    def of(self, batch: Batch) -> tuple[Request, ...]:
        """Return the requests of a batch that have not ended yet."""
        if batch.intact:
            return batch.requests
        return tuple([request for request in batch.requests if request.id in self.held])

    def split(self, request: Request, sizes: list[int], commands: list[Command]) -> list[Request]:
        """Replace a request, or a part of one, by parts of these numbers of rows, which are in no queue yet."""
        parts = self.parts.split(request, sizes)
        commands.append(Split(request.id, tuple(parts)))
        self.held.pop(request.id, None)
        if request.id in self.tried:
            self.tried.remove(request.id)
            self.tried.update([part.id for part in parts])
        return parts

    def end(
        self,
        requests: tuple[Request, ...],
        outcome: Outcome,
        reason: str,
        commands: list[Command],
        batch: Batch | None = None,
        lane: LaneId | None = None,
    ) -> None:
        """End requests, all of them open."""
        if self.by_part:
            requests = self._end_parts(requests, outcome, reason, commands, batch, lane)
        if not requests:
            return
        held = self.held
        for request in requests:
            del held[request.id]
        if self.tried:
            self.tried.difference_update([request.id for request in requests])
        if batch is None:
            commands.append(Reply(requests, outcome, reason, 0.0, lane))
        else:
            commands.append(Reply(requests, outcome, reason, 0.0, lane, batch.id, batch.started))

    def _end_parts(
        self,
        requests: tuple[Request, ...],
        outcome: Outcome,
        reason: str,
        commands: list[Command],
        batch: Batch | None,
        lane: LaneId | None,
    ) -> tuple[Request, ...]:
        """End the parts among these requests, and what they are parts of where that ends; return the others."""
        others: list[Request] = []
        for request in requests:
            whole = self.by_part.get(request.id)
            if whole is None:
                if request.id in self.held:  # else it has ended with another part
                    others.append(request)
                continue
            if batch is not None and outcome is Outcome.SERVED:
                del self.held[request.id]
                self.tried.discard(request.id)
                whole = self.parts.served(request.id, batch.started)
            else:
                self.parts.end(whole)
                self._withdraw(whole.parts)
            if whole is not None:
                ended = (whole.request,)
                if batch is None:
                    commands.append(Reply(ended, outcome, reason, 0.0, lane))
                else:
                    started = min(whole.started, batch.started)
                    commands.append(Reply(ended, outcome, reason, 0.0, lane, batch.id, started))
        return tuple(others)

    def _withdraw(self, parts: dict[int, Request]) -> None:
        """Take parts of a request that ended out of their queues; a batch that runs goes on without them."""
        for queue in {id(queue): queue for queue in [self.held[part] for part in parts]}.values():
            if any(request.id in parts for request in queue.waiting):
                queue.keep([request for request in queue.waiting if request.id not in parts])
                self._place(queue.lane)
            running = queue.lane.batch
            if running is not None:
                running.intact = False
        for part in parts:
            del self.held[part]
        self.tried.difference_update(parts)
