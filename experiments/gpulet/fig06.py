"""Reproduce Figure 6: largest rates of two models on two GPUs with temporal, spatial and exhaustive scheduling.

Section 3.3. The paper measured on GPUs; here planners use their common deterministic test. Both models have the same
rate. The published program's best fit is not re-created.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.gpulet import paper
from experiments.gpulet.max_rates import Group, Row, compare_rates, mean_bars
from experiments.gpulet.model_sets import MODEL_SETS
from experiments.gpulet.systems import System
from experiments.parallel import Options
from experiments.plotting import grouped

TITLE = "largest rate of two models on two GPUs, over best fit's (gpulet, Figure 6)"

SPATIAL = System(name="best fit", origin="cotenant", planner="bestfit")
SYSTEMS = (
    System(name="SBP", origin="published", planner="squishy", interference=False),
    System(name="ideal", origin="published", planner="ideal"),
    System(name="SBP", origin="cotenant", planner="squishy"),
    SPATIAL,
    System(name="gpulet+int", origin="cotenant", planner="elastic"),
    System(name="elastic-plus", origin="cotenant", planner="elastic-plus"),
    System(name="ideal", origin="cotenant", planner="ideal"),
    System(name="geometry", origin="cotenant", planner="geometry"),
)


def run(options: Options) -> list[Row]:
    """Compare largest rates. The result is deterministic and uses no sampling."""
    groups = [
        Group(
            name="/".join(pair),
            model_set=name,
            system=system,
            mix=dict.fromkeys(pair, 1.0),
            devices=paper.FIG06_DEVICES,
        )
        for name in options.profiles or MODEL_SETS
        for pair in paper.FIG06_PAIRS
        for system in SYSTEMS
        if system.available
    ]
    return compare_rates(groups, SPATIAL, paper.FIG06_OF_SPATIAL, options)


def plot(rows: Sequence[Row], path: Path) -> None:
    lines = [(f"{system}, paper", value) for system, value in paper.FIG06_OF_SPATIAL.items()]
    grouped(path, mean_bars(rows), lines=lines, ylabel="largest rate over best fit's", title="gpulet, Figure 6")
