"""Reproduce Figure 13: the largest rates within SLOs of two applications and five groups of models, by system.

Section 5.2. The paper measured on four GPUs with Poisson arrivals; here plans are simulated. Planners get game's seven
models and traffic's three, each with its part of the application's SLO as in Figure 17, and then the applications are
run; only the paper's own models have them. Means weigh applications and groups equally. Plans are chosen on one seed
and scored on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from experiments.gpulet import fig17, paper
from experiments.gpulet.max_rates import MEAN, Group, means
from experiments.gpulet.model_sets import model_set
from experiments.gpulet.schedulability import REQUESTS, SustainedRates, Trial, sustained_rates
from experiments.gpulet.systems import System
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "largest rate with 99 % SLO attainment, simulated (gpulet, Figure 13)"

SYSTEMS = (
    System(name="SBP", origin="published", planner="squishy", interference=False),
    System(name="gpulet", origin="published", planner="elastic", interference=False),
    System(name="gpulet+int", origin="published", planner="elastic"),
    System(name="SBP", origin="cotenant", planner="squishy", interference=False),
    System(name="best fit", origin="cotenant", planner="bestfit", interference=False),
    System(name="gpulet", origin="cotenant", planner="elastic", interference=False),
    System(name="gpulet+int", origin="cotenant", planner="elastic"),
    System(name="elastic-plus", origin="cotenant", planner="elastic-plus"),
    System(name="geometry alone", origin="cotenant", planner="geometry", alone=True),
    System(name="geometry", origin="cotenant", planner="geometry"),
)
FREE = System(name="geometry, free", origin="cotenant", planner="geometry", free=True)
# Without synthetic-0.2: its rates, and so the time to simulate them, are ten times as large.
DEFAULT_SETS = ("synthetic-0.8", "a100", "v100")
FULL_FACTOR = 3  # on the number of simulated requests, with --full


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold rates in requests/s over the whole group.

    planned: the rate for which the system has a plan; sustained: what that plan sustains; chosen: what its best plan
    sustains, made for `target_scale` times the targets, on the seed that it was chosen by; rate: on other seeds.
    of_sbp: over SBP's of the same origin. paper: requests/s; paper_of_sbp: over SBP's, a mean.
    """

    profiles: str
    group: str
    system: str
    origin: str
    planned: float | None = None
    sustained: float | None = None
    chosen: float | None = None
    rate: float | None = None
    target_scale: float | None = None
    of_sbp: float | None = None
    paper: float | None = None
    paper_of_sbp: float | None = None


def run(options: Options) -> list[Row]:
    systems = [system for system in (*SYSTEMS, FREE)[: len(SYSTEMS) + options.full] if system.available]
    trials = [
        Trial(group=group, requests=REQUESTS * (FULL_FACTOR if options.full else 1), seed=options.seed)
        for name in options.profiles or DEFAULT_SETS
        for system in systems
        for group in fig17.groups(name, system)[:: options.every]
    ]
    for name in {trial.group.model_set for trial in trials}:
        model_set(name)  # missing data is an error here, before processes start
    found = run_tasks(sustained_rates, trials, options, "largest rates")
    bases = {
        (trial.group.model_set, trial.group.name, trial.group.system.origin): rates.scored
        for trial, rates in zip(trials, found, strict=True)
        if trial.group.system.name == "SBP"
    }
    rows = [_row(trial.group, rates, bases) for trial, rates in zip(trials, found, strict=True)]
    return rows + _means(rows)


def _row(group: Group, rates: SustainedRates, bases: dict[tuple[str, str, str], float]) -> Row:
    base = bases.get((group.model_set, group.name, group.system.origin))
    return Row(
        profiles=group.model_set,
        group=group.name,
        system=group.system.name,
        origin=group.system.origin,
        planned=rates.planned,
        sustained=rates.sustained,
        chosen=rates.best,
        rate=rates.scored,
        target_scale=rates.target_scale,
        of_sbp=rates.scored / base if base else None,
        paper=paper.FIG13_GAME.get(group.system.name) if group.name == "game" else None,
    )


def _means(rows: Sequence[Row]) -> list[Row]:
    """Return the mean ratio of each system to SBP, for each set of profiles."""
    found = means((row.profiles, row.system, row.origin, row.of_sbp) for row in rows)
    return [
        Row(
            profiles=profiles,
            group=MEAN,
            system=system,
            origin=origin,
            of_sbp=mean,
            paper_of_sbp=paper.FIG13_OF_SBP.get(system),
        )
        for (profiles, system, origin), mean in found.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.profiles, row.group, row.system, row.origin, row.of_sbp) for row in rows if row.of_sbp is not None]
    lines = [("gpulet+int, paper's mean", paper.FIG13_OF_SBP["gpulet+int"])]
    grouped(
        path,
        bars,
        lines=lines,
        ylabel="largest rate over SBP's of the same origin",
        title="gpulet, Figure 13",
        columns=1,
    )
