"""Make planning problems of large, mixed and priced fleets at random, and solve them with one model a partition.

Latency of a batch of b on share p: (fixed + work · b) · (bend + (1 - bend) / p), as on measured profiles; kinds differ
in speed, price, how they are cut and how much memory they have. Rates are log-normal and ask for a given part of what
the relaxation says that the fleet can serve; where that is not so, the problem is infeasible.
"""

from __future__ import annotations

import math

import highspy
import msgspec
import numpy as np

from cotenant.core import mig
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem, geometry
from cotenant.planners.capacity import footprint, latency_curve, max_throughput_batch

GIB = 1 << 30
MIB = 1 << 20
BATCHES = (1, 2, 4, 8, 16, 32)
CUTS = (
    (100, 200, 300, 400, 500, 600, 700, 800, 900, 1000),
    (200, 400, 500, 600, 800, 1000),
    (50, 250, 350, 500, 650, 1000),
)
GEOMETRY = "mig-a100-80gb"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a random problem. devices: of all kinds together; kinds: how many; load: part of the largest rates that
    the fleet serves; geometry: whether kinds may be MIG devices, all of them where "all"; spread: of the log-normal
    rates; memory: GiB of each device; unbounded where None."""

    seed: int
    models: int
    devices: int
    kinds: int = 3
    load: float = 0.6
    geometry: str = "some"
    spread: float = 1.0
    memory: float | None = None
    priced: bool = True


def problem(recipe: Recipe) -> Problem:
    """Return the problem of a recipe, at the rates that its load asks for."""
    rng = np.random.default_rng(recipe.seed)
    fleet, speeds = [], []
    shares = rng.dirichlet(np.full(recipe.kinds, 3.0))
    for k in range(recipe.kinds):
        speed = float(rng.uniform(0.25, 1.5))
        price = round(speed * float(rng.uniform(1.5, 3.5)), 2) if recipe.priced else None
        sliced = recipe.geometry == "all" or (recipe.geometry == "some" and rng.random() < 0.35)
        cuts = mig.instance_shares(GEOMETRY) if sliced else CUTS[rng.integers(len(CUTS))]
        memory = 80 * GIB if sliced else 1 << 50
        if recipe.memory is not None and not sliced:
            memory = round(recipe.memory * GIB)
        fleet.append(
            Kind(
                name=f"k{k}",
                count=max(1, round(recipe.devices * float(shares[k]))),
                price=price,
                cuts=tuple(cuts),
                geometry=GEOMETRY if sliced else None,
                memory=memory,
            )
        )
        speeds.append(speed)
    models, profiles, rates = [], {}, {}
    for i in range(recipe.models):
        name = f"m{i}"
        fixed, work, bend = (
            math.exp(rng.uniform(-7.5, -4.5)),
            math.exp(rng.uniform(-8.5, -5)),
            float(rng.uniform(0, 0.5)),
        )
        memory = round(float(rng.uniform(0.5, 6)) * GIB) // MIB * MIB
        for kind, speed in zip(fleet, speeds, strict=True):
            own = speed * float(rng.uniform(0.8, 1.25))
            points = [
                Point(
                    share=share,
                    batch=batch,
                    latency=(fixed + work * batch) * (bend + (1 - bend) * 1000 / share) / own,
                    memory=memory + batch * 16 * MIB,
                )
                for share in kind.cuts
                for batch in BATCHES
            ]
            profiles[name, kind.name] = Profile(name, kind.name, points)
        models.append(Model(name=name, slo=2 * (fixed + 8 * work) / min(speeds) * float(rng.uniform(1.0, 6.0))))
        rates[name] = float(rng.lognormal(0.0, recipe.spread)) / (fixed + work)
    made = Problem(
        models=tuple(models), rates=rates, fleet=tuple(fleet), profiles=profiles, objective="rate", bounded=False
    )
    multiple = recipe.load * (geometry.bound(made) or 0.0)
    rates = {name: rate * multiple for name, rate in rates.items()}
    return msgspec.structs.replace(made, rates=rates, objective="devices", bounded=True)


def mixed_fleets(count: int, seed: int, devices: tuple[int, int] = (10, 1000)) -> list[Recipe]:
    """Return recipes of mixed priced fleets, with log-uniform numbers of devices and of models."""
    rng = np.random.default_rng(seed)
    recipes = []
    for _ in range(count):
        many = round(math.exp(rng.uniform(math.log(devices[0]), math.log(devices[1]))))
        models = round(math.exp(rng.uniform(math.log(4), math.log(min(200, 4 * many)))))
        recipes.append(
            Recipe(
                seed=int(rng.integers(1 << 30)),
                models=models,
                devices=many,
                kinds=int(rng.integers(2, 4)),
                load=float(rng.uniform(0.3, 0.9)),
                spread=float(rng.uniform(0.5, 1.5)),
            )
        )
    return recipes


class OneModelEach(msgspec.Struct, frozen=True):
    """Hold the answer of the small integer program that puts one model on each partition. cost: None where it found
    none; bound: proven for such plans alone."""

    cost: float | None
    bound: float
    seconds: float


def one_model_each(problem: Problem, seconds: float) -> OneModelEach:
    """Solve the integer program of one model a partition, without regard to memory shared by partitions.

    Written apart from the planner's own programs, so that it tests them.
    """
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", seconds)
    infinity = highspy.kHighsInf
    rows = {name: n for n, name in enumerate(problem.rates)}
    for rate in problem.rates.values():
        highs.addRow(rate, infinity, 0, [], [])

    def column(cost: float, most: float, entries: dict[int, float]) -> None:
        highs.addCol(cost, 0.0, most, len(entries), list(entries), list(entries.values()))
        highs.changeColIntegrality(highs.getNumCol() - 1, highspy.HighsVarType.kInteger)

    for kind in problem.fleet:
        sizes = [(share, kind.memory, share) for share in kind.cuts]
        layouts: list[dict[int, int]] = []
        if kind.geometry is not None:
            table = mig.instances(kind.geometry)
            sizes = [(each.share, each.memory, n) for n, each in enumerate(table)]
            layouts = [
                {n: layout.count(each) for n, each in enumerate(table) if each in layout}
                for layout in mig.maximal_layouts(kind.geometry)
            ]
        first = highs.getNumRow()
        count = infinity if kind.count is None else kind.count
        if kind.geometry is None:
            # Thousandths of all devices: enough where shares fill devices, which the plan that is compared shows.
            highs.addRow(-infinity, 0.0, 0, [], [])
            column(kind.price or 1.0, count, {first: -1000.0})
        else:
            for _ in table:
                highs.addRow(-infinity, 0.0, 0, [], [])
            at_count = highs.getNumRow()
            highs.addRow(-infinity, count, 0, [], [])
            for layout in layouts:
                column(
                    kind.price or 1.0,
                    infinity,
                    {at_count: 1.0} | {first + n: -float(many) for n, many in layout.items()},
                )
        for share, memory, n in sizes:
            for model in problem.models:
                curve = latency_curve(problem, model.name, kind.name, share)
                fitting = tuple(
                    latency
                    for batch, latency in enumerate(curve, 1)
                    if footprint(problem, kind.name, model.name, batch) <= memory
                )
                _, rate = max_throughput_batch(fitting, model.slo)
                if rate:
                    own = {first: float(share)} if kind.geometry is None else {first + n: 1.0}
                    column(0.0, infinity, own | {rows[model.name]: rate})
    highs.run()
    info = highs.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return OneModelEach(info.objective_function_value if feasible else None, info.mip_dual_bound, highs.getRunTime())
