"""Count the outcomes of requests and batches of a model, with one meaning in simulator, load generator and server.

A file of its own, to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.request import Outcome, Request
from cotenant.measure.histogram import Histogram


class OutcomeLedger:
    """Count the outcomes of one model's requests, their latencies, and its batches.

    served: requests that were answered; within_target: those of them that met their deadline. reasons: rejected and
    expired requests by outcome and reason, where one was given. latency: of served requests, from arrival to answer;
    rejection_latency: of rejected ones, likewise. batches, rows: run so far; predicted, observed: seconds that these
    batches were predicted to take and took, in sum.
    """

    def __init__(self) -> None:
        self.served = 0
        self.within_target = 0
        self.reasons: dict[tuple[Outcome, str], int] = {}
        self.latency = Histogram()
        self.rejection_latency = Histogram()
        self.batches = 0
        self.rows = 0
        self.predicted = 0.0
        self.observed = 0.0
        # Served requests apart: to hash an enum's member is a call of Python, also in compiled code.
        self._unserved = {outcome: 0 for outcome in Outcome if outcome is not Outcome.SERVED}

    def ended(self, requests: Sequence[Request], outcome: Outcome, now: float, reason: str = "") -> None:
        """Count requests that have ended at the same moment, in the same way."""
        if outcome is Outcome.SERVED:
            self.served += len(requests)
            latencies: list[float] = []
            for request in requests:
                latencies.append(now - request.arrived)
                if request.deadline >= now:
                    self.within_target += 1
            self.latency.extend(latencies)
            return
        if outcome is Outcome.REJECTED:
            self.rejected([now - request.arrived for request in requests], reason)
            return
        self._unserved[outcome] += len(requests)
        if reason and outcome is Outcome.EXPIRED:
            self.reasons[outcome, reason] = self.reasons.get((outcome, reason), 0) + len(requests)

    def rejected(self, latencies: Sequence[float], reason: str) -> None:
        """Count requests that were rejected, each so many seconds after it arrived."""
        self._unserved[Outcome.REJECTED] += len(latencies)
        self.rejection_latency.extend(latencies)
        if reason:
            key = Outcome.REJECTED, reason
            self.reasons[key] = self.reasons.get(key, 0) + len(latencies)

    def ran(self, rows: int, predicted: float, observed: float) -> None:
        """Count a batch that is done, with its predicted and observed seconds."""
        self.batches += 1
        self.rows += rows
        self.predicted += predicted
        self.observed += observed

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """Requests by outcome."""
        return {Outcome.SERVED: self.served} | self._unserved

    @property
    def arrived(self) -> int:
        """All requests that have ended, in whichever way."""
        return self.served + sum(self._unserved.values())

    @property
    def stayed(self) -> int:
        """Those of them whose caller did not leave."""
        return self.arrived - self._unserved[Outcome.CANCELLED]

    @property
    def attainment(self) -> float | None:
        """The fraction within the target of all requests whose caller stayed; None where there was none."""
        stayed = self.stayed
        return self.within_target / stayed if stayed else None
