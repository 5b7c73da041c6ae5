"""Measure predictions for three and four co-located models, and the choice among such sets, on KACE's V100.

The predictor is fitted to KACE's pairs, or to these and a few random sets of three, and predicts the other sets of
three and all sets of four. How slowdowns are composed was chosen on the sets of three; the sets of four were held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.errors import ConfigError
from cotenant.planners.colocate import rank_by_prediction
from cotenant.predictors.gaussian_process import GaussianProcess, fit
from cotenant.predictors.kernels import ColocatedRun
from cotenant.published import kace
from experiments.kace import protocol
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "sets of three and four models: error of the Gaussian process, in % of the measured slowdown"
FILES = {"three": kace.TRIPLES, "four": kace.FOURS}
MEASURED_SETS = (0, 30, 120)  # of three, next to all pairs: 30 are one for six pairs, as `cotenant profile` measures
DRAWS = 6
MORE_DRAWS = 20  # with --full


class Row(msgspec.Struct, frozen=True):
    """Hold a result, the mean over draws.

    sets: models in a set. measured: sets of three that the predictor was fitted to. p50, p90, p95: of absolute errors,
    in %. worst: p90 of the worst draw. coverage: % of slowdowns at or below the predicted 0.9 quantile. choice: the
    total throughput of the set that is predicted best for a target, over that of the best. throughput: the least sum
    of predicted throughputs of a set, relative to the baselines.
    """

    sets: str
    measured: int
    samples: int
    p50: float
    p90: float
    worst: float
    p95: float
    coverage: float
    choice: float
    throughput: float


class Task(msgspec.Struct, frozen=True):
    sets: tuple[str, ...]
    measured: int
    seed: int


class Outcome(msgspec.Struct, frozen=True):
    """Hold the results of one draw, with the fields of Row."""

    samples: int
    p50: float
    p90: float
    p95: float
    coverage: float
    choice: float
    throughput: float


def run(options: Options) -> list[Row]:
    """Predict held-out sets. profiles: kinds of sets, of three, four; by default both."""
    for name in options.profiles:
        if name not in FILES:
            raise ConfigError(f"--profiles {name}: there are {', '.join(FILES)}")
    names = options.profiles or tuple(FILES)
    for name in names:
        kace.runs(FILES[name])
    draws = MORE_DRAWS if options.full else DRAWS
    tasks = [
        Task(names, measured, options.seed + i) for measured in MEASURED_SETS for i in range(draws if measured else 1)
    ]
    results = run_tasks(outcomes, tasks, options, "fits")
    rows = []
    for i, name in enumerate(names):
        for measured in MEASURED_SETS:
            own = [result[i] for task, result in zip(tasks, results, strict=True) if task.measured == measured]
            rows.append(_row(name, measured, own))
    return rows


def _row(name: str, measured: int, own: Sequence[Outcome]) -> Row:
    def mean(field: str) -> float:
        return float(np.mean([getattr(each, field) for each in own]))

    return Row(
        sets=name,
        measured=measured,
        samples=own[0].samples,
        p50=mean("p50"),
        p90=mean("p90"),
        worst=max(each.p90 for each in own),
        p95=mean("p95"),
        coverage=mean("coverage"),
        choice=mean("choice"),
        throughput=min(each.throughput for each in own),
    )


def outcomes(task: Task) -> list[Outcome]:
    """Fit to a random draw of sets of three, and predict the others of each kind of sets."""
    triples = kace.runs(kace.TRIPLES)
    order = np.random.default_rng(task.seed).permutation(len(triples)).tolist()
    measured = [triples[i] for i in order[: task.measured]]
    predictor = fit([*kace.samples(), *kace.samples(measured)], kace.profiles())
    rest = {"three": [triples[i] for i in order[task.measured :]]}
    return [_outcome(predictor, rest.get(name) or kace.runs(FILES[name])) for name in task.sets]


def _outcome(predictor: GaussianProcess, runs: Sequence[ColocatedRun]) -> Outcome:
    samples = kace.samples(list(runs))
    slowdowns = np.array([sample.slowdown for sample in samples])
    predicted = np.array([predictor.quantiles(each.victim, each.colocated, (0.5, 0.9)) for each in samples])
    p50, p90, p95 = np.percentile(100 * np.abs(predicted[:, 0] / slowdowns - 1), (50, 90, 95)).tolist()

    def rank(mine: Sequence[ColocatedRun]) -> protocol.Values:
        scores = [rank_by_prediction(run.loads[0], predictor, kace.profiles(), "rows")(run.loads[1:]) for run in mine]
        return np.array(scores, dtype=np.float64)

    return Outcome(
        samples=len(samples),
        p50=p50,
        p90=p90,
        p95=p95,
        coverage=100 * float((slowdowns <= predicted[:, 1]).mean()),
        choice=protocol.mean(protocol.relative(runs, rank)),
        throughput=min(predictor.relative_throughput(each.loads) for each in runs),
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(f"sets of {row.sets}", f"{row.measured} sets measured", "p90", "cotenant", row.p90) for row in rows]
    grouped(path, bars, lines=[], ylabel="90th percentile of the error, %", title="sets of three and four models")
