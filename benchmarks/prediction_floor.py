"""Measure what no predictor of interference can know from published pairs, and compare with extra trees.

    python -m benchmarks.prediction_floor [--splits 10] [--seed 7] [--json]

- Runs that were repeated: how far the throughputs of the same co-located models are apart. KACE measured 40 pairs in
  two weeks, and 66 sets of three on two occasions; on our H100 latencies alone were measured again before each run.
- KACE's new victims: throughputs alone of five of 21 loads were measured under other conditions, so that all their
  slowdowns are at least 0.1 to 6 times what they should be. The error of a predictor that knows all but each load's
  least slowdown, which no other victim tells.
- Extra trees (scikit-learn, 300 trees, on batches, shares, names and the features of `gaussian-process`) and
  `gaussian-process` on the same random splits of the A100's pairs.

Errors are absolute, in percent: median, 90th and 95th percentile.
"""

from __future__ import annotations

import argparse
import ast
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from benchmarks.harness import show
from cotenant.config.interference import read_samples_file
from cotenant.core.profile import Profiles
from cotenant.predictors import Load
from cotenant.predictors.load_features import load_features
from cotenant.predictors.samples import Sample
from cotenant.profiling.cross_validation import TrainTestSplit, random_splits, relative_errors
from cotenant.published import a100, kace, lines

CAMPAIGNS = tuple(
    f"{kace.SOURCE}/output/shared_throughput/{name}_train-inf_share_steps_stage2.csv"
    for name in ("0617", "MPS100_0624")
)
WHOLE_COLUMN = "(LS100, BE100)"
REPEATED_TRIPLES = f"{kace.SOURCE}/scripts/multiinstance/dataset/total_labels_batch2_targetMPS100.csv"
H100 = Path(__file__).parents[1] / "data/gpu/h100-80gb-hbm3/pairs-green.csv"

Values = NDArray[np.float64]
Throughputs = dict[tuple[str, ...], list[float]]


def campaign(path: str) -> Throughputs:
    """Return the throughputs of the pairs of a file that ran without limits, by their names."""
    _, texts = zip(*lines(path), strict=True)
    found: Throughputs = {}
    for row in csv.DictReader(texts):
        values = ast.literal_eval(row[WHOLE_COLUMN])
        if None not in values:
            found[row["workload1"], row["workload2"]] = list(values)
    return found


def triples(path: str) -> Throughputs:
    """Return the throughputs of a file of sets, in the order of their names."""
    found = {}
    for run in kace.runs(path):
        named = sorted(zip(map(kace.workload, run.loads), run.rows_per_s, strict=True))
        found[tuple(name for name, _ in named)] = [rate for _, rate in named]
    return found


def differences(one: Throughputs, other: Throughputs) -> list[float]:
    """Return how far apart the throughputs of runs in both are, as fractions."""
    return [b / a - 1 for key in one.keys() & other.keys() for a, b in zip(one[key], other[key], strict=True)]


def alone_differences(samples: Iterable[Sample]) -> list[float]:
    """Return how far latencies alone of a load are from the first of them, as fractions."""
    first: dict[Load, float] = {}
    found = []
    for sample in samples:
        if sample.victim in first:
            found.append(sample.alone / first[sample.victim] - 1)
        first.setdefault(sample.victim, sample.alone)
    return found


def unknowable_errors(samples: Sequence[Sample]) -> list[float]:
    """Return for each sample the error of a predictor that knows all but the least slowdown of its victim's load."""
    least: dict[Load, float] = {}
    for sample in samples:
        least[sample.victim] = min(sample.slowdown, least.get(sample.victim, sample.slowdown))
    return [1 / least[sample.victim] - 1 for sample in samples]


def tree_errors(samples: Sequence[Sample], profiles: Profiles, splits: Sequence[TrainTestSplit]) -> list[float]:
    names = sorted({load.model for sample in samples for load in (sample.victim, *sample.colocated)})

    def row(sample: Sample) -> list[float]:
        loads = (sample.victim, sample.colocated[0])
        known = [value for load in loads for value in load_features(profiles[load.model, load.kind], load).tolist()]
        return known + [float(load.model == name) for load in loads for name in names]

    rows, logs = np.nan_to_num([row(sample) for sample in samples]), np.log([each.slowdown for each in samples])
    errors: list[float] = []
    for split in splits:
        trees = ExtraTreesRegressor(300, random_state=0).fit(rows[split.train], logs[split.train])
        errors += (np.exp(trees.predict(rows[split.test]) - logs[split.test]) - 1).tolist()
    return errors


def report(name: str, errors: Sequence[float], what: str = "") -> None:
    p50, p90, p95 = np.percentile(100 * np.abs(errors), (50, 90, 95)).tolist()
    text = f"{len(errors)} values{what}: {p50:.1f}, {p90:.1f} and {p95:.1f} %"
    show(name, text, values=float(len(errors)), p50=p50, p90=p90, p95=p95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=10, help="random splits of the A100's pairs; 0 leaves these out")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    options = parser.parse_args()
    report("KACE's pairs, measured twice", differences(*map(campaign, CAMPAIGNS)))
    report("KACE's sets of three, measured twice", differences(triples(kace.TRIPLES), triples(REPEATED_TRIPLES)))
    own = read_samples_file(H100)
    report("H100, latencies alone, measured again", alone_differences(own))
    report("KACE's new victims, least slowdown unknown", unknowable_errors(kace.samples()))
    if options.splits:
        pairs, profiles = a100.pairs(), a100.profiles()
        splits = random_splits(pairs, options.splits, options.seed)
        what = f", {options.splits} splits of seed {options.seed}"
        report("A100, extra trees", tree_errors(pairs, profiles, splits), what)
        errors = [e for split in splits for e in relative_errors("gaussian-process", pairs, profiles, split)]
        report("A100, gaussian-process", errors, what)


if __name__ == "__main__":
    main()
