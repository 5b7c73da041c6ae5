"""Measure the value of profile features to the Gaussian process.

Compares its error with none of them, with each kind, and with all. Latencies are always in a profile, and the names of
co-located models are known. Isolated utilisation of L2, memory bandwidth and SMs needs hardware counters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from cotenant.core.profile import Profile, Profiles
from cotenant.errors import ConfigError
from cotenant.predictors.load_features import UTILISATION_COLUMNS
from cotenant.predictors.samples import Sample
from cotenant.profiling.cross_validation import cross_validate
from cotenant.published import a100, kace, v100
from experiments.parallel import Options, run_tasks
from experiments.plotting import Bar, grouped

TITLE = "error of the Gaussian process by profile features, in % of the measured slowdown"

SETS: dict[str, tuple[Callable[[], list[Sample]], Callable[[], Profiles]]] = {
    "v100": (v100.pairs, v100.profiles),
    "a100": (a100.pairs, a100.profiles),
    "a100-matched": (a100.matched, a100.profiles),
    "kace": (kace.samples, kace.profiles),
}
FEATURE_SETS = {
    "latencies": (),
    "+ L2": ("l2_util_pct",),
    "+ DRAM": ("dram_util_pct", "dram_throughput_pct"),
    "+ SM": ("sm_util_pct", "sm_throughput_pct"),
    "+ all": UTILISATION_COLUMNS,
}
SPLITS = 3
MORE_SPLits = 10  # with --full


class Row(msgspec.Struct, frozen=True):
    """Hold errors in percent.

    mean, p90: of absolute errors; coverage: slowdowns at or below the predicted 0.9 quantile.
    """

    data: str
    features: str
    held_out: str
    mean: float | None
    p90: float | None
    coverage: float | None


class Task(msgspec.Struct, frozen=True):
    data: str
    features: str
    splits: int
    seed: int


def run(options: Options) -> list[Row]:
    """Cross-validate each available feature set. profiles: sets of pairs to use."""
    for name in options.profiles:
        if name not in SETS:
            raise ConfigError(f"--profiles {name}: there are {', '.join(SETS)}")
    tasks = [
        Task(name, features, MORE_SPLits if options.full else SPLITS, options.seed)
        for name in options.profiles or SETS
        for features in _available_features(_pairs(name)[1])
    ]
    return [row for rows in run_tasks(rows_of, tasks, options, "fits") for row in rows]


def rows_of(task: Task) -> list[Row]:
    samples, profiles = _pairs(task.data)
    known = {key: _with_features(profile, FEATURE_SETS[task.features]) for key, profile in profiles.items()}
    return [
        Row(task.data, task.features, result.held_out, result.mean, result.p90, result.coverage)
        for result in cross_validate(["gaussian-process"], samples, known, repeats=task.splits, seed=task.seed)
    ]


def _pairs(name: str) -> tuple[list[Sample], Profiles]:
    pairs, profiles = SETS[name]
    return pairs(), profiles()


def _available_features(profiles: Profiles) -> list[str]:
    """List the feature sets of which these profiles have a column."""
    known = {name for profile in profiles.values() for point in profile.points for name in point.features}
    return [features for features, columns in FEATURE_SETS.items() if not columns or known & set(columns)]


def _with_features(profile: Profile, columns: Collection[str]) -> Profile:
    """Return the profile with these columns only."""
    points = [
        msgspec.structs.replace(
            point, features={name: value for name, value in point.features.items() if name in columns}
        )
        for point in profile.points
    ]
    return Profile(profile.model, profile.kind, points)


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(row.held_out, row.data, row.features, "gaussian-process", row.p90) for row in rows if row.p90 is not None
    ]
    grouped(
        path,
        bars,
        lines=[],
        ylabel="90th percentile of the error, %",
        title="error of the Gaussian process by profile features",
        columns=2,
    )
