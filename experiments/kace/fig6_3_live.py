"""Repeat Figure 6.3 live: served models and training steps on the two halves of a machine's processors.

The runs are those of `benchmarks.job_pairs`, in `data/jobs/cpu`. Half of them, at random, train the policies; of the
rest each served model and batch takes the training step that a policy ranks first, and its measured throughput sum is
compared with that of the best. KACE sums rows/s, in which a step of LeNet outweighs all others; sums relative to each
one's throughput alone weigh all models alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from cotenant.config import read_samples_file
from cotenant.config.problem import read_profiles_file
from cotenant.core.profile import Profiles
from cotenant.planners.colocate import (
    SetScore,
    ThroughputUnit,
    measured_throughput,
    rank_by_learned_sum,
    rank_by_prediction,
    rank_by_rule,
    rank_sets,
)
from cotenant.predictors import Load
from cotenant.predictors.fitting import fit
from cotenant.predictors.kernels import ColocatedRun, fit_sum, runs_of
from cotenant.predictors.samples import Sample
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "throughput sums over Oracle's, by policy, measured live on processors (KACE, Figure 6.3)"
FOLDER = Path(__file__).resolve().parents[2] / "data" / "jobs" / "cpu"
SPLITS = 5  # as KACE
TRAINED = 0.5  # fraction of the runs

# The score of a target's candidates, by what is summed; and what makes it from what a policy may learn.
Policy = Callable[[Load, ThroughputUnit], SetScore]
Learner = Callable[[Sequence[Sample], Profiles], Policy]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a result. sums: what is summed. relative: mean over targets and splits; deviation: of the means of splits.
    targets: compared in one split, on average; pairs: measured in all."""

    policy: str
    sums: str
    relative: float
    deviation: float
    targets: float
    pairs: int


def predicted(samples: Sequence[Sample], profiles: Profiles) -> Policy:
    interference = fit("gaussian-process", samples, profiles)
    return lambda target, unit: rank_by_prediction(target, interference, profiles, unit)


def learned(samples: Sequence[Sample], profiles: Profiles) -> Policy:
    predictor = fit_sum(runs_of(samples), profiles)
    return lambda target, unit: rank_by_learned_sum(target, predictor)


def least_memory(samples: Sequence[Sample], profiles: Profiles) -> Policy:
    return lambda target, unit: rank_by_rule("memcap", profiles)


POLICIES: dict[str, Learner] = {"prediction": predicted, "KACE (LR)": learned, "MEMCAP": least_memory}


def run(options: Options) -> list[Row]:
    profiles = read_profiles_file(FOLDER / "profiles.csv")
    samples = read_samples_file(FOLDER / "pairs.csv")
    return compare(samples, profiles, options.seed)


def compare(samples: Sequence[Sample], profiles: Profiles, seed: int) -> list[Row]:
    """Compare the policies on splits of these samples."""
    runs = runs_of(samples)
    names = "Oracle", *POLICIES, "random"
    found: dict[tuple[ThroughputUnit, str], list[float]] = {
        (unit, name): [] for unit in get_args(ThroughputUnit) for name in names
    }
    targets = []
    for split in range(SPLITS):
        order = np.random.default_rng([seed, split]).permutation(len(runs)).tolist()
        trained, test = ([runs[i] for i in part] for part in np.split(order, [round(TRAINED * len(runs))]))
        known = {run.loads for run in trained}
        learnt = [each for each in samples if _loads(each) in known]
        policies = {name: learner(learnt, profiles) for name, learner in POLICIES.items()}
        for unit in get_args(ThroughputUnit):
            candidates = _by_target(test, profiles, unit)
            found[unit, "Oracle"].append(1.0)
            found[unit, "random"].append(
                _mean([_mean(list(of.values())) / max(of.values()) for of in candidates.values()])
            )
            for name, policy in policies.items():
                chosen = [_relative(of, policy(target, unit)) for target, of in candidates.items()]
                found[unit, name].append(_mean(chosen))
        targets.append(len(candidates))
    return [
        Row(
            policy=name,
            sums="rows/s" if unit == "rows" else "relative to alone",
            relative=_mean(values),
            deviation=float(np.std(values)),
            targets=_mean(targets),
            pairs=len(runs),
        )
        for (unit, name), values in found.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(panel=f"sums: {row.sums}", group=row.policy, system="chosen", origin="cotenant", height=row.relative)
        for row in rows
    ]
    grouped(path, bars, lines=[], ylabel="throughput sum over Oracle's", title="KACE, Figure 6.3, live on processors")


def _by_target(
    runs: Sequence[ColocatedRun], profiles: Profiles, unit: ThroughputUnit
) -> dict[Load, dict[tuple[Load, ...], float]]:
    """Return the measured sum beside each candidate, for the served models with a choice between several."""
    found: dict[Load, dict[tuple[Load, ...], float]] = {}
    for each in runs:
        (target,) = [load for load in each.loads if not trains(load)]
        step = tuple(load for load in each.loads if trains(load))
        found.setdefault(target, {})[step] = measured_throughput(each, profiles, unit)
    return {target: sums for target, sums in found.items() if len(sums) > 1}


def trains(load: Load) -> bool:
    return load.model.endswith("_train")


def _relative(sums: dict[tuple[Load, ...], float], score: SetScore) -> float:
    """Return the sum of the candidate that is ranked first over the best."""
    return sums[rank_sets(sums, score)[0].colocated] / max(sums.values())


def _loads(sample: Sample) -> tuple[Load, ...]:
    return tuple(sorted((sample.victim, *sample.colocated), key=msgspec.structs.astuple))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
