"""`cotenant validate --adapt`: a live server that adapts, and the same load and controller simulated.

Two things are compared, and only the first is an invariant:

- replay: a fresh controller hears what the live one heard, at the same times, from the server's event log. It has to
  decide the same, command by command; else there is a bug, and the command fails;
- simulation: a controller that is built alike hears what a simulated server sees under the same requests, whose batches
  take as long, against their profile, as they took live. It decides alike where the two see alike. What is seen half a
  second later, or solved for other rates, may well be decided otherwise: the more so the busier the machine.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.interrupt import interruptible
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.output import aside
from cotenant.cli.served_process import complete_lines, served_process
from cotenant.control.adaptation import Observed, Roll, RollEnded, Solve, Solved
from cotenant.control.controller_built import ControllerBuilt
from cotenant.control.controller_status import Decision, decisions_since
from cotenant.control.event_log import ControllerLine, controller_lines
from cotenant.core.plan import Plan
from cotenant.measure.report import ModelReport, Report
from cotenant.render.report import show_attainment, show_duration
from cotenant.render.table import table

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.workload import Workload

MIN_STARTUP = 0.05  # seconds that a rollout or a solver takes, where none was seen
MIN_FACTOR = 1e-3  # of a latency
BIN = 2.0  # seconds over which slowdowns are averaged


class AdaptiveRunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one of the two runs. decisions: with seconds since the load began. plans: for each that was asked for, the
    cause and how far the solver went, "failed" where it found none. rollouts: their outcomes. difference: between the
    commands of the run and those of its replay, in words; empty where there is none, as there must be."""

    report: Report
    decisions: tuple[Decision, ...]
    plans: tuple[str, ...]
    rollouts: tuple[str, ...]
    difference: str = ""


class AdaptiveComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Compare a live run with its simulation. loads: multiples of the planned rates, one after the other, each for so
    many `seconds`. slowdowns: of batches against their profile, by model, as observed live and simulated with."""

    loads: tuple[float, ...]
    seconds: float
    live: AdaptiveRunReport
    simulated: AdaptiveRunReport
    slowdowns: dict[str, float]

    @property
    def replay_difference(self) -> str:
        """Where a replay decided otherwise, in words; empty unless there is a bug."""
        return self.live.difference or self.simulated.difference

    @property
    def decides_the_same(self) -> bool:
        """Whether both controllers planned for the same causes, with the same results, in the same order."""
        return (self.live.plans, self.live.rollouts) == (self.simulated.plans, self.simulated.rollouts)


async def compare_adaptive(
    problem: Problem, planner: str, flags: Sequence[str], loads: Sequence[float], seconds: float, seed: int
) -> AdaptiveComparison:
    """Send one load after the other to a live server, and simulate that. flags: of `cotenant serve`, whose plan must be
    for this problem. seconds: of each load."""
    from cotenant.cli.client import bodies_for
    from cotenant.live.load_generator import generate_load
    from cotenant.workload.arrivals import generate_arrivals

    whole = seconds * len(loads)
    async with interruptible(), served_process(flags, adapt=True) as (plan, http, log):
        models = [model for model in problem.models if plan.rate(model.name)]
        workload = load_steps({model.name: plan.rate(model.name) for model in models}, loads, seconds)
        bodies = await bodies_for(http, models, seed)
        aside.print(
            f"{', '.join(f'{load:g}' for load in loads)} × the planned rates, {seconds:g} s each", highlight=False
        )
        tune_for_latency()
        begun = time.monotonic()
        report = await generate_load(http, models, bodies, generate_arrivals(workload, whole, seed), whole)
        ended = time.monotonic()
        built, entries = controller_lines(complete_lines(log, 0), str(log))
    live = replayed(report, built, [entry for entry in entries if entry.now <= ended], begun)
    observed = observed_slowdowns(entries, begun)
    simulated = simulated_run(problem, plan, planner, workload, built, entries, observed, seconds=whole, seed=seed)
    return AdaptiveComparison(
        loads=tuple(loads), seconds=seconds, live=live, simulated=simulated, slowdowns=observed.models
    )


def load_steps(rates: dict[str, float], loads: Sequence[float], seconds: float) -> Workload:
    """Return multiples of the rates, each for so many seconds."""
    from cotenant.workload import Workload
    from cotenant.workload.sources import Curve

    return Workload(
        sources={name: Curve.steps([rate * load for load in loads], seconds) for name, rate in rates.items()}
    )


def replayed(
    report: Report, built: ControllerBuilt, entries: Iterable[ControllerLine], since: float
) -> AdaptiveRunReport:
    """Return what a log's controller decided from `since` on: the log has commands, and a replay has reasons. All
    entries are replayed, and compared."""
    controller = built.controller()
    decisions: list[Decision] = []
    last: Decision | None = None
    plans: list[str] = []
    rollouts: list[str] = []
    causes: dict[int, str] = {}
    difference = ""
    for entry in entries:
        commands = controller.handle(entry.event, entry.now)
        if commands != entry.commands and not difference:
            difference = f"at {entry.now - since:.1f} s: logged {entry.commands}, replayed {commands}"
        fresh = decisions_since(controller.decisions, last)
        last = fresh[-1] if fresh else last
        if entry.now < since:
            continue
        decisions += [msgspec.structs.replace(each, time=each.time - since) for each in fresh]
        causes |= {command.number: str(command.cause) for command in entry.commands if isinstance(command, Solve)}
        match entry.event:
            case Solved(number=number, plan=plan, step=step) if number in causes:
                plans.append(f"{causes[number]}: {'failed' if plan is None else step}")
            case RollEnded(outcome=outcome):
                rollouts.append(str(outcome))
    return AdaptiveRunReport(
        report=report,
        decisions=tuple(decisions),
        plans=tuple(plans),
        rollouts=tuple(rollouts),
        difference=difference,
    )


class ObservedSlowdowns(msgspec.Struct, frozen=True):
    """Say how many times as long as profiled and predicted batches took: each model's, and all batches' over time, as
    (seconds since the load began, from then on)."""

    models: dict[str, float]
    times: tuple[tuple[float, float], ...]


def observed_slowdowns(entries: Iterable[ControllerLine], since: float) -> ObservedSlowdowns:
    """Return the slowdowns from `since` on, in a controller's log."""
    predicted, observed = defaultdict[str, float](float), defaultdict[str, float](float)
    bins: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    counted: dict[str, float] = {}  # that the plan in force counts with
    asked: dict[int, dict[str, float]] = {}
    for entry in entries:
        asked |= {command.number: command.slowdowns for command in entry.commands if isinstance(command, Roll)}
        if isinstance(entry.event, RollEnded) and entry.event.outcome == "completed":
            counted = asked.get(entry.event.number, counted)
        if not isinstance(entry.event, Observed) or entry.now < since:
            continue
        sums = bins[int((entry.now - since) / BIN)]
        for name, batches in entry.event.latencies.items():
            profiled = batches.predicted / counted.get(name, 1.0)
            predicted[name], observed[name] = predicted[name] + profiled, observed[name] + batches.observed
            sums[0], sums[1] = sums[0] + profiled, sums[1] + batches.observed
    models = {name: observed[name] / seconds for name, seconds in predicted.items() if seconds > 0}
    times = tuple((n * BIN, took / profiled) for n, (profiled, took) in sorted(bins.items()) if profiled > 0)
    return ObservedSlowdowns(models, times)


