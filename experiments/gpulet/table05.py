"""Reproduce Table 5: which features each system has.

The paper's rows are its authors' statements about other systems. Rows of our planners are probed: each gets small
problems that only a planner with the feature solves, on a model whose batch of n takes 1 ms + 1 ms · n / share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.planners import BASELINES, PLANNERS, Planner, Problem
from cotenant.planners.check import check
from cotenant.planners.portfolio import choose_planner
from cotenant.predictors import ConstantMargin, Interference, NoInterference
from cotenant.render.figure import figure_for, save_figure
from experiments.gpulet import paper
from experiments.parallel import Options

TITLE = "what each system does (gpulet, Table 5)"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold Table 5's columns in their order."""

    system: str
    source: str
    batch_tuning: bool
    multi_model: bool
    gpu_scaling: bool
    temporal: bool
    spatial: bool
    interference: bool


def run(options: Options) -> list[Row]:
    """List the paper's systems and probe our planners. Needs no data."""
    rows = [_row(system, "paper", reported) for system, reported in paper.TABLE05.items()]
    planners = [name for name in PLANNERS if name not in BASELINES]
    options.progress("planners", 0, len(planners))
    for done, name in enumerate(planners, 1):
        rows.append(_row(name, "probed", [probe(choose_planner(name).plan) for probe in PROBES]))
        options.progress("planners", done, len(planners))
    return rows


def _row(system: str, source: str, found: Sequence[bool]) -> Row:
    columns = Row.__struct_fields__[2:]
    return Row(system=system, source=source, **dict(zip(columns, found, strict=True)))


def _batches(planner: Planner) -> bool:
    """Require batches of several rows for 900 requests/s; allow only one or two for 10 requests/s within 5 ms."""
    many, few = planner(_problem({"a": (0.1, 900.0)})), planner(_problem({"a": (0.005, 10.0)}))
    return _serves(many) and _serves(few) and _largest_batch(many) > 2 >= _largest_batch(few)


def _models(planner: Planner) -> bool:
    """Require several models on three devices."""
    return _serves(planner(_problem(dict.fromkeys("abc", (0.1, 10.0)), count=3)))


def _scaling(planner: Planner) -> bool:
    """Require more than one device for ten times the rate, out of any number."""
    little, much = (planner(_problem({"a": (0.1, rate)}, count=None)) for rate in (500.0, 5000.0))
    return _serves(little) and _serves(much) and much.devices_used > little.devices_used


def _temporal(planner: Planner) -> bool:
    """Require three models on two devices that cannot be partitioned. One device more than they need: Algorithm 1
    merges a model's new gpulet with one that is there, and so has to find a new one first."""
    return _serves(planner(_problem(dict.fromkeys("abc", (0.1, 10.0)), count=2)))


def _spatial(planner: Planner) -> bool:
    """Require a latency-critical model and one with long batches on one device."""
    return _serves(planner(_problem({"quick": (0.0065, 100.0), "slow": (0.5, 450.0)}, cuts=(500, WHOLE))))


def _interference(planner: Planner) -> bool:
    """Require separate devices for two models that slow each other.

    They cannot time-share a device, and meet their SLOs on halves only without interference.
    """
    models = dict.fromkeys("ab", (0.0062, 300.0))
    isolated, colocated = (
        planner(_problem(models, count=2, cuts=(500, WHOLE), interference=interference))
        for interference in (NoInterference(), ConstantMargin(2.0))
    )
    slowed = _problem(models, count=2, cuts=(500, WHOLE), interference=ConstantMargin(2.0))
    return (isolated.devices_used, colocated.devices_used) == (1, 2) and not check(colocated, slowed)


# In the order of the columns.
PROBES: tuple[Callable[[Planner], bool], ...] = (_batches, _models, _scaling, _temporal, _spatial, _interference)


def _problem(
    demands: dict[str, tuple[float, float]],
    *,
    count: int | None = 1,
    cuts: tuple[int, ...] = (WHOLE,),
    interference: Interference | None = None,
) -> Problem:
    """Build a problem. demands: by model, its SLO in seconds and rate in requests/s."""
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name, (slo, _) in demands.items()),
        rates={name: rate for name, (_, rate) in demands.items()},
        fleet=(Kind(name="gpu", count=count, cuts=cuts),),
        profiles={
            (name, "gpu"): Profile(
                name,
                "gpu",
                [
                    Point(share=share, batch=batch, latency=1e-3 + 1e-3 * batch * WHOLE / share, memory=0)
                    for share in (100, 500, WHOLE)
                    for batch in (1, 2, 4, 8, 16, 32)
                ],
            )
            for name in demands
        },
        interference=interference or NoInterference(),
    )


def _serves(plan: Plan) -> bool:
    return not plan.unserved


def _largest_batch(plan: Plan) -> int:
    return max(placement.batch for _, _, placement in plan.placements())


def plot(rows: Sequence[Row], path: Path) -> None:
    columns = Row.__struct_fields__[2:]
    figure = figure_for(path, 8, 0.8 + 0.3 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            done = getattr(row, column)
            axes.scatter(x, y, s=110, color="#009E73" if done else "#888888", marker="o" if done else "x")
    axes.set_xticks(range(len(columns)), [column.replace("_", " ") for column in columns], fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row.system} ({row.source})" for row in rows], fontsize=8)
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    save_figure(figure, path)
