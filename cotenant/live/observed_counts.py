"""Read from a server's counters what a controller is told of requests and batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from cotenant.control.adaptation import Observed
from cotenant.control.observed_totals import ModelTotals, ObservedTotals
from cotenant.control.orchestrator import Orchestrator
from cotenant.live.driver import Driver
from cotenant.live.serving_observer import ServingObserver

T = TypeVar("T")


class ObservedCounts:
    """Take the change of what a server counts since it was last taken."""

    def __init__(self, driver: Driver, observer: ServingObserver, orchestrator: Orchestrator) -> None:
        self._driver = driver
        self._observer = observer
        self._orchestrator = orchestrator
        self._seen = ObservedTotals()

    def take(self, seconds: float = 0.0, planned: Collection[str] = ()) -> Observed:
        """Return what is new since the last call, so many seconds ago, of what plans are made for: requests for a model
        that was unloaded are no reason for another plan. planned: models and applications."""
        totals = {name: self._totals(name) for name in self._observer.models}
        seen = self._seen.observe(totals, seconds, self._orchestrator, self._observer.take_warming_up())
        return msgspec.structs.replace(
            seen,
            offered=_of(planned, seen.offered),
            stayed=_of(planned, seen.stayed),
            within_target=_of(planned, seen.within_target),
            waiting=_of(planned, seen.waiting),
            latencies=_of(planned, seen.latencies),
        )

    def _totals(self, name: str) -> ModelTotals:
        counts = self._observer.models[name]
        ledger, partitions = counts.ledger, counts.partitions.values()
        return ModelTotals(
            arrived=self._driver.arrived[name],
            rows=self._driver.rows[name],
            ended=ledger.arrived,
            stayed=ledger.stayed,
            within_target=ledger.within_target,
            # As if nothing had been lent: a plan may count on a share alone.
            batches=sum(each.observed.count for each in partitions),
            predicted=sum(each.predicted.seconds for each in partitions),
            observed=sum(each.observed.seconds for each in partitions),
        )


def _of(names: Collection[str], seen: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in seen.items() if name in names}
