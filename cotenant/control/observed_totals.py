"""Tell a controller what is new in totals that a simulator or a server counts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant.control.adaptation import BatchLatency, Observed
from cotenant.control.supervisor import Supervisor

LONGEST_INTERRUPTION = 10.0  # seconds; a worker that is away for longer is one that plans have to do without


class ModelTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted of a model or application since the start.

    arrived, rows: requests of callers, and their rows. ended: requests, those that applications make included. stayed,
    within_target: of these, see `Observed`. batches, predicted, observed: see `BatchLatency`.
    """

    arrived: int = 0
    rows: int = 0
    ended: int = 0
    stayed: int = 0
    within_target: int = 0
    batches: int = 0
    predicted: float = 0.0
    observed: float = 0.0

    def minus(self, before: ModelTotals) -> ModelTotals:
        """Return what was counted since `before`."""
        earlier = msgspec.structs.asdict(before)
        return ModelTotals(**{name: value - earlier[name] for name, value in msgspec.structs.asdict(self).items()})


class ObservedTotals:
    """Remember totals from one observation to the next."""

    def __init__(self) -> None:
        self._before: dict[str, ModelTotals] = {}
        self._deaths = 0
        self._away = 0.0  # seconds for which some worker has been away without a pause

    def observe(self, totals: Mapping[str, ModelTotals], seconds: float, supervisor: Supervisor) -> Observed:
        """Return what is new since the last call, which was so many seconds ago. supervisor: of all workers."""
        self._away = self._away + seconds if supervisor.restarting else 0.0
        died = supervisor.deaths != self._deaths
        interrupted = died or 0 < self._away <= LONGEST_INTERRUPTION
        self._deaths = supervisor.deaths
        change = {name: total.minus(self._before.get(name, ModelTotals())) for name, total in totals.items()}
        self._before = dict(totals)
        return Observed(
            seconds=seconds,
            interrupted=interrupted,
            offered={name: each.rows for name, each in change.items() if each.rows},
            stayed={name: each.stayed for name, each in change.items() if each.stayed},
            within_target={name: each.within_target for name, each in change.items() if each.within_target},
            # A stage of an application ends more often than callers ask for it.
            waiting={name: count for name, total in totals.items() if (count := total.arrived - total.ended) > 0},
            latencies={
                name: BatchLatency(each.batches, each.predicted, each.observed)
                for name, each in change.items()
                if each.batches
            },
        )
