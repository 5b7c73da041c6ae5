"""Describe a running server for the page, from its parts."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant import __version__
from cotenant.core.plan import Plan
from cotenant.core.provenance import Validation
from cotenant.core.units import WHOLE, part_of_device
from cotenant.live.page.alarms import alarms, health
from cotenant.live.page.history import History, busy_parts, model_activity, slowdowns_by_partition
from cotenant.live.page.job_views import job_alarms, job_views
from cotenant.live.page.snapshot import (
    BusyView,
    Charts,
    CutView,
    DecisionView,
    DeviceView,
    DurationView,
    MachineView,
    ModelView,
    PartitionView,
    PlacementView,
    PlanView,
    RolloutView,
    SeriesView,
    Tick,
)
from cotenant.live.page.totals import Totals
from cotenant.live.partition_labels import RETIRED
from cotenant.live.status import Snapshot, phase_durations


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What a tick is made from, besides the snapshot. time: in seconds since 1970. memory: bytes, by process. server:
    processors that the server's own process uses."""

    time: float
    state: str
    totals: Totals
    memory: Mapping[int, int]
    server: float | None


def tick(seen: Snapshot, moment: Moment, history: History, points: int) -> Tick:
    """Describe what changes every second."""
    before = history.last_minute(moment.totals)
    models = _models(seen, moment.totals, before)
    partitions = _partitions(seen, moment, before)
    machine = _machine(seen, moment.server)
    last = seen.rollout.last[0] if seen.rollout.last else None
    short = "" if seen.adaptation is None else seen.adaptation.short
    return Tick(
        time=moment.time,
        state=moment.state,
        points=points,
        models=models,
        partitions=partitions,
        machine=machine,
        alarms=[
            *alarms(moment.state, models, partitions, machine, last, short, seen.reload_error, seen.file_errors),
            *job_alarms(seen.jobs, moment.time),
        ],
        jobs=job_views(seen.jobs),
    )


def _models(seen: Snapshot, totals: Totals, before: Totals) -> list[ModelView]:
    queues: dict[str, int] = {}
    for waiting in seen.waiting.values():
        for model, count in waiting.items():
            queues[model] = queues.get(model, 0) + count
    views = []
    for entry in seen.models:
        view = ModelView(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason, health="off")
        objective = seen.objectives.get(entry.name)
        if objective is not None and entry.name in totals.models:
            activity = model_activity(entry.name, before, totals)
            served = entry.state == "READY" or activity.stayed > 0
            view = msgspec.structs.replace(
                view,
                health=health(activity.attainment, activity.stayed, objective) if served else "off",
                slo=seen.targets[entry.name],
                objective=objective,
                planned=seen.planned.get(entry.name, 0.0),
                rate=activity.rate,
                goodput=activity.goodput,
                refused=activity.refused,
                failed=activity.failed,
                attainment=activity.attainment,
                p50=activity.p50,
                p99=activity.p99,
                why=activity.why,
                queue=queues.get(entry.name, 0),
            )
        views.append(view)
    return views


def _partitions(seen: Snapshot, moment: Moment, before: Totals) -> list[PartitionView]:
    busy = busy_parts(before, moment.totals)
    slowdowns = slowdowns_by_partition(before, moment.totals)
    views = []
    for worker in seen.workers:
        label = seen.labels[worker.lane]
        if label == RETIRED:
            continue
        predicted, observed = slowdowns.get(label, (None, None))
        views.append(
            PartitionView(
                device=label.device,
                partition=label.partition,
                lane=worker.lane,
                models=worker.models,
                state=worker.state,
                reason=worker.reason,
                share=part_of_device(worker.share),
                used=None if worker.used_share is None else worker.used_share / WHOLE,
                over_share=worker.over_share,
                busy=busy.get(label, {}),
                queue=sum(seen.waiting[worker.lane].values()),
                restarts=worker.restarts,
                standby=worker.standby,
                memory=0 if worker.pid is None else moment.memory.get(worker.pid, 0),
                slowdown=observed,
                predicted_slowdown=predicted,
            )
        )
    return views


def _machine(seen: Snapshot, server: float | None) -> MachineView:
    adaptation = seen.adaptation
    if adaptation is None:
        return MachineView(server=server)
    foreign = adaptation.foreign_load
    return MachineView(
        foreign=None if foreign is None else foreign * adaptation.processors,
        processors=adaptation.processors,
        slowdown=adaptation.observed_slowdown,
        server=server,
    )


def plan_view(seen: Snapshot, plan: Plan, time: float) -> PlanView:
    """Describe what changes with the plan. time: now, in seconds since 1970."""
    adaptation, rollout = seen.adaptation, seen.rollout
    activity = ""
    if adaptation is not None:
        activity = adaptation.activity + (f": {adaptation.reason}" if adaptation.reason else "")
    return PlanView(
        version=__version__,
        backend=seen.backend,
        isolation=seen.isolation,
        planner=plan.planner,
        revision=rollout.revision,
        reason=rollout.reason,
        rollout=rollout.sentence() if rollout.rolling_out or rollout.desired != rollout.revision else "",
        validation=_validated(rollout.validation),
        activity=activity,
        refinement="" if adaptation is None else adaptation.refinement,
        unserved=plan.unserved,
        devices=[
            DeviceView(
                device=str(device.id),
                cuts=[
                    CutView(
                        share=part_of_device(partition.share),
                        placements=[
                            PlacementView(model=each.model, batch=each.batch, rate=each.rate, procs=each.procs)
                            for each in partition.placements
                        ],
                    )
                    for partition in device.partitions
                ],
            )
            for device in plan.devices
        ],
        rollouts=[
            RolloutView(
                time=time - past.seconds_ago,
                revision=past.revision,
                reason=past.reason,
                outcome=past.outcome.value,
                failed=past.failed,
                failure=past.failure,
                seconds=past.durations.total,
                phases=past.phases,
                late=past.late,
            )
            for past in rollout.last
        ],
        decisions=[]
        if adaptation is None
        else [
            DecisionView(time=time - each.seconds_ago, action=each.action, reason=each.reason)
            for each in adaptation.decisions
        ],
        durations=[
            DurationView(step=step, count=each.count, p50=each.p50, p99=each.p99, max=each.max)
            for step, each in phase_durations(rollout, adaptation)
        ],
        late=rollout.late,
    )


def _validated(validation: Validation | None) -> str:
    if validation is None:
        return "not simulated before use"
    text = f"simulated before use, {validation.requests} requests: "
    worst = validation.worst
    if worst is None or validation.passed:
        return text + ("every SLO met" if validation.passed else "an SLO missed")
    return text + f"{worst.name} at {worst.attainment * 100:.1f} % of {worst.objective * 100:.4g} %"


def charts(history: History, points: int, last: int) -> Charts:
    """Return the last so many points of all charts. points: how many there have been since the start."""

    def cut(values: object) -> list[float | None]:
        return list(values)[-last:]  # type: ignore[call-overload, no-any-return]

    return Charts(
        points=points,
        times=list(history.times)[-last:],
        models={
            name: SeriesView(
                rate=cut(series.rate), goodput=cut(series.goodput), p50=cut(series.p50), p99=cut(series.p99)
            )
            for name, series in history.models.items()
        },
        partitions=[
            BusyView(device=label.device, partition=label.partition, busy=cut(values))
            for label, values in history.busy.items()
        ],
    )
