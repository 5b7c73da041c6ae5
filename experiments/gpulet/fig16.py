"""Reproduce Figure 16: how many of the scenarios that an exhaustive search schedules gpulet+int schedules, of 19,682.

Section 5.2: 520 fewer, 2.6 % of all. With interference; at most two partitions per GPU, except for "free".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.gpulet import paper
from experiments.gpulet.systems import Demand, System, Verdicts, schedule_scenarios
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "scenarios that can be scheduled, relative to an exhaustive search (gpulet, Figure 16)"

SYSTEMS = (
    System(name="ideal", origin="published", planner="ideal", every=20),
    System(name="gpulet+int", origin="published", planner="elastic"),
    System(name="ideal", origin="cotenant", planner="ideal", every=20),
    System(name="SBP", origin="cotenant", planner="squishy", every=4),
    System(name="best fit", origin="cotenant", planner="bestfit", every=4),
    System(name="gpulet+int", origin="cotenant", planner="elastic", every=4),
    System(name="elastic-plus", origin="cotenant", planner="elastic-plus", every=4),
    System(name="geometry", origin="cotenant", planner="geometry", every=20),
    System(name="geometry, free", origin="cotenant", planner="geometry", free=True, every=20),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a count. unit: requests/s at level 1; percent: of the scenarios tried; ms: CPU time per scenario.

    of_ideal: percentage of what the ideal of the same origin schedules; paper_of_ideal: that in the paper.
    """

    profiles: str
    unit: int
    system: str
    origin: str
    tried: int
    scheduled: int
    percent: float
    of_ideal: float | None
    paper_of_ideal: float | None
    ms: float


def run(options: Options) -> list[Row]:
    systems = [system for system in SYSTEMS if system.available]
    verdicts = schedule_scenarios(systems, options)
    ideals = {(load, system.origin): found for (load, system), found in verdicts.items() if system.name == "ideal"}
    return [_row(load, system, found, ideals.get((load, system.origin))) for (load, system), found in verdicts.items()]


def _row(load: Demand, system: System, found: Verdicts, ideal: Verdicts | None) -> Row:
    tried = len(found.served)
    return Row(
        profiles=load.model_set,
        unit=load.unit,
        system=system.name,
        origin=system.origin,
        tried=tried,
        scheduled=found.count,
        percent=100 * found.count / tried,
        of_ideal=None if ideal is None else _of(found, ideal),
        paper_of_ideal=100 * (1 - paper.FIG16_MISSED / paper.SCENARIOS) if system.name == "gpulet+int" else None,
        ms=found.seconds / tried * 1e3,
    )


def _of(found: Verdicts, ideal: Verdicts) -> float | None:
    """Return how much of what ideal schedules the other does, in percent, among scenarios that both tried.

    It exceeds 100 if the other schedules scenarios that ideal does not.
    """
    both = found.served.keys() & ideal.served.keys()
    of = sum(ideal.served[number] for number in both)
    return 100 * sum(found.served[number] for number in both) / of if of else None


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(row.profiles, f"{row.unit} requests/s", row.system, row.origin, row.of_ideal)
        for row in rows
        if row.of_ideal is not None
    ]
    named = [("gpulet+int, paper", 100 * (1 - paper.FIG16_MISSED / paper.SCENARIOS))]
    grouped(path, bars, lines=named, ylabel="scenarios scheduled, % of ideal's", title="gpulet, Figure 16")