def simulated_run(
    problem: Problem,
    plan: Plan,
    planner: str,
    workload: Workload,
    built: ControllerBuilt,
    entries: Sequence[ControllerLine],
    slowdowns: ObservedSlowdowns,
    *,
    seconds: float,
    seed: int,
) -> AdaptiveRunReport:
    """Simulate the load that was sent live. entries: the live controller's, for how long solving and rollouts took."""
    from cotenant.core.profile import slowed_profiles
    from cotenant.planning.replan import Replanner
    from cotenant.sim.adaptation import Adaptation
    from cotenant.sim.run import simulate

    told: list[ControllerLine] = []
    rates = next((entry.event.rates for entry in entries if hasattr(entry.event, "rates")), problem.rates)
    adaptation = Adaptation(
        controller=built.controller(),
        solver=Replanner(problem, planner),
        solve_seconds=statistics.fmean(
            [entry.event.seconds for entry in entries if isinstance(entry.event, Solved)] or [MIN_STARTUP]
        ),
        rates=rates,
        log=lambda now, event, commands: told.append(ControllerLine(now=now, event=event, commands=commands)),
    )
    # Over time by all batches, as by other programs; what a model differs from that, by its profile.
    mean = statistics.fmean(slowdowns.models.values()) if slowdowns.models else 1.0
    own = {name: max(slowdown / mean, MIN_FACTOR) for name, slowdown in slowdowns.models.items()}
    environment = msgspec.structs.replace(problem, profiles=slowed_profiles(problem.profiles, own))
    report = simulate(
        plan,
        environment,
        workload,
        seconds=seconds,
        seed=seed,
        adaptation=adaptation,
        foreign_load=[(time, max(slowdown, MIN_FACTOR)) for time, slowdown in slowdowns.times],
        startup=statistics.fmean(
            [entry.event.seconds for entry in entries if isinstance(entry.event, RollEnded)] or [MIN_STARTUP]
        ),
    )
    return replayed(report, built, told, 0.0)


def adaptive_comparison_view(compared: AdaptiveComparison) -> RenderableType:
    """Tabulate attainment and median latency of both runs, and what both controllers decided."""
    loads = ", ".join(f"{load:g}" for load in compared.loads)
    rows = table(
        f"{loads} × the planned rates, {compared.seconds:g} s each: live, and simulated",
        "model",
        *(">requests", ">p50", ">simulated", ">attainment", ">simulated", ">batches"),
    )
    others = {row.model: row for row in compared.simulated.report.models}
    for row in compared.live.report.models:
        rows.add_row(*_cells(row, others.get(row.model), compared.slowdowns.get(row.model)))
    decided = table("decisions", "run", ">time", "decision", "reason")
    for name, run in (("live", compared.live), ("simulated", compared.simulated)):
        for decision in run.decisions:
            decided.add_row(name, f"{decision.time:.1f} s", escape(decision.action), escape(decision.reason))
    return Group(rows, decided, Text(_replay_verdict(compared)), Text(_simulation_verdict(compared)))


def _replay_verdict(compared: AdaptiveComparison) -> str:
    if compared.replay_difference:
        return f"Replay (the same observations): DIFFERENT DECISIONS, which is a bug: {compared.replay_difference}"
    return "Replay (the same observations): the same decisions, as required."


def _simulation_verdict(compared: AdaptiveComparison) -> str:
    live, simulated = ("; ".join((*run.plans, *run.rollouts)) for run in (compared.live, compared.simulated))
    same = (
        "the same decisions"
        if compared.decides_the_same
        else "different decisions, which different observations may explain"
    )
    return f"Simulation (its own observations): {same}. Live: {live or 'none'}. Simulated: {simulated or 'none'}."


def _cells(live: ModelReport, simulated: ModelReport | None, slowdown: float | None) -> list[str]:
    return [
        escape(live.model),
        str(sum(live.outcomes.values())),
        show_duration(live.p50),
        show_duration(None if simulated is None else simulated.p50),
        show_attainment(live.attainment),
        show_attainment(None if simulated is None else simulated.attainment),
        "-" if slowdown is None else f"× {slowdown:.2f}",
    ]
