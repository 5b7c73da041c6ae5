"""Figure 5: of 19,682 scenarios, how many can be scheduled on four whole GPUs, and on the same cut in halves.

Section 3.2. Interference is no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.gpulet import paper
from experiments.gpulet.systems import Way, scheduled
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "scenarios that can be scheduled on whole GPUs, and on halves (gpulet, Figure 5)"

WAYS = (
    Way(name="SBP", who="published", planner="squishy", interference=False),
    Way(name="SBP on halves", who="published", planner="halves", interference=False),
    Way(name="SBP", who="cotenant", planner="squishy", interference=False),
    Way(name="SBP on halves", who="cotenant", planner="squishy", interference=False, halves=True),
    Way(name="gpulet", who="cotenant", planner="elastic", interference=False, every=4),
    Way(name="geometry", who="cotenant", planner="geometry", interference=False, every=20),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """unit: requests/s at level 1. percent: of the scenarios that were tried. ms: of processor time for one."""

    profiles: str
    unit: int
    way: str
    who: str
    tried: int
    scheduled: int
    percent: float
    paper_percent: float | None
    ms: float


def run(options: Options) -> list[Row]:
    ways = [way for way in WAYS if way.there]
    verdicts = scheduled(ways, options)
    rows = []
    for (load, way), found in verdicts.items():
        in_paper = paper.FIG05.get(way.name)
        tried = len(found.served)
        rows.append(
            Row(
                profiles=load.cast,
                unit=load.unit,
                way=way.name,
                who=way.who,
                tried=tried,
                scheduled=found.count,
                percent=100 * found.count / tried,
                paper_percent=None if in_paper is None else 100 * in_paper / paper.SCENARIOS,
                ms=found.seconds / tried * 1e3,
            )
        )
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.profiles, f"{row.unit} requests/s", row.way, row.who, row.percent) for row in rows]
    named = [(f"{name}, paper", value * 100 / paper.SCENARIOS) for name, value in paper.FIG05.items()]
    grouped(path, bars, lines=named, ylabel="scenarios scheduled, %", title="gpulet, Figure 5")
