"""Choose which models to co-locate with a target: KACE's policy and its baselines (report, chapters 4 and 5).

A policy scores every set of candidates, and the set of highest score is chosen. The goal is the total throughput of all
models that then run together, in rows/s or relative to each one's throughput alone. KACE predicts that sum; rules rank
by one feature of the candidates; Oracle has measured the sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from cotenant.core.profile import Profiles
from cotenant.core.units import show_memory
from cotenant.errors import PlanError
from cotenant.predictors import Interference, Load, at_quantile
from cotenant.predictors.features import MEMORY, feature_table
from cotenant.predictors.kernels import ColocatedRun, ThroughputSum

ColocatedSet = tuple[Load, ...]
ThroughputUnit = Literal["rows", "relative"]
# The predicted or measured merit of a co-located set; None where it has none.
SetScore = Callable[[ColocatedSet], float | None]

MAX_CANDIDATE_SETS = 100_000

# Rule → column of a profile, and whether large values are preferred.
RULES: Mapping[str, tuple[str, bool]] = {
    "memcap": (MEMORY, False),
    "sm": ("sm_util_pct", True),
    "mem": ("dram_util_pct", False),
}


class Choice(msgspec.Struct, frozen=True):
    """Hold a set and its score under a policy; for a rule, the feature itself."""

    colocated: ColocatedSet
    score: float


def candidate_sets(
    target: Load, candidates: Sequence[Load], count: int, profiles: Profiles, memory: int | None = None
) -> list[ColocatedSet]:
    """Enumerate the sets of `count` candidates that fit beside the target. memory: bytes of the device.

    Raises PlanError where there are more than `MAX_CANDIDATE_SETS`, or none.
    """
    combinations = math.comb(len(candidates), count)
    if combinations > MAX_CANDIDATE_SETS:
        raise PlanError(
            f"{combinations} sets of {count} candidates exceed the limit of {MAX_CANDIDATE_SETS}; name fewer candidates"
        )
    sets = list(itertools.combinations(candidates, count))
    if memory is not None:
        sets = [each for each in sets if sum(_memory(load, profiles) for load in (target, *each)) <= memory]
    if not sets:
        limit = "" if memory is None else f" within {show_memory(memory)}"
        raise PlanError(f"no {count} of {len(candidates)} candidates fit next to {target.model!r}{limit}")
    return sets


def rank_sets(sets: Iterable[ColocatedSet], score: SetScore) -> list[Choice]:
    """Rank sets by decreasing score, stably; omit those without a score."""
    choices = [Choice(colocated, value) for colocated in sets if (value := score(colocated)) is not None]
    return sorted(choices, key=lambda choice: -choice.score)


def rank_by_prediction(target: Load, interference: Interference, profiles: Profiles, unit: ThroughputUnit) -> SetScore:
    """Score sets by the predicted sum of throughputs, in rows/s or relative to each one's alone.

    A sum of throughputs is expected with medians of slowdowns, where the predictor has quantiles.
    """
    interference = at_quantile(interference, 0.5)

    def score(colocated: ColocatedSet) -> float:
        loads = (target, *colocated)
        return sum(
            (1.0 if unit == "relative" else throughput_alone(load, profiles))
            / interference.slowdown(load, (*loads[:i], *loads[i + 1 :]))
            for i, load in enumerate(loads)
        )

    return score


def rank_by_learned_sum(target: Load, predictor: ThroughputSum) -> SetScore:
    """Score sets by the sum in rows/s that a KACE predictor was trained on."""
    return lambda colocated: predictor.rows_per_s([(target, *colocated)])[0]


def rank_by_rule(rule: str, profiles: Profiles) -> SetScore:
    """Score sets by one feature of the candidates. Raises PlanError, also from the score, for a profile without it."""
    column, prefer_largest = RULES[rule]
    features = feature_table(profiles, (), (column,))
    column_index = features.names.index(column)
    if column == MEMORY and not any(profile.memory(profile.max_batch) for profile in profiles.values()):
        raise PlanError(f"the rule {rule!r} needs memory, which is 0 in all profiles; measure it, or use another rule")

    def score(colocated: ColocatedSet) -> float:
        try:
            value = float(features.together(colocated)[column_index])
        except PlanError:
            names = ", ".join(sorted({load.model for load in colocated}))
            raise PlanError(
                f"the rule {rule!r} needs the column {column!r}, which a profile of {names} lacks"
            ) from None
        return value if prefer_largest else -value

    return score


def rank_by_measurement(
    target: Load, runs: Iterable[ColocatedRun], profiles: Profiles, unit: ThroughputUnit
) -> SetScore:
    """Score sets by a measured run of exactly these loads: Oracle."""
    measured = {_key(run.loads): measured_throughput(run, profiles, unit) for run in runs}
    return lambda colocated: measured.get(_key((target, *colocated)))


def rank_at_random(rng: np.random.Generator) -> SetScore:
    """Score sets at random."""
    return lambda colocated: float(rng.random())


def measured_throughput(run: ColocatedRun, profiles: Profiles, unit: ThroughputUnit) -> float:
    """Return the sum of throughputs of a run, in rows/s or relative to each one's alone."""
    if unit == "rows":
        return sum(run.rows_per_s)
    return sum(rate / throughput_alone(load, profiles) for load, rate in zip(run.loads, run.rows_per_s, strict=True))


def throughput_alone(load: Load, profiles: Profiles) -> float:
    """Return a load's rows/s alone. Raises PlanError where its batch or share was not profiled."""
    latency = profiles[load.model, load.kind].latency(load.batch, load.share)
    if math.isinf(latency):
        raise PlanError(
            f"model {load.model!r}: a batch of {load.batch} on {load.share / 10:g} % is outside its profile"
        )
    return load.batch / latency


def _memory(load: Load, profiles: Profiles) -> int:
    return profiles[load.model, load.kind].memory(load.batch)


def _key(loads: Sequence[Load]) -> tuple[Load, ...]:
    return tuple(sorted(loads, key=msgspec.structs.astuple))
