"""Simulate runs with autoscaling, and summarize requests offered, SLO attainment and devices in use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cotenant.control.adaptation import ControllerCommand, ControllerEvent, Observed, Roll, RollEnded, Solve, Solved
from cotenant.control.controller_built import ControllerBuilt, known_devices
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.periodic import PeriodicController, PeriodicOptions
from cotenant.control.provider import DeviceProvider, FixedProvider
from cotenant.control.revision import RolloutOutcome
from cotenant.control.scaling import ScalingPolicy
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import renumber_devices
from cotenant.core.request import Outcome
from cotenant.core.units import WHOLE
from cotenant.measure.report import Report
from cotenant.measure.timeline import Timeline
from cotenant.planners import Planner, Problem
from cotenant.planners.rates import at_rates
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import Replanner, with_devices
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Command, Event, Reply
from cotenant.sim.adaptation import Adaptation, ControllerMachine, Solver
from cotenant.sim.loop import Handle
from cotenant.sim.recorder import Recorder
from cotenant.sim.run import simulate
from cotenant.workload import Workload

SOLVING = 0.5  # seconds that our controller waits for a plan; the others' are at once
OBSERVED = 2.5  # seconds between observations, of which each period of a policy is a multiple
OBSERVED_TRACKED = 0.5  # the same of our controller, as in the server
DEFAULT_HEADROOM = ControllerOptions().headroom


class AutoscaledRun(msgspec.Struct, frozen=True):
    """Hold the result of a run.

    timeline: by periods of the policy; plans: each with the time in seconds from which it is in force. utilisation: by
    observations, every `observed` seconds, the part of all devices of the cluster that ran batches. response_times: by
    periods, mean seconds of answered requests, `nan` where none was.
    """

    timeline: Timeline
    plans: list[tuple[float, Plan]]
    report: Report
    utilisation: list[float]
    response_times: list[float]
    observed: float = OBSERVED


class IntervalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summarize an interval of a run.

    offered, goodput: requests/s; missed: fraction late or dropped; worst_missed: the same of the model and the period
    that missed most. devices, partitions: in use on average; shares: sum over all partitions, in devices. plan_changes:
    new plans that came into force. utilisation: of the cluster; response_time: mean seconds of answered requests.
    """

    offered: float
    goodput: float
    missed: float
    worst_missed: float
    devices: float
    partitions: float
    shares: float
    plan_changes: int
    utilisation: float
    response_time: float


class PlannerSolver(msgspec.Struct, frozen=True):
    """Answer every `Solve` by a planner alone, for the devices that are there, filling them or not as it does."""

    problem: Problem
    planner: Planner

    def __call__(self, solve: Solve) -> Solved:
        problem = with_devices(at_rates(self.problem, solve.rates), Counter(device.kind for device in solve.devices))
        if not problem.fleet:
            return Solved(number=solve.number, plan=Plan(planner="none"))
        plan = self.planner(msgspec.structs.replace(problem, current=solve.current))
        return Solved(number=solve.number, plan=renumber_devices(plan, solve.current, solve.devices))


def run_autoscaled(
    problem: Problem,
    environment: Problem,
    planner: Planner,
    policy: ScalingPolicy,
    options: PeriodicOptions,
    workload: Workload,
    *,
    seconds: float,
    startup: float,
    seed: int,
    first: Plan | None = None,
) -> AutoscaledRun:
    """Simulate a workload under a scaling policy, on the devices of one cluster, which it may use or not.

    problem: what the planner gets at the beginning, with rates; environment: the problem that the simulator uses, with
    the true interference. startup: seconds a worker takes to start. first: the plan at the beginning, where it is not
    the planner's for the problem.
    """
    return run_controlled(
        problem,
        environment,
        planner(problem) if first is None else first,
        PeriodicController(policy, problem, options),
        PlannerSolver(problem, planner),
        workload,
        seconds=seconds,
        startup=startup,
        seed=seed,
        period=options.period,
        solve_seconds=0.0,
    )


def run_tracked(
    problem: Problem,
    environment: Problem,
    workload: Workload,
    *,
    seconds: float,
    startup: float,
    seed: int,
    period: float,
    headroom: float = DEFAULT_HEADROOM,
) -> AutoscaledRun:
    """Simulate a workload under our own controller, which plans by geometry whenever it has reason to.

    It knows all devices of the cluster, and a plan uses as many as it needs; what a plan does not use costs nothing.
    Arguments are those of `run_autoscaled`. period: seconds of the intervals of the result. headroom: as in
    `ControllerOptions`; the first plan is for the rates of the problem as they are.
    """
    plan = plan_problem(problem, validate=False)
    return run_controlled(
        problem,
        environment,
        plan,
        ControllerBuilt.of(problem, plan, ControllerOptions(lead=startup, headroom=headroom)).controller(),
        Replanner(problem),
        workload,
        seconds=seconds,
        startup=startup,
        seed=seed,
        period=period,
        solve_seconds=SOLVING,
        provider=FixedProvider(()),  # it has none of them to give or to take back
        observed=OBSERVED_TRACKED,
    )


