"""Grids of changes: each combination is planned once and simulated with several seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from cotenant.core.plan import Plan
from cotenant.errors import PlanError
from cotenant.measure.report import ModelReport
from cotenant.sim.plan_validation import validated
from cotenant.sim.what_if import Scenario, ScenarioChange, ScenarioTask, apply_changes, run_scenario


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A combination to be tried. changes: one of each axis."""

    changes: tuple[ScenarioChange, ...]
    question: Scenario
    seconds: float
    seeds: tuple[int, ...]

    @property
    def label(self) -> str:
        return " ".join(change.text for change in self.changes)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one run. changes: as they are written, in the order of the axes. devices: such as ``2 t4 + 1 v100``.
    unserved: requests/s of this model that found no place. error: why there is no plan; the rest is then empty."""

    changes: tuple[str, ...]
    seed: int
    planner: str
    devices: str = ""
    cost_per_hour: float | None = None
    utilisation: float = 0.0
    unserved: float = 0.0
    report: ModelReport | None = None
    error: str = ""


def grid(
    question: Scenario, axes: Sequence[Sequence[ScenarioChange]], plan: Plan, seconds: float, seeds: int
) -> list[Point]:
    """All combinations, the last axis changing fastest. plan: what is planned without any change.

    Raises ConfigError for a change of what is not there.
    """
    return [
        Point(changes=made, question=apply_changes(question, made, plan), seconds=seconds, seeds=tuple(range(seeds)))
        for made in itertools.product(*axes)
    ]


def run_point(point: Point) -> list[Row]:
    """What becomes of a combination, a row for each seed and model."""
    question = point.question
    texts = tuple(change.text for change in point.changes)
    try:
        plan = validated(question.planner, question.problem)
    except PlanError as error:
        return [Row(changes=texts, seed=0, planner=question.planner, error=str(error))]
    rows = []
    for seed in point.seeds:
        outcome = run_scenario(ScenarioTask(label="", question=question, plan=plan, seconds=point.seconds, seed=seed))
        devices = " + ".join(f"{count} {kind}" for kind, count in outcome.kinds.items())
        rows += [
            Row(
                changes=texts,
                seed=seed,
                planner=plan.planner,
                devices=devices,
                cost_per_hour=plan.cost_per_hour,
                utilisation=outcome.utilisation,
                unserved=plan.unserved.get(report.model, 0.0),
                report=report,
            )
            for report in outcome.report.models
        ]
    return rows
