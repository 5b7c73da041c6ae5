"""Figure 16: of 19,682 scenarios, how many gpulet+int schedules of those that an exhaustive search does.

Section 5.2: 520 fewer, 2.6 % of all. With interference; at most two partitions to a GPU, but for "free".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.gpulet import paper
from experiments.gpulet.systems import Demand, Verdicts, Way, scheduled
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "scenarios that can be scheduled, beside an exhaustive search (gpulet, Figure 16)"

WAYS = (
    Way(name="ideal", who="published", planner="ideal", every=20),
    Way(name="gpulet+int", who="published", planner="elastic"),
    Way(name="ideal", who="cotenant", planner="ideal", every=20),
    Way(name="SBP", who="cotenant", planner="squishy", every=4),
    Way(name="best fit", who="cotenant", planner="bestfit", every=4),
    Way(name="gpulet+int", who="cotenant", planner="elastic", every=4),
    Way(name="geometry", who="cotenant", planner="geometry", every=20),
    Way(name="geometry, free", who="cotenant", planner="geometry", free=True, every=20),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """unit: requests/s at level 1. percent: of the scenarios that were tried. of_ideal: percent of those that the
    ideal of the same origin schedules; paper: that in the paper, of all. ms: of processor time for one."""

    profiles: str
    unit: int
    way: str
    who: str
    tried: int
    scheduled: int
    percent: float
    of_ideal: float | None
    paper_of_ideal: float | None
    ms: float


def run(options: Options) -> list[Row]:
    ways = [way for way in WAYS if way.there]
    verdicts = scheduled(ways, options)
    ideals = {(load, way.who): found for (load, way), found in verdicts.items() if way.name == "ideal"}
    return [_row(load, way, found, ideals.get((load, way.who))) for (load, way), found in verdicts.items()]


def _row(load: Demand, way: Way, found: Verdicts, ideal: Verdicts | None) -> Row:
    tried = len(found.served)
    return Row(
        profiles=load.cast,
        unit=load.unit,
        way=way.name,
        who=way.who,
        tried=tried,
        scheduled=found.count,
        percent=100 * found.count / tried,
        of_ideal=None if ideal is None else _of(found, ideal),
        paper_of_ideal=100 * (1 - paper.FIG16_MISSED / paper.SCENARIOS) if way.name == "gpulet+int" else None,
        ms=found.seconds / tried * 1e3,
    )


def _of(found: Verdicts, ideal: Verdicts) -> float | None:
    """Of what ideal schedules among the scenarios that both tried, how much the other does, in percent.

    More than 100 where it schedules what ideal does not.
    """
    both = found.served.keys() & ideal.served.keys()
    of = sum(ideal.served[number] for number in both)
    return 100 * sum(found.served[number] for number in both) / of if of else None


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(row.profiles, f"{row.unit} requests/s", row.way, row.who, row.of_ideal)
        for row in rows
        if row.of_ideal is not None
    ]
    named = [("gpulet+int, paper", 100 * (1 - paper.FIG16_MISSED / paper.SCENARIOS))]
    grouped(path, bars, lines=named, ylabel="scenarios scheduled, % of ideal's", title="gpulet, Figure 16")
