"""How well predictors foresee samples that were held back: random ones, and all of one victim at a time."""

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

HELD_BACK = 0.3  # as gpulet, section 4.4
QUANTILE = 0.9  # whose coverage is told

Progress = Callable[[str, int, int], None]  # what, done, of how many


class PredictionErrors(msgspec.Struct, frozen=True, kw_only=True):
    """held_back: what. samples: held back, in all. The rest in percent of what was measured, but for `fit_s`.

    spread: standard deviation of the 90th percentile from split to split. bias: mean error with its sign. coverage: how
    many slowdowns do not exceed the quantile 0.9, of predictors that know quantiles. fit_s: seconds to fit, on average.
    failed: why there is no more to say.
    """

    predictor: str
    held_back: str
    samples: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    spread: float | None = None
    bias: float | None = None
    coverage: float | None = None
    fit_s: float | None = None
    failed: str = ""


class TrainTestSplit(msgspec.Struct, frozen=True):
    """Places of samples."""

    known: list[int]
    held_back: list[int]


def random_splits(samples: Sequence[Sample], repeats: int, seed: int) -> list[TrainTestSplit]:
    found = []
    for i in range(repeats):
        order = np.random.default_rng([seed, i]).permutation(len(samples)).tolist()
        first = round(HELD_BACK * len(samples))
        found.append(TrainTestSplit(order[first:], order[:first]))
    return found


def victim_splits(samples: Sequence[Sample]) -> list[TrainTestSplit]:
    """Each victim in turn as if it were new; it may be known as a neighbour."""
    found = []
    for model in dict.fromkeys(sample.victim.model for sample in samples):
        mine = [i for i, sample in enumerate(samples) if sample.victim.model == model]
        found.append(TrainTestSplit(sorted(set(range(len(samples))) - set(mine)), mine))
    return found


def cross_validate(
    names: Sequence[str],
    samples: Sequence[Sample],
    profiles: Profiles,
    *,
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = lambda what, done, of: None,
) -> Iterator[PredictionErrors]:
    """Two verdicts for each predictor: on random samples, and on victims that are new to it."""
    kinds = {
        f"random {HELD_BACK:.0%}".replace("%", " %"): random_splits(samples, repeats, seed),
        "a victim that is new": victim_splits(samples),
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
            yield _verdict(name, what, splits, outcomes)


class _Outcome(msgspec.Struct):
    """errors: predicted over measured, less 1. covered: whether each slowdown is at most the quantile."""

    errors: list[float] = []
    covered: list[bool] = []
    seconds: float = 0.0
    failed: str = ""


def relative_errors(name: str, samples: Sequence[Sample], profiles: Profiles, split: TrainTestSplit) -> list[float]:
    """Predicted over measured, less 1, of what was held back. Raises PlanError for a predictor that cannot say it."""
    return _tried(name, samples, profiles, split).errors


def _outcome(name: str, samples: Sequence[Sample], profiles: Profiles, split: TrainTestSplit) -> _Outcome:
    try:
        return _tried(name, samples, profiles, split)
    except PlanError as error:
        return _Outcome(failed=str(error))


def _tried(name: str, samples: Sequence[Sample], profiles: Profiles, split: TrainTestSplit) -> _Outcome:
    begun = time.perf_counter()
    fitted = fit(name, [samples[i] for i in split.known], profiles)
    seconds = time.perf_counter() - begun
    held_back = [samples[i] for i in split.held_back]
    found = [_foreseen(fitted, it) for it in held_back]
    return _Outcome(
        [middle / it.slowdown - 1 for it, (middle, _) in zip(held_back, found, strict=True)],
        [it.slowdown <= high for it, (_, high) in zip(held_back, found, strict=True) if high is not None],
        seconds,
    )


def _foreseen(fitted: Interference, sample: Sample) -> tuple[float, float | None]:
    """The slowdown that is most likely, and the quantile where there is one."""
    if isinstance(fitted, GaussianProcess):
        middle, high = fitted.quantiles(sample.victim, sample.colocated, (0.5, QUANTILE))
        return middle, high
    return fitted.slowdown(sample.victim, sample.colocated), None


def _verdict(name: str, what: str, splits: Sequence[TrainTestSplit], outcomes: Sequence[_Outcome]) -> PredictionErrors:
    count = sum(len(split.held_back) for split in splits)
    if failed := next((outcome.failed for outcome in outcomes if outcome.failed), ""):
        return PredictionErrors(predictor=name, held_back=what, samples=count, failed=failed)
    errors = 100 * np.concatenate([outcome.errors for outcome in outcomes])
    covered = [each for outcome in outcomes for each in outcome.covered]
    p50, p90, p95 = np.percentile(abs(errors), (50, 90, 95)).tolist()
    return PredictionErrors(
        predictor=name,
        held_back=what,
        samples=count,
        mean=float(abs(errors).mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        spread=float(np.std([100 * np.percentile(np.abs(it.errors), 90) for it in outcomes])),
        bias=float(errors.mean()),
        coverage=100 * sum(covered) / len(covered) if covered else None,
        fit_s=sum(outcome.seconds for outcome in outcomes) / len(outcomes),
    )
