"""What jobs see of the server that they run beside: counts, devices, models, and what is idle of GPUs."""

from __future__ import annotations

from cotenant.core.identity import DeviceId
from cotenant.core.units import WHOLE
from cotenant.errors import NotFoundError
from cotenant.live.driver import Driver
from cotenant.live.jobs.interference import Seconds
from cotenant.live.jobs.pressure import ServingCounts
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.worker.repository import worker_model
from cotenant.worker.wire import WorkerModel


class ServingView:
    """Read what a server keeps anyway. All methods belong to the event loop and are quick."""

    def __init__(self, state: ServingState, driver: Driver, observer: ServingObserver, rollouts: RolloutDriver) -> None:
        self._state = state
        self._driver = driver
        self._observer = observer
        self._rollouts = rollouts
        self._busy: dict[DeviceId, tuple[float, float]] = {}  # when, and share-seconds in batches by then

    def counts(self) -> ServingCounts:
        """Return what has been counted so far."""
        ended = missed = 0
        for counts in self._observer.models.values():
            stayed = counts.ledger.stayed
            ended += stayed
            missed += stayed - counts.ledger.within_target
        attainments = [model.attainment for model in self._state.deployment.problem.models]
        return ServingCounts(
            arrived=self._driver.arrived.total(),
            ended=ended,
            missed=missed,
            allowed=1 - max(attainments, default=0.99),
            waiting=self._waiting(),
            changing=bool(self._state.transitions) or not self._rollouts.is_idle,
        )

    def _waiting(self) -> dict[str, tuple[int, float]]:
        """Return the requests that wait, and how many full batches they are, of models that have any."""
        waiting: dict[str, tuple[int, float]] = {}
        for lane, assignment in self._state.lanes.items():
            counts = self._driver.waiting(lane)
            for held in assignment.spec.models:
                if count := counts.get(held.model):
                    rows, batches = waiting.get(held.model, (0, 0.0))
                    waiting[held.model] = rows + count, batches + count / len(held.latencies)
        return waiting

    def devices(self, model: str = "") -> tuple[DeviceId, ...]:
        """Return the devices of this machine that the plan in force uses. model: those alone that have it; "": all."""
        lanes = self._state.lanes_of(model) if model else self._state.lanes
        return tuple(sorted({lane.device for lane in lanes if not lane.device.node}))

    def idle_of(self, device: DeviceId, now: float) -> int | None:
        """Return the share, in ‰, of a device whose time is not the processors' that was in no batch since the last
        call; None at the first. now: as of the driver's clock."""
        spent = 0.0
        for lane, assignment in self._state.lanes.items():
            if lane.device == device:
                busy = self._observer.busy[self._observer.partitions.of(lane)]
                since = self._driver.busy_since(lane)
                spent += assignment.partition.share / WHOLE * (busy + (0.0 if since is None else now - since))
        before, self._busy[device] = self._busy.get(device), (now, spent)
        if before is None or now <= before[0]:
            return None
        return round(WHOLE * min(max(1 - (spent - before[1]) / (now - before[0]), 0.0), 1.0))

    def models(self) -> frozenset[str]:
        """Return the models that batch inference can run: those that are served, ensembles apart."""
        deployment = self._state.deployment
        return frozenset(
            model.name
            for model in deployment.problem.models
            if model.name in deployment.offered and deployment.offered[model.name].ensemble is None
        )

    def batch_seconds(self) -> Seconds:
        """Return what batches took so far, and what they were to take as profiled alone, in sums by model."""
        return {
            name: (
                sum(partition.observed.seconds for partition in counts.partitions.values()),
                sum(partition.alone.seconds for partition in counts.partitions.values()),
            )
            for name, counts in self._observer.models.items()
        }

    def worker_model(self, name: str) -> WorkerModel:
        """Return what runs a model. Raises NotFoundError."""
        servable = self._state.deployment.offered.get(name)
        if servable is None or servable.ensemble is not None:
            raise NotFoundError(f"model '{name}' is not one that batch inference can run")
        return worker_model(servable.entry, servable.info)
