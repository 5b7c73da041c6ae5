"""Reproduce Figure 11: a new plan takes over from the old one while the old one serves.

Section 4.5. The paper draws the idea: workers of the new partitions are prepared beside the old ones, which serve until
then. Here it is what happens to every partition in a simulated run: scen3 on V100s, `elastic-plus`, from the plan
for one rate to the plan for `GROWTH` times that rate, which is requested at `CHANGE` seconds. A worker takes 15 s to
start, as in `fig15`. The same load on either plan alone tells what the change costs: requests late or lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.core.identity import LaneId
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import renumber_devices
from cotenant.measure.report import Report
from cotenant.planners import Problem, load_planner
from cotenant.planners.rates import at_rates
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Command, Drained, Event, Run
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from experiments.gpulet import paper
from experiments.gpulet.fig15 import STARTUP
from experiments.gpulet.ground_truth import true_environment
from experiments.gpulet.model_sets import model_set
from experiments.gpulet.schedulability import largest_plan
from experiments.gpulet.systems import System, planner_problem
from experiments.parallel import Options

TITLE = "a new plan takes over from the old one (gpulet, Figure 11)"

SYSTEM = System(name="elastic-plus", origin="cotenant", planner="elastic-plus")
DEFAULT_SETS = ("v100",)
LOAD = 0.2  # of what the planner serves with all GPUs
GROWTH = 1.5  # of the rates that the new plan is for
HEADROOM = 1.2  # factor on rates, as in the published program
CHANGE, SECONDS = 20.0, 60.0
ALL, OLD_ONLY, NEW_ONLY = "all", "all, the old plan only", "all, the new plan only"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one partition, or all requests of a run. Times are in seconds from the beginning.

    share: ‰ of a GPU. plan: "old", "new", or "both". prepared: since when its worker starts; None where it is there
    from the beginning. serves_from, serves_to: first and last batch. requests: that it ran, or all; late: of all, those
    late or dropped. paper: the longest time for preparing a partition.
    """

    profiles: str
    partition: str
    share: int | None
    models: str
    plan: str
    prepared: float | None
    serves_from: float | None
    serves_to: float | None
    requests: int
    late: int | None
    paper: str | None = None


class Lane(msgspec.Struct):
    """What was seen of a lane: when it was first applied, left out again, and ran batches for how many requests."""

    applied: float
    left: float | None = None
    first: float | None = None
    last: float = 0.0
    requests: int = 0


class LaneLog:
    """Record lanes: a transparent wrapper of a dispatcher's `handle`."""

    def __init__(self) -> None:
        self.lanes: dict[LaneId, Lane] = {}
        self._handle = Dispatcher().handle

    def __call__(self, event: Event, now: float) -> list[Command]:
        commands = self._handle(event, now)
        if type(event) is Applied:
            there = {spec.id for spec in event.lanes}
            for name in there:
                self.lanes.setdefault(name, Lane(now))
            for name, lane in self.lanes.items():
                if name not in there and lane.left is None:
                    lane.left = now
        for command in commands:
            if type(command) is Run:
                seen = self.lanes[command.lane]
                seen.first = now if seen.first is None else seen.first
                seen.requests += len(command.requests)
                seen.last = now
            elif type(command) is Drained and command.lane in self.lanes:
                self.lanes[command.lane].last = now
        return commands


class Change(msgspec.Struct, frozen=True):
    """Two plans for a problem, and the rates that arrive all the time: those of the old plan."""

    environment: Problem
    rates: dict[str, float]
    old: Plan
    new: Plan


def run(options: Options) -> list[Row]:
    return [row for name in options.profiles or DEFAULT_SETS for row in rows_of(name, options.seed)]


