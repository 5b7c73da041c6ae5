"""Cross-validate interference predictors on held-out samples: random ones, and all samples of one victim at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.predictors import Interference
from cotenant.predictors.fitting import fit
from cotenant.predictors.gaussian_process import GaussianProcess
from cotenant.predictors.samples import Sample

HELD_OUT = 0.3  # fraction of the samples, as in gpulet, section 4.4
QUANTILE = 0.9  # quantile whose coverage is reported
MIN_OF_MODEL = 100  # held-out samples of a victim whose coverage is reported by itself

Progress = Callable[[str, int, int], None]  # = Receives the present step, the steps done, and their number.


class PredictionErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Report the errors of a predictor on held-out samples, in percent of the measured slowdown.

    held_out: how the samples were chosen. samples: their number over all splits. mean, p50, p90, p95: of the absolute
    error. spread: standard deviation of p90 between splits. bias: mean signed error. coverage: percent of slowdowns not
    above the 0.9 quantile, for predictors with quantiles. coverage_of: that of each victim with at least MIN_OF_MODEL
    samples. fit_s: mean seconds to fit. failed: why there are no figures.
    """

    predictor: str
    held_out: str
    samples: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    spread: float | None = None
    bias: float | None = None
    coverage: float | None = None
    coverage_of: dict[str, float] = {}
    fit_s: float | None = None
    failed: str = ""


class TrainTestSplit(msgspec.Struct, frozen=True):
    """Hold indices of samples."""

    train: list[int]
    test: list[int]


def random_splits(samples: Sequence[Sample], repeats: int, seed: int) -> list[TrainTestSplit]:
    splits = []
    for i in range(repeats):
        order = np.random.default_rng([seed, i]).permutation(len(samples)).tolist()
        held_out = round(HELD_OUT * len(samples))
        splits.append(TrainTestSplit(order[held_out:], order[:held_out]))
    return splits


def victim_splits(samples: Sequence[Sample]) -> list[TrainTestSplit]:
    """Return a split for each victim that holds out all its samples; it may occur as a co-located model in training."""
    splits = []
    for model in dict.fromkeys(sample.victim.model for sample in samples):
        own = [i for i, sample in enumerate(samples) if sample.victim.model == model]
        splits.append(TrainTestSplit(sorted(set(range(len(samples))) - set(own)), own))
    return splits


def cross_validate(
    names: Sequence[str],
    samples: Sequence[Sample],
    profiles: Profiles,
    *,
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = lambda what, done, of: None,
) -> Iterator[PredictionErrors]:
    """Yield two results for each predictor: on random samples, and on victims that are new to it."""
    kinds = {
        f"random {HELD_OUT:.0%}".replace("%", " %"): random_splits(samples, repeats, seed),
        "new victim": victim_splits(samples),
    }
    for name in names:
        done, of = 0, sum(map(len, kinds.values()))
        progress(name, 0, of)
        for what, splits in kinds.items():
            outcomes = []
            for split in splits:
                outcomes.append(_outcome(name, samples, profiles, split))
                done += 1
                progress(name, done, of)
                if outcomes[-1].failed:
                    break
            done = of if what == list(kinds)[-1] else len(splits)
            progress(name, done, of)
            yield _summary(name, what, samples, splits, outcomes)


class _Outcome(msgspec.Struct):
    """Hold the errors of one split. errors: predicted over measured slowdown, less 1. covered: whether each slowdown is
    at most the quantile."""

    errors: list[float] = []
    covered: list[bool] = []
    seconds: float = 0.0
    failed: str = ""


def relative_errors(name: str, samples: Sequence[Sample], profiles: Profiles, split: TrainTestSplit) -> list[float]:
    """Return predicted over measured slowdown, less 1, of the test samples.

    Raises PlanError for a predictor that cannot be fitted to the training samples or asked about the others.
    """
    return _evaluate(name, samples, profiles, split).errors


def _outcome(name: str, samples: Sequence[Sample], profiles: Profiles, split: TrainTestSplit) -> _Outcome:
    try:
        return _evaluate(name, samples, profiles, split)
    except PlanError as error:
        return _Outcome(failed=str(error))


def _evaluate(name: str, samples: Sequence[Sample], profiles: Profiles, split: TrainTestSplit) -> _Outcome:
    begun = time.perf_counter()
    fitted = fit(name, [samples[i] for i in split.train], profiles)
    seconds = time.perf_counter() - begun
    test = [samples[i] for i in split.test]
    predicted = [_predict(fitted, sample) for sample in test]
    return _Outcome(
        [median / sample.slowdown - 1 for sample, (median, _) in zip(test, predicted, strict=True)],
        [sample.slowdown <= high for sample, (_, high) in zip(test, predicted, strict=True) if high is not None],
        seconds,
    )


def _predict(fitted: Interference, sample: Sample) -> tuple[float, float | None]:
    """Return the median slowdown, and the 0.9 quantile if the predictor has quantiles."""
    if isinstance(fitted, GaussianProcess):
        median, high = fitted.quantiles(sample.victim, sample.colocated, (0.5, QUANTILE))
        return median, high
    return fitted.slowdown(sample.victim, sample.colocated), None


def _summary(
    name: str,
    what: str,
    samples: Sequence[Sample],
    splits: Sequence[TrainTestSplit],
    outcomes: Sequence[_Outcome],
) -> PredictionErrors:
    count = sum(len(split.test) for split in splits)
    if failed := next((outcome.failed for outcome in outcomes if outcome.failed), ""):
        return PredictionErrors(predictor=name, held_out=what, samples=count, failed=failed)
    errors = 100 * np.concatenate([outcome.errors for outcome in outcomes])
    covered = [each for outcome in outcomes for each in outcome.covered]
    by_victim: dict[str, list[bool]] = {}
    if covered:
        victims = [samples[i].victim.model for split in splits for i in split.test]
        for victim, each in zip(victims, covered, strict=True):
            by_victim.setdefault(victim, []).append(each)
    p50, p90, p95 = np.percentile(abs(errors), (50, 90, 95)).tolist()
    return PredictionErrors(
        predictor=name,
        held_out=what,
        samples=count,
        mean=float(abs(errors).mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        spread=float(np.std([100 * np.percentile(np.abs(outcome.errors), 90) for outcome in outcomes])),
        bias=float(errors.mean()),
        coverage=100 * sum(covered) / len(covered) if covered else None,
        coverage_of={
            victim: 100 * sum(own) / len(own) for victim, own in by_victim.items() if len(own) >= MIN_OF_MODEL
        },
        fit_s=sum(outcome.seconds for outcome in outcomes) / len(outcomes),
    )
