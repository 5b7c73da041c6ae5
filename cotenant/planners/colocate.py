"""Whom to put beside a target: KACE's question, and the policies that it is compared with (report, chapters 4 and 5).

A policy gives every set of neighbours a worth, and the set of the highest is chosen. What counts is the throughput of
all that then run together, in rows per second, or each over what it does alone. KACE predicts that sum; rules look at
one feature of the candidates; Oracle has measured it.
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
from cotenant.predictors import Interference, Load
from cotenant.predictors.features import MEMORY, feature_table
from cotenant.predictors.kernels import ColocatedRun, ThroughputSum

Neighbours = tuple[Load, ...]
Measure = Literal["rows", "relative"]
# What is promised, or measured, of all that run together; None: nothing is known of them.
Worth = Callable[[Neighbours], float | None]

MAX_CANDIDATE_SETS = 100_000

# Rule → column of a profile, and whether the most of it is wanted.
RULES: Mapping[str, tuple[str, bool]] = {
    "memcap": (MEMORY, False),
    "sm": ("sm_util_pct", True),
    "mem": ("dram_util_pct", False),
}


class Choice(msgspec.Struct, frozen=True):
    """worth: as the policy has it; for a rule the feature itself."""

    colocated: Neighbours
    worth: float


def candidate_sets(
    target: Load, candidates: Sequence[Load], count: int, profiles: Profiles, memory: int | None = None
) -> list[Neighbours]:
    """Every choice of `count` candidates that fits beside the target. memory: bytes of the device.

    Raises PlanError where there are too many to compare, or none.
    """
    number = math.comb(len(candidates), count)
    if number > MAX_CANDIDATE_SETS:
        raise PlanError(
            f"{number} sets of {count} candidates are more than {MAX_CANDIDATE_SETS} to compare; name fewer candidates"
        )
    found = list(itertools.combinations(candidates, count))
    if memory is not None:
        found = [beside for beside in found if sum(_memory(load, profiles) for load in (target, *beside)) <= memory]
    if not found:
        room = "" if memory is None else f" within {show_memory(memory)}"
        raise PlanError(f"no {count} of {len(candidates)} candidates fit beside {target.model!r}{room}")
    return found


def rank_sets(sets: Iterable[Neighbours], worth: Worth) -> list[Choice]:
    """The highest worth first; equal ones in the order that they came. Of whom nothing is known is left out."""
    known = [Choice(beside, value) for beside in sets if (value := worth(beside)) is not None]
    return sorted(known, key=lambda choice: -choice.worth)


def rank_by_prediction(target: Load, interference: Interference, profiles: Profiles, measure: Measure) -> Worth:
    """The sum of throughputs, each slowed by the others."""

    def worth(beside: Neighbours) -> float:
        loads = (target, *beside)
        return sum(
            (1.0 if measure == "relative" else throughput_alone(load, profiles))
            / interference.slowdown(load, (*loads[:i], *loads[i + 1 :]))
            for i, load in enumerate(loads)
        )

    return worth


def rank_by_learned_sum(target: Load, learnt: ThroughputSum) -> Worth:
    """KACE's own: the sum in rows per second is what was learnt."""
    return lambda beside: learnt.rows_per_s([(target, *beside)])[0]


def rank_by_rule(rule: str, profiles: Profiles) -> Worth:
    """The candidates that have the most, or the least, of a feature. Raises PlanError for a profile without it."""
    column, most = RULES[rule]
    known = feature_table(profiles, (), (column,))
    place = known.names.index(column)
    if column == MEMORY and not any(profile.memory(profile.max_batch) for profile in profiles.values()):
        raise PlanError(f"the rule {rule!r} looks at memory, which was not measured: it is 0 in all profiles")

    def worth(beside: Neighbours) -> float:
        try:
            value = float(known.together(beside)[place])
        except PlanError:
            names = ", ".join(sorted({load.model for load in beside}))
            raise PlanError(f"the rule {rule!r} looks at {column!r}, which a profile of {names} lacks") from None
        return value if most else -value

    return worth


def rank_by_measurement(target: Load, runs: Iterable[ColocatedRun], profiles: Profiles, measure: Measure) -> Worth:
    """What was measured of exactly these models together: Oracle."""
    seen = {_key(run.loads): measured_throughput(run, profiles, measure) for run in runs}
    return lambda beside: seen.get(_key((target, *beside)))


def rank_at_random(rng: np.random.Generator) -> Worth:
    return lambda beside: float(rng.random())


def measured_throughput(run: ColocatedRun, profiles: Profiles, measure: Measure) -> float:
    """The sum of throughputs of a run."""
    if measure == "rows":
        return sum(run.rows_per_s)
    return sum(rate / throughput_alone(load, profiles) for load, rate in zip(run.loads, run.rows_per_s, strict=True))


def throughput_alone(load: Load, profiles: Profiles) -> float:
    """Rows per second. Raises PlanError where a batch of that size on that share was not measured."""
    latency = profiles[load.model, load.kind].latency(load.batch, load.share)
    if math.isinf(latency):
        raise PlanError(
            f"model {load.model!r}: a batch of {load.batch} on {load.share / 10:g} % lies outside of its profile"
        )
    return load.batch / latency


def _memory(load: Load, profiles: Profiles) -> int:
    return profiles[load.model, load.kind].memory(load.batch)


def _key(loads: Sequence[Load]) -> tuple[Load, ...]:
    return tuple(sorted(loads, key=msgspec.structs.astuple))
