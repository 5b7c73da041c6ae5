"""What a controller is told of requests and batches, from what a server counts."""

from __future__ import annotations

import msgspec

from cotenant.control.adaptation import BatchLatency, Observed
from cotenant.live.driver import Driver
from cotenant.live.serving_observer import ServingObserver


class _Totals(msgspec.Struct, frozen=True):
    """Of one model, since the start."""

    arrived: int = 0
    ended: int = 0
    stayed: int = 0
    within_target: int = 0
    batches: int = 0
    predicted: float = 0.0
    observed: float = 0.0

    def minus(self, before: _Totals) -> _Totals:
        after, earlier = msgspec.structs.astuple(self), msgspec.structs.astuple(before)
        return _Totals(*(a - b for a, b in zip(after, earlier, strict=True)))


class ObservedCounts:
    """Take the change of what a server counts since it was last taken."""

    def __init__(self, driver: Driver, observer: ServingObserver) -> None:
        self._driver = driver
        self._observer = observer
        self._before: dict[str, _Totals] = {}

    @property
    def late(self) -> int:
        """Requests that ended and did not meet their target, those of callers that left not counted."""
        ledgers = [counts.ledger for counts in self._observer.models.values()]
        return sum(ledger.stayed - ledger.within_target for ledger in ledgers)

    def take(self) -> Observed:
        """Return what is new, without its duration and the foreign load."""
        totals = {name: self._totals(name) for name in self._observer.models}
        change = {name: total.minus(self._before.get(name, _Totals())) for name, total in totals.items()}
        self._before = totals
        return Observed(
            seconds=0.0,
            offered={name: each.arrived for name, each in change.items() if each.arrived},
            stayed={name: each.stayed for name, each in change.items() if each.stayed},
            within_target={name: each.within_target for name, each in change.items() if each.within_target},
            # A stage of an application ends more often than callers ask for it.
            waiting={name: count for name, counts in totals.items() if (count := counts.arrived - counts.ended) > 0},
            latencies={
                name: BatchLatency(each.batches, each.predicted, each.observed)
                for name, each in change.items()
                if each.batches
            },
        )

    def _totals(self, name: str) -> _Totals:
        counts = self._observer.models[name]
        ledger, lanes = counts.ledger, counts.lanes.values()
        return _Totals(
            arrived=self._driver.arrived[name],
            ended=ledger.arrived,
            stayed=ledger.stayed,
            within_target=ledger.within_target,
            # As if nothing had been lent: a plan may count on a share alone.
            batches=sum(lane.observed.count for lane in lanes),
            predicted=sum(lane.predicted.seconds for lane in lanes),
            observed=sum(lane.observed.seconds for lane in lanes),
        )