def run_controlled(
    problem: Problem,
    environment: Problem,
    plan: Plan,
    controller: ControllerMachine,
    solver: Solver,
    workload: Workload,
    *,
    seconds: float,
    startup: float,
    seed: int,
    period: float,
    solve_seconds: float,
    provider: DeviceProvider | None = None,
    observed: float = OBSERVED,
) -> AutoscaledRun:
    """Simulate a workload under any controller, with any solver. Other arguments are those of `run_autoscaled`.

    plan: at the beginning. period: seconds of the intervals of the result. solve_seconds: that a solver takes.
    provider: of devices; by default it gives those of the cluster that the first plan does not use.
    observed: seconds between two observations.
    """
    devices = known_devices(problem)
    log = _Log(plan, len(devices))
    adaptation = Adaptation(
        controller=controller,
        solver=solver,
        provider=provider or FixedProvider(devices, (device.id for device in plan.devices)),
        solve_seconds=solve_seconds,
        period=observed,
        log=log,
    )
    periods = round(seconds / period)
    response_times = _ResponseTimes(Dispatcher().handle, seconds / periods, periods)
    names = [model.name for model in environment.models]
    recorder = Recorder(response_times, names, {}, seconds=seconds, intervals=periods)
    report = simulate(
        plan,
        environment,
        workload,
        seconds=seconds,
        seed=seed,
        adaptation=adaptation,
        startup=startup,
        handle=recorder,
    )
    return AutoscaledRun(recorder.timeline(), log.plans, report, log.utilisation, response_times.means(), observed)


class _Log:
    """Record the plans in force and the utilisation of a cluster of so many devices."""

    def __init__(self, plan: Plan, devices: int) -> None:
        self.plans = [(0.0, plan)]
        self.utilisation: list[float] = []
        self._devices = devices
        self._rolling: dict[int, Plan] = {}

    def __call__(self, now: float, event: ControllerEvent, commands: list[ControllerCommand]) -> None:
        match event:
            case RollEnded(number=number, outcome=RolloutOutcome.COMPLETED):
                self.plans.append((now, self._rolling[number]))
            case Observed(utilisation=utilisation):
                self.utilisation.append(utilisation * _shares(self.plans[-1][1]) / self._devices)
            case _:
                pass
        for command in commands:
            if isinstance(command, Roll):
                self._rolling[command.number] = command.plan


class _ResponseTimes:
    """Record the mean time from arrival to answer by periods: a transparent wrapper of a dispatcher's `handle`."""

    def __init__(self, handle: Handle, period: float, periods: int) -> None:
        self._handle = handle
        self._period = period
        self._sums = np.zeros((2, periods))

    def __call__(self, event: Event, now: float) -> list[Command]:
        commands = self._handle(event, now)
        for command in commands:
            if type(command) is Reply and command.outcome is Outcome.SERVED:
                index = int(now / self._period)
                if index < self._sums.shape[1]:
                    self._sums[0, index] += sum([now - request.arrived for request in command.requests])
                    self._sums[1, index] += len(command.requests)
        return commands

    def means(self) -> list[float]:
        totals, counts = self._sums
        means: list[float] = np.divide(totals, counts, out=np.full(len(totals), math.nan), where=counts > 0).tolist()
        return means


def summarize_intervals(result: AutoscaledRun, seconds: float) -> list[tuple[float, IntervalSummary]]:
    """Summarize consecutive intervals of `seconds`, each with its start; then the whole run, with start infinity."""
    end = len(result.timeline.waiting) * result.timeline.step
    parts = [
        (start, summarize(result, start, min(start + seconds, end))) for start in np.arange(0.0, end, seconds).tolist()
    ]
    return [*parts, (math.inf, summarize(result, 0.0, end))]


def summarize(result: AutoscaledRun, start: float, end: float) -> IntervalSummary:
    """Summarize the run from `start` to `end`, in seconds, rounded to periods of the policy."""
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
        utilisation=_mean(result.utilisation[round(start / result.observed) : round(end / result.observed)]),
        response_time=_mean([time for time in result.response_times[periods] if not math.isnan(time)]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


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