def change_of(name: str, seed: int) -> Change:
    """Return the plans for a set of profiles."""
    profiled_set, models = model_set(name), paper.GROUPS["scen3"]
    problem = planner_problem(SYSTEM, profiled_set, paper.FIG15_DEVICES)
    mix = dict.fromkeys(models, 1.0)
    largest, _ = largest_plan(SYSTEM, profiled_set, mix, paper.FIG15_DEVICES, profiled_set.units[0])
    planner = load_planner(SYSTEM.planner)
    rates = dict.fromkeys(models, LOAD * largest)
    old, new = (
        planner(at_rates(problem, {model: HEADROOM * growth * rate for model, rate in rates.items()}))
        for growth in (1.0, GROWTH)
    )
    environment = true_environment(profiled_set, paper.FIG15_DEVICES, seed)
    return Change(environment, rates, old, renumber_devices(new, old))


def rows_of(name: str, seed: int) -> list[Row]:
    """Simulate with and without the change; return a row for each partition, and one for all requests of each run."""
    change = change_of(name, seed)
    log = LaneLog()
    report = simulated(change, change.old, seed, log, changes=[(CHANGE, change.new)])
    old, new = (simulated(change, plan, seed, LaneLog()) for plan in (change.old, change.new))
    known = assigned_lanes(change)
    rows = [
        Row(
            profiles=name,
            partition=lane,
            share=known[lane].partition.share,
            models=" ".join(placement.model for placement in known[lane].placements),
            plan="new" if seen.applied else "both" if seen.left is None else "old",
            prepared=seen.applied - STARTUP if seen.applied else None,
            serves_from=seen.first,
            serves_to=seen.last,
            requests=seen.requests,
            late=None,
            paper="20 s" if seen.applied else None,
        )
        for lane, seen in sorted(log.lanes.items())
    ]
    return [*rows, _total(name, ALL, report), _total(name, OLD_ONLY, old), _total(name, NEW_ONLY, new)]


def simulated(
    change: Change, plan: Plan, seed: int, log: LaneLog, changes: Sequence[tuple[float, Plan]] = ()
) -> Report:
    """Simulate the rates of the old plan, on a plan that may change."""
    return simulate(
        plan,
        change.environment,
        Workload.poisson(change.rates),
        seconds=SECONDS,
        seed=seed,
        changes=changes,
        startup=STARTUP,
        handle=log,
    )


def assigned_lanes(change: Change) -> dict[LaneId, LaneAssignment]:
    """Return the lanes of both plans, by the names that a run gives them."""
    models = {model.name: model for model in change.environment.models}
    matcher = LaneMatcher()
    for plan in (change.old, change.new):
        matcher.lanes = matcher.lanes | matcher.match(plan, lane_specs(plan, models, change.environment.profiles))
    return matcher.lanes


def _total(name: str, what: str, report: Report) -> Row:
    return Row(
        profiles=name,
        partition=what,
        share=None,
        models="",
        plan="",
        prepared=None,
        serves_from=None,
        serves_to=None,
        requests=sum(row.stayed for row in report.models),
        late=sum(row.missed for row in report.models),
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each partition, as long as its worker is prepared and serves."""
    lanes = [row for row in rows if row.share is not None]
    figure = figure_for(path, 8, 1.2 + 0.22 * len(lanes))
    axes = figure.subplots()
    colours = {"old": COLOURS[0], "both": COLOURS[2], "new": COLOURS[1]}
    for height, row in enumerate(reversed(lanes)):
        start, end = row.serves_from or 0.0, row.serves_to or 0.0
        axes.barh(height, end - start, left=start, color=colours[row.plan], height=0.7)
        if row.prepared is not None:
            axes.barh(
                height, start - row.prepared, left=row.prepared, color="white", edgecolor=colours["new"], hatch="///"
            )
    axes.set_yticks(range(len(lanes)), [f"{row.partition}: {row.models}" for row in reversed(lanes)], fontsize=6)
    for label, colour in colours.items():
        axes.barh(0, 0, color=colour, label=f"serves, {label} plan" if label != "both" else "serves, both plans")
    axes.barh(0, 0, color="white", edgecolor=colours["new"], hatch="///", label="its worker starts")
    axes.axvline(CHANGE, color="#444444", linestyle="--", linewidth=1, label="the new plan is requested")
    axes.set_xlabel("seconds", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("gpulet, Figure 11", fontsize=11)
    save_figure(figure, path)
