"""Figure 13: the largest rate under targets of two applications and five groups of models, by who schedules.

Section 5.2. The paper measured it on four GPUs, with Poisson arrivals; here the plans are simulated (`kept`). Planners
are asked for game's seven models and traffic's three, each with its part of the application's target, as in Figure 17,
and then applications are run: only the paper's own models can play them. Means count applications and groups alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.gpulet import fig17, paper
from experiments.gpulet.max_rates import MEAN, Group, means
from experiments.gpulet.model_sets import cast
from experiments.gpulet.schedulability import LOOK, Kept, Trial, most_kept
from experiments.gpulet.systems import Way
from experiments.parallel import Options, spread
from experiments.plotting import Bar, grouped

TITLE = "largest rate with 99 % in time, simulated (gpulet, Figure 13)"

WAYS = (
    Way(name="SBP", who="published", planner="squishy", interference=False),
    Way(name="gpulet", who="published", planner="elastic", interference=False),
    Way(name="gpulet+int", who="published", planner="elastic"),
    Way(name="SBP", who="cotenant", planner="squishy", interference=False),
    Way(name="best fit", who="cotenant", planner="bestfit", interference=False),
    Way(name="gpulet", who="cotenant", planner="elastic", interference=False),
    Way(name="gpulet+int", who="cotenant", planner="elastic"),
    Way(name="geometry", who="cotenant", planner="geometry"),
)
FREE = Way(name="geometry, free", who="cotenant", planner="geometry", free=True)
# Rates of synthetic-0.2 are ten times as large as these, and so is the time to simulate them.
QUICK = ("synthetic-0.8", "a100", "v100")
LONGER = 3  # times as many requests where all is asked for


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are in requests/s of the group in all. planned: that for which the way says it has a plan; kept: what that
    plan keeps; rate: what the best of its plans keeps, made for `part` of the targets. of_sbp: over SBP's of the same
    origin. paper: requests/s; paper_of_sbp: over SBP's, which is a mean."""

    profiles: str
    group: str
    way: str
    who: str
    planned: float | None = None
    kept: float | None = None
    rate: float | None = None
    part: float | None = None
    of_sbp: float | None = None
    paper: float | None = None
    paper_of_sbp: float | None = None


def run(options: Options) -> list[Row]:
    ways = [way for way in (*WAYS, FREE)[: len(WAYS) + options.full] if way.there]
    trials = [
        Trial(group=group, look=LOOK * (LONGER if options.full else 1), seed=options.seed)
        for name in options.profiles or QUICK
        for way in ways
        for group in fig17.groups(name, way)[:: options.every]
    ]
    for name in {trial.group.cast for trial in trials}:
        cast(name)  # what is absent is an error here, before processes start
    found = spread(most_kept, trials, options, "largest rates")
    bases = {
        (trial.group.cast, trial.group.name, trial.group.way.who): kept.most
        for trial, kept in zip(trials, found, strict=True)
        if trial.group.way.name == "SBP"
    }
    rows = [_row(trial.group, kept, bases) for trial, kept in zip(trials, found, strict=True)]
    return rows + _means(rows)


def _row(group: Group, kept: Kept, bases: dict[tuple[str, str, str], float]) -> Row:
    base = bases.get((group.cast, group.name, group.way.who))
    return Row(
        profiles=group.cast,
        group=group.name,
        way=group.way.name,
        who=group.way.who,
        planned=kept.planned,
        kept=kept.kept,
        rate=kept.most,
        part=kept.part,
        of_sbp=kept.most / base if base else None,
        paper=paper.FIG13_GAME.get(group.way.name) if group.name == "game" else None,
    )


def _means(rows: Sequence[Row]) -> list[Row]:
    """Of what each way keeps over SBP's, for each set of profiles."""
    found = means((row.profiles, row.way, row.who, row.of_sbp) for row in rows)
    return [
        Row(profiles=profiles, group=MEAN, way=way, who=who, of_sbp=mean, paper_of_sbp=paper.FIG13_OF_SBP.get(way))
        for (profiles, way, who), mean in found.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.profiles, row.group, row.way, row.who, row.of_sbp) for row in rows if row.of_sbp is not None]
    lines = [("gpulet+int, paper's mean", paper.FIG13_OF_SBP["gpulet+int"])]
    grouped(
        path,
        bars,
        lines=lines,
        ylabel="largest rate over SBP's of the same origin",
        title="gpulet, Figure 13",
        columns=1,
    )
