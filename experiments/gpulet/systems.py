"""Compare systems: each of gpulet's planners as in the paper, in its published program, and in Cotenant.

A system answers whether it serves all of some rates, and by which plan. This gives the counts of Figures 5 and 16, the
largest rates of Figures 6 and 17 by bisection, and the plans simulated for Figures 13 to 15.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.units import WHOLE
from cotenant.planners import PLANNERS, Problem, geometry, load_planner, portfolio
from cotenant.planners.capacity import slowdown
from cotenant.predictors import Load
from experiments.gpulet import paper, published
from experiments.gpulet.model_sets import MODEL_SETS, ModelSet, model_set
from experiments.gpulet.tables import tables
from experiments.parallel import Options, run_tasks

Feasible = Callable[[Mapping[str, float]], bool]
PlanFunction = Callable[[Mapping[str, float]], Plan | None]


# Seconds for geometry to plan one scenario. 1.4 s served no more of 600 heavy scenarios (4002776).
TIME_LIMIT = 2.5


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a system.

    name: as in tables; origin: "cotenant" or "published"; planner: of Cotenant, or a key of MODES.

    halves: on devices split into fixed halves; free: with any number of partitions per device; alone: without the other
    planners of its portfolio; every: only every N-th scenario, for slow systems.
    """

    name: str
    origin: str
    planner: str
    interference: bool = True
    halves: bool = False
    free: bool = False
    alone: bool = False
    every: int = 1

    @property
    def searches(self) -> bool:
        """Return whether the planner itself finds the largest rate, and is asked with its portfolio."""
        return self.origin == "cotenant" and self.planner == portfolio.LEADER

    @property
    def available(self) -> bool:
        """Return whether this checkout has the planner."""
        return self.origin == "published" or self.planner in PLANNERS


MODES = {
    "squishy": published.SBP,
    "halves": published.HALVES,
    "elastic": published.ELASTIC,
    "ideal": published.IDEAL,
}


def feasible(system: System, model_set: ModelSet, devices: int = paper.DEVICES) -> Feasible:
    """Return a function that tells whether the system serves given rates, in requests/s by role."""
    if system.origin == "published":
        decide = _published(system, model_set, devices)
        return lambda rates: decide(rates).schedulable
    plans = plan_function(system, model_set, devices)
    return lambda rates: plans(rates) is not None


def plan_function(system: System, model_set: ModelSet, devices: int = paper.DEVICES) -> PlanFunction:
    """Return a function from rates, in requests/s by role, to a plan that serves them all, or None."""
    problem = planner_problem(system, model_set, devices)
    if system.origin == "published":
        decide = _published(system, model_set, devices)
        return lambda rates: as_plan(decide(rates), problem)
    if system.searches:
        # Whether any plan serves them, rather than which needs the fewest devices.
        patient = msgspec.structs.replace(problem, time_limit=TIME_LIMIT)
        serve = geometry.feasible if system.alone else portfolio.feasible
        return lambda rates: serve(msgspec.structs.replace(patient, rates=dict(rates)))
    plan = load_planner(system.planner)

    def complete(rates: Mapping[str, float]) -> Plan | None:
        found = plan(msgspec.structs.replace(problem, rates=dict(rates)))
        return None if found.unserved else found

    return complete


def planner_problem(system: System, model_set: ModelSet, devices: int = paper.DEVICES) -> Problem:
    """Return the problem that the system plans for, without rates, with the interference that it predicts."""
    problem = (
        model_set.halves(devices) if system.halves else model_set.problem(devices, interference=system.interference)
    )
    if system.free:
        kinds = tuple(msgspec.structs.replace(kind, max_partitions=None) for kind in problem.fleet)
        problem = msgspec.structs.replace(problem, fleet=kinds)
    return problem


def _published(
    system: System, model_set: ModelSet, devices: int
) -> Callable[[Mapping[str, float]], published.Schedule]:
    """Return the published program's schedule function."""
    known = tables(model_set)
    mode = msgspec.structs.replace(MODES[system.planner], gpus=devices, interference=system.interference)
    return lambda rates: published.schedule(known, {role: round(rate) for role, rate in rates.items()}, mode)


