"""Reproduce Figure 5: how many of 19,682 scenarios fit on four whole GPUs, and on the same GPUs split into halves.

Section 3.2, without interference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.gpulet import paper
from experiments.gpulet.systems import System, schedule_scenarios
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "scenarios that can be scheduled on whole GPUs, and on halves (gpulet, Figure 5)"

SYSTEMS = (
    System(name="SBP", origin="published", planner="squishy", interference=False),
    System(name="SBP on halves", origin="published", planner="halves", interference=False),
    System(name="SBP", origin="cotenant", planner="squishy", interference=False),
    System(name="SBP on halves", origin="cotenant", planner="squishy", interference=False, halves=True),
    System(name="gpulet", origin="cotenant", planner="elastic", interference=False, every=4),
    System(name="elastic-plus", origin="cotenant", planner="elastic-plus", interference=False, every=4),
    System(name="geometry", origin="cotenant", planner="geometry", interference=False, every=20),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a count. unit: requests/s at level 1; percent: of the scenarios tried; ms: CPU time per scenario."""

    profiles: str
    unit: int
    system: str
    origin: str
    tried: int
    scheduled: int
    percent: float
    paper_percent: float | None
    ms: float


def run(options: Options) -> list[Row]:
    systems = [system for system in SYSTEMS if system.available]
    verdicts = schedule_scenarios(systems, options)
    rows = []
    for (load, system), found in verdicts.items():
        in_paper = paper.FIG05.get(system.name)
        tried = len(found.served)
        rows.append(
            Row(
                profiles=load.model_set,
                unit=load.unit,
                system=system.name,
                origin=system.origin,
                tried=tried,
                scheduled=found.count,
                percent=100 * found.count / tried,
                paper_percent=None if in_paper is None else 100 * in_paper / paper.SCENARIOS,
                ms=found.seconds / tried * 1e3,
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.profiles, f"{row.unit} requests/s", row.system, row.origin, row.percent) for row in rows]
    named = [(f"{name}, paper", value * 100 / paper.SCENARIOS) for name, value in paper.FIG05.items()]
    grouped(path, bars, lines=named, ylabel="scenarios scheduled, %", title="gpulet, Figure 5")
