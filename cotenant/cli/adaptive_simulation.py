"""`cotenant simulate --adapt`: the server's controller in virtual time, and what it decided."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape

from cotenant.cli.loading import write_file
from cotenant.control.adaptation import Adopted, ControllerCommand, ControllerEvent, Roll, RollEnded, Solve
from cotenant.control.controller_built import ControllerBuilt, known_devices
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.controller_status import Decision, decisions_since
from cotenant.control.event_log import controller_line, header_line
from cotenant.control.provider import DeviceProvider, FixedProvider
from cotenant.core.plan import Plan
from cotenant.core.units import show_count
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planning.replan import Replanner
from cotenant.render.background_jobs import reported_jobs
from cotenant.render.report import report_table
from cotenant.render.table import table
from cotenant.sim.adaptation import Adaptation
from cotenant.sim.cloud import CloudKind, SimulatedCloud
from cotenant.sim.run import simulate


class AdaptiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run with a controller. solves: plans that it asked for; rollouts: by outcome. decisions: all of them,
    with the time of the run in seconds. devices: used by the plan at the end, by kind."""

    report: Report
    solves: int
    rollouts: dict[str, int]
    devices: dict[str, int]
    decisions: tuple[Decision, ...]

    def to_json(self) -> bytes:
        """Encode as the report, with the rest under `adaptation`."""
        whole = msgspec.json.decode(self.report.to_json())
        rest = {"solves": self.solves, "rollouts": self.rollouts, "devices": self.devices, "decisions": self.decisions}
        return msgspec.json.format(msgspec.json.encode(whole | {"adaptation": rest}), indent=2)


def simulate_adaptive(
    problem: Problem,
    plan: Plan,
    workload: Any,
    failures: Any,
    *,
    seconds: float,
    seed: int,
    lend: bool,
    standbys: int = 0,
    options: ControllerOptions,
    log: Path | None,
) -> AdaptiveRun:
    """Simulate with the controller that a server has; of a kind without a number there are as many devices as it asks
    for, at once. lend: idle share of processors. options: of the controller. log: file for what it heard and said, for
    `cotenant replay`."""
    provider = _provider(problem, plan, seed)
    built = ControllerBuilt.of(problem, plan, options, provider.offers())
    controller = built.controller()
    lines = [header_line(built)]
    decisions: list[Decision] = []
    solves, outcomes, plans = 0, Counter[str](), [plan]

    def told(now: float, event: ControllerEvent, commands: list[ControllerCommand]) -> None:
        nonlocal solves
        lines.append(controller_line(now, event, commands))
        decisions.extend(decisions_since(controller.decisions, decisions[-1] if decisions else None))
        solves += sum(isinstance(command, Solve) for command in commands)
        rolled.extend(command.plan for command in commands if isinstance(command, Roll))
        match event:
            case RollEnded(outcome=outcome):
                outcomes[outcome.value] += 1
                if outcome.value == "completed":
                    plans.append(rolled[-1])
            case Adopted(plan=adopted):
                plans.append(adopted)

    rolled: list[Plan] = []
    solver = Replanner(problem, plan.planner)
    adaptation = Adaptation(controller=controller, solver=solver, provider=provider, log=told)
    report = simulate(
        plan,
        problem,
        workload,
        seconds=seconds,
        seed=seed,
        failures=failures,
        adaptation=adaptation,
        lend=lend,
        standbys=standbys,
    )
    if log is not None:
        write_file(log, b"".join(lines).decode())
    return AdaptiveRun(
        report=report,
        solves=solves,
        rollouts=dict(outcomes),
        devices=dict(Counter(device.kind for device in plans[-1].devices)),
        decisions=tuple(decisions),
    )


def _provider(problem: Problem, plan: Plan, seed: int) -> DeviceProvider:
    """Return where devices come from: as many as wanted where a kind has no number, else those that there are."""
    there = known_devices(problem, plan)
    if all(kind.count is not None for kind in problem.fleet):
        return FixedProvider(there, used=there)
    kinds = [CloudKind(kind=kind.name, price=kind.price or 0.0, quota=kind.count) for kind in problem.fleet]
    return SimulatedCloud(kinds, seed=seed, used=there)


def adaptive_view(run: AdaptiveRun) -> RenderableType:
    """Tabulate the report and the decisions."""
    return Group(report_table(run.report), *reported_jobs(run.report), decision_table(run))


def decision_table(run: AdaptiveRun) -> RenderableType:
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run.rollouts.items())) or "none"
    rows = table(f"decisions: {show_count(run.solves, 'plan')}; rollouts: {ended}", ">time", "decision", "reason")
    for decision in run.decisions:
        rows.add_row(f"{decision.time:.1f} s", escape(decision.action), escape(decision.reason))
    return rows
