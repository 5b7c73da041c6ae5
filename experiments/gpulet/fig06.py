"""Figure 6: the largest rate of two models on two GPUs, shared in time, in space, and by an exhaustive search.

Section 3.3. The paper measured it on GPUs; here it is what planners find, by the deterministic test that they all use.
Both models are asked for at the same rate. The published program's best fit has not been re-created.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.gpulet import paper
from experiments.gpulet.max_rates import Group, Row, bars, compared
from experiments.gpulet.model_sets import CASTS
from experiments.gpulet.systems import Way
from experiments.parallel import Options
from experiments.plotting import grouped

TITLE = "largest rate of two models on two GPUs, over best fit's (gpulet, Figure 6)"

SPATIAL = Way(name="best fit", who="cotenant", planner="bestfit")
WAYS = (
    Way(name="SBP", who="published", planner="squishy", interference=False),
    Way(name="ideal", who="published", planner="ideal"),
    Way(name="SBP", who="cotenant", planner="squishy"),
    SPATIAL,
    Way(name="gpulet+int", who="cotenant", planner="elastic"),
    Way(name="ideal", who="cotenant", planner="ideal"),
    Way(name="geometry", who="cotenant", planner="geometry"),
)


def run(options: Options) -> list[Row]:
    """Nothing here is left to chance, or to a sample."""
    groups = [
        Group(name="/".join(pair), cast=name, way=way, mix=dict.fromkeys(pair, 1.0), devices=paper.FIG06_DEVICES)
        for name in options.profiles or CASTS
        for pair in paper.FIG06_PAIRS
        for way in WAYS
        if way.there
    ]
    return compared(groups, SPATIAL, paper.FIG06_OF_SPATIAL, options)


def plot(rows: Sequence[Row], path: Path) -> None:
    lines = [(f"{way}, paper", value) for way, value in paper.FIG06_OF_SPATIAL.items()]
    grouped(path, bars(rows), lines=lines, ylabel="largest rate over best fit's", title="gpulet, Figure 6")
