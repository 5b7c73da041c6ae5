"""Report a server's state to people, programs and Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from cotenant.backends import Backend
from cotenant.core.plan import Plan
from cotenant.live.adaptation import Adaptation
from cotenant.live.driver import Driver
from cotenant.live.metrics import LaneReading, RolloutReading, ServerCollector
from cotenant.live.model_repository import ModelRepository
from cotenant.live.nodes.node_status import node_statuses
from cotenant.live.page.totals import Totals, read_totals
from cotenant.live.partition_labels import RETIRED
from cotenant.live.process import private_memory
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.rollout_statistics import Past
from cotenant.live.serving_observer import EPOCH, ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.live.status import (
    BatchStatus,
    DurationSummary,
    ModelStatus,
    PastRollout,
    RevisionStatus,
    Snapshot,
    Status,
)
from cotenant.measure.report import ModelReport, Report
from cotenant.planners.applications import carried_rates


class StatusReporter:
    """Take snapshots of a server: status, statistics, metrics."""

    def __init__(
        self,
        state: ServingState,
        repository: ModelRepository,
        observer: ServingObserver,
        driver: Driver,
        rollouts: RolloutDriver,
        backend: Backend,
        *,
        adaptation: Adaptation | None = None,
    ) -> None:
        self._state = state
        self._repository = repository
        self._observer = observer
        self._driver = driver
        self._rollouts = rollouts
        self._backend = backend
        self._adaptation = adaptation
        self._durations: dict[str, DurationSummary] = {}
        self._summarised = -1  # rollouts that had ended then

    def snapshot(self) -> Snapshot:
        """Return what the server is and does at this moment."""
        deployment, workers = self._state.deployment, self._rollouts.workers()
        return Snapshot(
            backend=self._backend.name,
            isolation=self._backend.isolation(),
            accepting=self._state.accepting,
            rollout=self._rollout_status(),
            targets={name: offered.model.slo for name, offered in deployment.offered.items()},
            objectives={name: offered.model.attainment for name, offered in deployment.offered.items()},
            planned=carried_rates(deployment.plan, deployment.problem),
            models=self._repository.index(),
            workers=workers,
            labels={worker.lane: self._observer.partitions.of(worker.lane) for worker in workers},
            waiting={worker.lane: self._driver.waiting(worker.lane) for worker in workers},
            reload_error=self._state.reload_error,
            file_errors=tuple(self._state.file_errors.values()),
            adaptation=None if self._adaptation is None else self._adaptation.status(),
            jobs=tuple(self._state.jobs()),
        )

    async def status(self) -> Status:
        """Return all that `cotenant status` shows. The memory of workers is read in a thread."""
        seen, plan = self.snapshot(), self.plan()
        pids = {worker.pid for worker in seen.workers if worker.pid is not None}
        memory = await asyncio.to_thread(lambda: {pid: private_memory(pid) for pid in pids})
        return Status(
            backend=seen.backend,
            isolation=seen.isolation,
            ready=seen.accepting,
            plan=msgspec.Raw(plan.to_json()),
            rollout=seen.rollout,
            targets=seen.targets,
            planned=seen.planned,
            models=seen.models,
            statistics={
                name: ModelStatus(
                    outcomes={outcome.value: count for outcome, count in counts.ledger.outcomes.items()},
                    attainment=counts.ledger.attainment,
                    mean=counts.ledger.latency.mean if counts.ledger.served else None,
                )
                for name, counts in self._observer.models.items()
            },
            workers=[
                msgspec.structs.replace(worker, memory=memory[worker.pid]) if worker.pid is not None else worker
                for worker in seen.workers
            ],
            startup=self._state.startup,
            reload_error=seen.reload_error,
            file_errors=seen.file_errors,
            adaptation=seen.adaptation,
            jobs=seen.jobs,
            nodes=node_statuses(self._backend),
            batches=tuple(self._batches(seen)),
        )

    def _batches(self, seen: Snapshot) -> Iterator[BatchStatus]:
        for worker in seen.workers:
            label = seen.labels[worker.lane]
            for model in worker.models if label != RETIRED else ():
                batches = self._observer.models[model].partitions.get(label)
                if batches is not None and (count := batches.observed.count):
                    yield BatchStatus(
                        lane=worker.lane,
                        device=label.device,
                        partition=label.partition,
                        model=model,
                        batches=count,
                        profiled=batches.alone.seconds / count,
                        predicted=batches.predicted.seconds / count,
                        observed=batches.observed.seconds / count,
                    )

    def totals(self, now: float) -> Totals:
        """Return what has been counted since the start."""
        return read_totals(self._observer, now)

    def plan(self) -> Plan:
        """Return the plan in force."""
        return self._state.deployment.plan

    def _rollout_status(self) -> RevisionStatus:
        status = self._rollouts.status()
        in_force, desired, past, now = status.in_force, status.desired, self._rollouts.statistics, time.monotonic()
        return RevisionStatus(
            revision=0 if in_force is None else in_force.number,
            reason="" if in_force is None else in_force.reason,
            validation=None if in_force is None else in_force.validation,
            desired=0 if desired is None else desired.number,
            desired_reason="" if desired is None else desired.reason,
            rolling_out=status.rolling_out or 0,
            phase="" if status.phase is None else status.phase.value,
            last=tuple(_past(now - each.at, each) for each in past.last),
            durations=self._rollout_durations(),
            late=past.late_until(self._observer.late),
        )

    def _rollout_durations(self) -> dict[str, DurationSummary]:
        """Summarise the durations of rollouts, once for each that ends: an open page asks every second."""
        past = self._rollouts.statistics
        ended = sum(past.outcomes.values())
        if ended != self._summarised:
            phases = past.phases | {"whole": past.whole}
            self._summarised = ended
            self._durations = {phase: DurationSummary.of(seconds) for phase, seconds in phases.items()}
        return self._durations

    def statistics(self, name: str = "") -> list[dict[str, Any]]:
        """Return Triton's `model_stats`, one entry a model; of all models where no name is given."""
        return [counts.to_json(EPOCH) for model, counts in self._observer.models.items() if name in ("", model)]

    def metrics(self) -> ServerCollector:
        """Return the metrics, with the lanes as they are now."""
        return ServerCollector(
            self._observer.models.values(),
            self.lane_readings(),
            workers=Counter(worker.state for worker in self._rollouts.workers()),
            rollouts=self.rollout_reading(),
            adaptation=None if self._adaptation is None else self._adaptation.reading(),
            jobs=self._state.jobs(),
            nodes=node_statuses(self._backend),
            backend=self._backend.name,
            isolation=self._backend.isolation(),
        )

    def rollout_reading(self) -> RolloutReading:
        """Return the revision in force, the rollout under way, and how those before ended."""
        status, statistics = self._rollouts.status(), self._rollouts.statistics
        return RolloutReading(
            revision=0 if status.in_force is None else status.in_force.number,
            phase="" if status.phase is None else status.phase.value,
            outcomes={outcome.value: count for outcome, count in statistics.outcomes.items()},
            durations=statistics.phases,
        )

    def lane_readings(self) -> list[LaneReading]:
        """Return the state of every lane of the plan in force."""
        return [
            LaneReading(
                lane=worker.lane,
                partition=(label := self._observer.partitions.of(worker.lane)),
                models=worker.models,
                up=worker.state == "ready",
                lost=worker.state == "lost",
                share=worker.share,
                used_share=worker.used_share,
                over_share=worker.over_share,
                busy=self._observer.busy[label],
                lent=self._observer.lent[label],
                restarts=worker.restarts,
                promotions=worker.promotions,
                standby=worker.standby == "ready",
                waiting=self._driver.waiting(worker.lane),
            )
            for worker in self._rollouts.workers()
            if worker.lane in self._state.lanes
        ]

    def with_batch_means(self, report: Report) -> Report:
        """Return a report of what callers saw with the mean batch, and its mean predicted and observed latency, of all
        batches since the start."""
        return msgspec.structs.replace(report, models=tuple(self._with_batch_means(row) for row in report.models))

    def _with_batch_means(self, row: ModelReport) -> ModelReport:
        counts = self._observer.models[row.model]
        if not counts.partitions:
            return row
        ledger = counts.ledger
        return msgspec.structs.replace(
            row,
            batch=ledger.rows / ledger.batches,
            predicted=ledger.predicted / ledger.batches,
            observed=ledger.observed / ledger.batches,
        )


def _past(seconds_ago: float, past: Past) -> PastRollout:
    ended = past.ended
    return PastRollout(
        seconds_ago=seconds_ago,
        revision=ended.revision.number,
        reason=ended.revision.reason,
        outcome=ended.outcome,
        failure=ended.reason,
        durations=ended.durations,
        late=past.late,
    )