def as_plan(schedule: published.Schedule, problem: Problem) -> Plan | None:
    """Convert a schedule of the published program to a plan with latencies of the problem; None if not schedulable.

    Gpulets with batches of 0 rows are omitted.
    """
    if not schedule.schedulable:
        return None
    (kind,) = problem.fleet
    gpulets: dict[int, dict[tuple[int, int], list[published.Gpulet]]] = {}
    for gpulet in (each for each in schedule.gpulets if each.batch):
        gpulets.setdefault(gpulet.gpu, {}).setdefault((gpulet.size, gpulet.dedup), []).append(gpulet)
    devices = []
    for gpu, cuts in sorted(gpulets.items()):
        loads = [
            [Load(each.model, kind.name, each.batch, size * WHOLE // 100) for each in tasks]
            for (size, _), tasks in cuts.items()
        ]
        partitions = []
        for i, (own, tasks) in enumerate(zip(loads, cuts.values(), strict=True)):
            colocated = loads[:i] + loads[i + 1 :]
            took = [
                slowdown(problem, load, colocated)
                * problem.profiles[load.model, kind.name].latency(load.batch, load.share)
                for load in own
            ]
            placements = tuple(
                Placement(model=task.model, batch=task.batch, rate=task.throughput, duty=sum(took), latency=latency)
                for task, latency in zip(tasks, took, strict=True)
            )
            partitions.append(Partition(share=own[0].share, placements=placements))
        devices.append(Device(id=DeviceId(kind.name, gpu), partitions=tuple(partitions)))
    return Plan(planner="published", devices=tuple(devices))


class Verdicts(msgspec.Struct):
    """Hold which scenarios, by number, a system served, and the total CPU time in seconds."""

    served: dict[int, bool]
    seconds: float

    @property
    def count(self) -> int:
        return sum(self.served.values())


class _ScenarioTask(msgspec.Struct, frozen=True):
    system: System
    model_set: str
    unit: int
    numbers: Sequence[int]


class Demand(msgspec.Struct, frozen=True):
    """Name a model set and its rate at level 1, in requests/s."""

    model_set: str
    unit: int


def schedule_scenarios(systems: Sequence[System], options: Options) -> dict[tuple[Demand, System], Verdicts]:
    """Determine which of the 19,682 scenarios each system serves, for each model set and unit.

    Takes one in `every` scenarios, chosen by the seed. Slow systems get a subset of the same, unless `full`.
    """
    order = np.random.default_rng(options.seed).permutation(paper.SCENARIOS).tolist()
    tasks = []
    for name in options.profiles or MODEL_SETS:
        for unit in model_set(name).units:
            for system in systems:
                numbers = order[: math.ceil(len(order) / options.every / (1 if options.full else system.every))]
                parts = min(16, len(numbers))
                tasks += [_ScenarioTask(system, name, unit, numbers[part::parts]) for part in range(parts)]
    answers = run_tasks(_schedule_task, tasks, options, "scenarios")
    verdicts: dict[tuple[Demand, System], Verdicts] = {}
    for task, (served, seconds) in zip(tasks, answers, strict=True):
        whole = verdicts.setdefault((Demand(task.model_set, task.unit), task.system), Verdicts({}, 0.0))
        whole.served |= dict(zip(task.numbers, served, strict=True))
        whole.seconds += seconds
    return verdicts


def _schedule_task(task: _ScenarioTask) -> tuple[list[bool], float]:
    served, every = _serves(task.system, task.model_set), _scenarios()
    demands = [{role: level * task.unit for role, level in every[number].items() if level} for number in task.numbers]
    began = time.process_time()
    answers = [served(rates) for rates in demands]
    return answers, time.process_time() - began


@functools.cache
def _serves(system: System, name: str) -> Feasible:
    """Return the cached feasibility function: curves and tables are computed on first use in a process."""
    return feasible(system, model_set(name))


_scenarios = functools.cache(paper.scenarios)
