"""Simulate runs with autoscaling, and summarize requests offered, SLO attainment and devices in use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from cotenant.control.scaling.scaler import Scaler, ScalingOptions
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.measure.report import Report
from cotenant.measure.timeline import Timeline
from cotenant.planners import Planner, Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.sim.recorder import Recorder
from cotenant.sim.run import simulate
from cotenant.workload import Workload


class AutoscaledRun(msgspec.Struct, frozen=True):
    """Hold the result of a run.

    timeline: by periods of the scaler; plans: each with the time in seconds from which it is in force.
    """

    timeline: Timeline
    plans: list[tuple[float, Plan]]
    report: Report


class IntervalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summarize an interval of a run.

    offered, goodput: requests/s; missed: fraction late or dropped; worst_missed: the same of the model and the period
    that missed most. devices, partitions: in use on average; shares: sum over all partitions, in devices. plan_changes:
    new plans that came into force.
    """

    offered: float
    goodput: float
    missed: float
    worst_missed: float
    devices: float
    partitions: float
    shares: float
    plan_changes: int


def run_autoscaled(
    problem: Problem,
    environment: Problem,
    planner: Planner,
    policy: ScalingOptions,
    workload: Workload,
    *,
    seconds: float,
    startup: float,
    seed: int,
) -> AutoscaledRun:
    """Simulate a workload while a scaler replans.

    problem: what the planner gets at the beginning, with rates; environment: the problem that the simulator uses, with
    the true interference. startup: seconds a worker takes to start; less than a period, so that a plan is in force
    before the next one is requested.
    """
    scaler = _Logged(Scaler(problem, planner, planner(problem), policy), startup)
    names = [model.name for model in environment.models]
    recorder = Recorder(Dispatcher().handle, names, {}, seconds=seconds, intervals=round(seconds / policy.period))
    report = simulate(
        environment,
        scaler.plans[0][1],
        workload,
        seconds=seconds,
        seed=seed,
        control=scaler,
        startup=startup,
        handle=recorder,
    )
    return AutoscaledRun(recorder.timeline(), scaler.plans, report)


class _Logged:
    """Record the plans of a scaler, each with the time at which its workers are up."""

    def __init__(self, scaler: Scaler, startup: float) -> None:
        self.plans = [(0.0, scaler.plan)]
        self._scaler = scaler
        self._startup = startup

    @property
    def period(self) -> float:
        return self._scaler.period

    def observe(self, rates: Mapping[str, float], now: float) -> Plan | None:
        plan = self._scaler.observe(rates, now)
        if plan is not None:
            self.plans.append((now + self._startup, plan))
        return plan

    def rolled_back(self, plan: Plan) -> None:
        self._scaler.rolled_back(plan)


def summarize_intervals(result: AutoscaledRun, seconds: float) -> list[tuple[float, IntervalSummary]]:
    """Summarize consecutive intervals of `seconds`, each with its start; then the whole run, with start infinity."""
    end = len(result.timeline.waiting) * result.timeline.step
    parts = [
        (start, summarize(result, start, min(start + seconds, end))) for start in np.arange(0.0, end, seconds).tolist()
    ]
    return [*parts, (math.inf, summarize(result, 0.0, end))]


def summarize(result: AutoscaledRun, start: float, end: float) -> IntervalSummary:
    """Summarize the run from `start` to `end`, in seconds, rounded to periods of the scaler."""
    timeline, step = result.timeline, result.timeline.step
    periods = slice(round(start / step), round(end / step))
    length = end - start
    offered = {name: rates[periods] for name, rates in timeline.offered.items()}
    kept = {name: rates[periods] for name, rates in timeline.goodput.items()}
    offered_rate, goodput_rate = (
        math.fsum(map(math.fsum, rates.values())) * step / length for rates in (offered, kept)
    )
    missed = [1 - good / many for name in offered for good, many in zip(kept[name], offered[name], strict=True) if many]
    devices, partitions, shares = (
        _in_force(result.plans, size, start, length) for size in (lambda plan: plan.devices_used, _partitions, _shares)
    )
    return IntervalSummary(
        offered=offered_rate,
        goodput=goodput_rate,
        missed=max(0.0, 1 - goodput_rate / offered_rate) if offered_rate else 0.0,
        worst_missed=max([0.0, *missed]),
        devices=devices,
        partitions=partitions,
        shares=shares,
        plan_changes=sum(start <= time < start + length for time, _ in result.plans[1:]),
    )


def _partitions(plan: Plan) -> float:
    return sum(len(device.partitions) for device in plan.devices)


def _shares(plan: Plan) -> float:
    return sum(partition.share for device in plan.devices for partition in device.partitions) / WHOLE


def _in_force(plans: Sequence[tuple[float, Plan]], size: Callable[[Plan], float], start: float, length: float) -> float:
    """Return the mean size of the plan in force over an interval."""
    ends = [time for time, _ in plans[1:]] + [math.inf]
    total = math.fsum(
        size(plan) * max(0.0, min(end, start + length) - max(time, start))
        for (time, plan), end in zip(plans, ends, strict=True)
    )
    return total / length
