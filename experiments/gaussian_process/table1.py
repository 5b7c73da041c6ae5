"""What the columns of a profile are worth to `ours`: its error with none of them, with each kind, and with all.

A profile always has latencies, and names are known of models that were measured beside others. How much of the L2
cache, of memory bandwidth and of the multiprocessors a model uses alone is for whoever has counters.
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
from experiments.data import a100, kace, v100
from experiments.parallel import Options, spread
from experiments.plotting import Bar, grouped

TITLE = "error of ours by what profiles tell of models, in % of what was measured"

SETS: dict[str, tuple[Callable[[], list[Sample]], Callable[[], Profiles]]] = {
    "v100": (v100.pairs, v100.profiles),
    "a100": (a100.pairs, a100.profiles),
    "a100-matched": (a100.matched, a100.profiles),
    "kace": (kace.samples, kace.profiles),
}
TOLD = {
    "latencies": (),
    "+ L2": ("l2_util_pct",),
    "+ DRAM": ("dram_util_pct", "dram_throughput_pct"),
    "+ SM": ("sm_util_pct", "sm_throughput_pct"),
    "+ all": UTILISATION_COLUMNS,
}
SPLITS = 3
MORE_SPLITS = 10  # with --full


class Row(msgspec.Struct, frozen=True):
    """In percent. mean, p90: of the error's size. coverage: slowdowns that do not exceed the quantile 0.9."""

    data: str
    told: str
    held_back: str
    mean: float | None
    p90: float | None
    coverage: float | None


class Task(msgspec.Struct, frozen=True):
    data: str
    told: str
    splits: int
    seed: int


def run(options: Options) -> list[Row]:
    """profiles: which sets of pairs."""
    for name in options.profiles:
        if name not in SETS:
            raise ConfigError(f"--profiles {name}: there are {', '.join(SETS)}")
    tasks = [
        Task(name, told, MORE_SPLITS if options.full else SPLITS, options.seed)
        for name in options.profiles or SETS
        for told in _tellable(_pairs(name)[1])
    ]
    return [row for rows in spread(rows_of, tasks, options, "fits") for row in rows]


def rows_of(task: Task) -> list[Row]:
    samples, profiles = _pairs(task.data)
    known = {key: _telling(profile, TOLD[task.told]) for key, profile in profiles.items()}
    return [
        Row(task.data, task.told, it.held_out, it.mean, it.p90, it.coverage)
        for it in cross_validate(["ours"], samples, known, repeats=task.splits, seed=task.seed)
    ]


def _pairs(name: str) -> tuple[list[Sample], Profiles]:
    pairs, profiles = SETS[name]
    return pairs(), profiles()


def _tellable(profiles: Profiles) -> list[str]:
    """What of TOLD these profiles have."""
    known = {name for profile in profiles.values() for point in profile.points for name in point.features}
    return [told for told, columns in TOLD.items() if not columns or known & set(columns)]


def _telling(profile: Profile, columns: Collection[str]) -> Profile:
    """With these columns alone."""
    points = [
        msgspec.structs.replace(point, features={name: it for name, it in point.features.items() if name in columns})
        for point in profile.points
    ]
    return Profile(profile.model, profile.kind, points)


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar(row.held_back, row.data, row.told, "ours", row.p90) for row in rows if row.p90 is not None]
    grouped(path, bars, lines=[], ylabel="90th percentile of the error, %", title="what ours is told", columns=2)
