"""Simulated runs in which a scaler follows the requests: what was asked, what was in time, and on how many devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from cotenant.control.scaling import Scaler, ScalingOptions
from cotenant.core.plan import Plan
from cotenant.core.units import WHOLE
from cotenant.measure.report import Report
from cotenant.measure.timeline import Timeline
from cotenant.planners import Planner, Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.sim.recorder import Recorder
from cotenant.sim.run import simulate
from cotenant.workload import Workload


class Story(msgspec.Struct, frozen=True):
    """timeline: by looks of the scaler. plans: which was in force from when on, in seconds."""

    timeline: Timeline
    plans: list[tuple[float, Plan]]
    report: Report


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A while of a story. offered, in_time: requests/s; missed: late or dropped, as a fraction; worst: the same of the
    model and the look that missed most. devices, partitions: in use, on average; shares: of all partitions, in devices.
    begun: plans that were gone over to."""

    offered: float
    in_time: float
    missed: float
    worst: float
    devices: float
    partitions: float
    shares: float
    begun: int


def scaled(
    asked: Problem,
    machines: Problem,
    planner: Planner,
    policy: ScalingOptions,
    workload: Workload,
    *,
    seconds: float,
    startup: float,
    seed: int,
) -> Story:
    """asked: what the planner is asked at the beginning, with rates; machines: the world that its plans run in.

    startup: seconds of a worker; less than a period, so that a plan is in force before the next one is asked for.
    """
    scaler = _Logged(Scaler(asked, planner, planner(asked), policy), startup)
    names = [model.name for model in machines.models]
    recorder = Recorder(Dispatcher().handle, names, {}, seconds=seconds, intervals=round(seconds / policy.period))
    report = simulate(
        machines,
        scaler.plans[0][1],
        workload,
        seconds=seconds,
        seed=seed,
        control=scaler,
        startup=startup,
        handle=recorder,
    )
    return Story(recorder.timeline(), scaler.plans, report)


class _Logged:
    """A scaler whose plans are written down, each with when its workers are up."""

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


def spans(story: Story, seconds: float) -> list[tuple[float, Span]]:
    """In spans of so many seconds, each with when it begins; and then the whole, which begins at infinity."""
    end = len(story.timeline.waiting) * story.timeline.step
    parts = [(start, span(story, start, min(start + seconds, end))) for start in np.arange(0.0, end, seconds).tolist()]
    return [*parts, (math.inf, span(story, 0.0, end))]


def span(story: Story, start: float, end: float) -> Span:
    """From one second to another, up to whole looks of the scaler."""
    timeline, step = story.timeline, story.timeline.step
    looks = slice(round(start / step), round(end / step))
    length = end - start
    offered = {name: rates[looks] for name, rates in timeline.offered.items()}
    kept = {name: rates[looks] for name, rates in timeline.goodput.items()}
    asked, answered = (math.fsum(map(math.fsum, rates.values())) * step / length for rates in (offered, kept))
    missed = [1 - good / many for name in offered for good, many in zip(kept[name], offered[name], strict=True) if many]
    devices, partitions, shares = (
        _in_force(story.plans, size, start, length) for size in (lambda plan: plan.devices_used, _partitions, _shares)
    )
    return Span(
        offered=asked,
        in_time=answered,
        missed=max(0.0, 1 - answered / asked) if asked else 0.0,
        worst=max([0.0, *missed]),
        devices=devices,
        partitions=partitions,
        shares=shares,
        begun=sum(start <= time < start + length for time, _ in story.plans[1:]),
    )


def _partitions(plan: Plan) -> float:
    return sum(len(device.partitions) for device in plan.devices)


def _shares(plan: Plan) -> float:
    return sum(partition.share for device in plan.devices for partition in device.partitions) / WHOLE


def _in_force(plans: Sequence[tuple[float, Plan]], size: Callable[[Plan], float], start: float, length: float) -> float:
    """The size of the plan in force, on average over a while."""
    ends = [time for time, _ in plans[1:]] + [math.inf]
    total = math.fsum(
        size(plan) * max(0.0, min(end, start + length) - max(time, start))
        for (time, plan), end in zip(plans, ends, strict=True)
    )
    return total / length
