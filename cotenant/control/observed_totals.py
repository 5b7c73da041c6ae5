"""Tell a controller what is new in totals that a simulator or a server counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from cotenant.control.adaptation import BatchLatency, Observed
from cotenant.control.orchestrator import Orchestrator
from cotenant.control.rollout import Rollout
from cotenant.control.supervised_lane import LaneState
from cotenant.control.supervisor import Supervisor
from cotenant.core.identity import LaneId

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
        self._deaths: dict[LaneId, int] = {}
        self._away: dict[LaneId, float] = {}  # seconds for which a lane has been without its worker

    def observe(
        self,
        totals: Mapping[str, ModelTotals],
        seconds: float,
        orchestrator: Orchestrator,
        warming_up: Collection[LaneId] = (),
    ) -> Observed:
        """Return what is new since the last call, which was so many seconds ago. orchestrator: of all workers.
        warming_up: lanes that were slow since workers that died serve again before all is done that makes them
        fast."""
        change = {name: total.minus(self._before.get(name, ModelTotals())) for name, total in totals.items()}
        self._before = dict(totals)
        return Observed(
            seconds=seconds,
            interrupted=_disturbed(
                [*self._without_worker(orchestrator.supervisor, seconds), *warming_up], orchestrator.rollout
            ),
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

    def _without_worker(self, supervisor: Supervisor, seconds: float) -> list[LaneId]:
        """Return the lanes whose worker died in the last `seconds`, or has been away, but not for too long."""
        lanes = supervisor.lanes()
        away = {name for name, lane in lanes.items() if lane.state is LaneState.RESTARTING}
        self._away = {name: self._away.get(name, 0.0) + seconds for name in away}
        died = {name for name, lane in lanes.items() if lane.deaths != self._deaths.get(name, 0)}
        self._deaths = {name: lane.deaths for name, lane in lanes.items()}
        return [name for name in lanes if name in died or 0 < self._away.get(name, 0.0) <= LONGEST_INTERRUPTION]


def _disturbed(lanes: Collection[LaneId], rollout: Rollout) -> tuple[str, ...]:
    """Return the models of these lanes, those that share others with them, to which their requests go meanwhile, and
    the applications that any of these serve."""
    if not lanes:
        return ()
    held = {name: {model.model for model in lane.spec.models} for name, lane in rollout.lanes.items()}
    gone = set().union(*(held.get(name, ()) for name in lanes))
    models = gone.union(*(others for others in held.values() if not gone.isdisjoint(others)))
    served = (each for each in rollout.applications or () if any(stage.model in models for stage in each.stages))
    return tuple(sorted(models | {each.name for each in served}))
