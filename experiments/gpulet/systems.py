"""Ways to schedule: each planner of gpulet's world as the paper has it, as its program was published, and as here.

A way answers one question: are these rates served, all of them, and by which plan? From it come the counts of Figures 5
and 16, by bisection the largest rates of Figures 6 and 17, and the plans that are simulated for Figures 13 to 15.
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
from cotenant.planners import PLANNERS, Problem, load_planner, portfolio
from cotenant.planners.capacity import slowdown
from cotenant.predictors import Load
from experiments.gpulet import paper, published
from experiments.gpulet.model_sets import CASTS, Cast, cast
from experiments.gpulet.tables import tables
from experiments.parallel import Options, spread

Serves = Callable[[Mapping[str, float]], bool]
Plans = Callable[[Mapping[str, float]], Plan | None]


# Seconds that geometry may look for one scenario's plan. 1.4 found as many of 600 heavy ones, at 4002776.
PATIENCE = 0.5


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """name: as tables show it. who: "cotenant" or "published". planner: of cotenant, or a key of MODES.

    halves: on devices cut in two for good. free: as many partitions to a device as the cuts allow. every: of the
    scenarios, this one in so many, where all would take too long.
    """

    name: str
    who: str
    planner: str
    interference: bool = True
    halves: bool = False
    free: bool = False
    every: int = 1

    @property
    def there(self) -> bool:
        return self.who == "published" or self.planner in PLANNERS


MODES = {
    "squishy": published.SBP,
    "halves": published.HALVES,
    "elastic": published.ELASTIC,
    "ideal": published.IDEAL,
}


def serves(way: Way, cast: Cast, devices: int = paper.DEVICES) -> Serves:
    """Whether the way serves rates, given in requests/s by role."""
    if way.who == "published":
        decide = _published(way, cast, devices)
        return lambda rates: decide(rates).schedulable
    plans = planned(way, cast, devices)
    return lambda rates: plans(rates) is not None


def planned(way: Way, cast: Cast, devices: int = paper.DEVICES) -> Plans:
    """The plan with which the way serves rates, given in requests/s by role; None where it does not serve them all."""
    problem = asked(way, cast, devices)
    if way.who == "published":
        decide = _published(way, cast, devices)
        return lambda rates: as_plan(decide(rates), problem)
    if way.planner == "geometry":
        # Whether any plan serves them, rather than which needs fewest devices.
        patient = msgspec.structs.replace(problem, time_limit=PATIENCE)
        return lambda rates: portfolio.feasible(msgspec.structs.replace(patient, rates=dict(rates)))
    plan = load_planner(way.planner)

    def complete(rates: Mapping[str, float]) -> Plan | None:
        found = plan(msgspec.structs.replace(problem, rates=dict(rates)))
        return None if found.unserved else found

    return complete


def asked(way: Way, cast: Cast, devices: int = paper.DEVICES) -> Problem:
    """What the way is asked, without rates, and what it believes of neighbours."""
    problem = cast.halves(devices) if way.halves else cast.problem(devices, interference=way.interference)
    if way.free:
        kinds = tuple(msgspec.structs.replace(kind, max_partitions=None) for kind in problem.fleet)
        problem = msgspec.structs.replace(problem, fleet=kinds)
    return problem


def _published(way: Way, cast: Cast, devices: int) -> Callable[[Mapping[str, float]], published.Schedule]:
    known = tables(cast)
    mode = msgspec.structs.replace(MODES[way.planner], gpus=devices, interference=way.interference)
    return lambda rates: published.schedule(known, {role: round(rate) for role, rate in rates.items()}, mode)


def as_plan(schedule: published.Schedule, problem: Problem) -> Plan | None:
    """A schedule of the published program as a plan: its cuts and batches, with latencies as the problem has them; None
    where it is none. What it gives batches of no row it gives nothing."""
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
            beside = loads[:i] + loads[i + 1 :]
            took = [
                slowdown(problem, load, beside)
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
    """Of some scenarios, by number, whether a way served them, and the seconds of processor time that took in all."""

    served: dict[int, bool]
    seconds: float

    @property
    def count(self) -> int:
        return sum(self.served.values())


class _Ask(msgspec.Struct, frozen=True):
    way: Way
    cast: str
    unit: int
    numbers: Sequence[int]


class Demand(msgspec.Struct, frozen=True):
    """A cast, and what it is asked for at level 1, in requests/s."""

    cast: str
    unit: int


def scheduled(ways: Sequence[Way], options: Options) -> dict[tuple[Demand, Way], Verdicts]:
    """Which of the 19,682 scenarios each way serves with each cast at each unit; one in `every`, by the seed.

    Ways that take long get fewer of the same, but for the option `full`.
    """
    order = np.random.default_rng(options.seed).permutation(paper.SCENARIOS).tolist()
    asks = []
    for name in options.profiles or CASTS:
        for unit in cast(name).units:
            for way in ways:
                numbers = order[: math.ceil(len(order) / options.every / (1 if options.full else way.every))]
                parts = min(16, len(numbers))
                asks += [_Ask(way, name, unit, numbers[part::parts]) for part in range(parts)]
    answers = spread(_answer, asks, options, "scenarios")
    verdicts: dict[tuple[Demand, Way], Verdicts] = {}
    for ask, (served, seconds) in zip(asks, answers, strict=True):
        whole = verdicts.setdefault((Demand(ask.cast, ask.unit), ask.way), Verdicts({}, 0.0))
        whole.served |= dict(zip(ask.numbers, served, strict=True))
        whole.seconds += seconds
    return verdicts


def _answer(ask: _Ask) -> tuple[list[bool], float]:
    served, every = _serves(ask.way, ask.cast), _scenarios()
    asked = [{role: level * ask.unit for role, level in every[number].items() if level} for number in ask.numbers]
    began = time.process_time()
    answers = [served(rates) for rates in asked]
    return answers, time.process_time() - began


@functools.cache
def _serves(way: Way, name: str) -> Serves:
    """Once for a process: curves and tables are made on first use."""
    return serves(way, cast(name))


_scenarios = functools.cache(paper.scenarios)
