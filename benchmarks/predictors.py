"""Measure the CPU time of a prediction, for new and for cached loads and pairs.

    python -m benchmarks.predictors [--samples 1500]

Predictors are fitted to pairs of six synthetic models that differ in latency and in use of L2 and DRAM; the predicted
pairs have other batches. First, pairs with mostly new loads; then, as in planning, known loads in new pairs; then the
same pairs again. CPU microseconds per prediction, best of 20 rounds, since other work on the machine can only slow them
down; and seconds to fit, and to read the fitted predictor. Target: 5 us.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks.harness import show
from cotenant.core.profile import Point, Profile, Profiles
from cotenant.predictors import Load
from cotenant.predictors.fitting import fit, from_json, to_json
from cotenant.predictors.samples import Sample

NAMES = ("gaussian-process", "linear", "analytic", "igniter", "kernels")
BATCHES, SHARES = (1, 2, 4, 8, 16, 32), (200, 400, 500, 600, 800)
ROUNDS, PAIRS = 20, 100  # rounds, and pairs in each

T = TypeVar("T")
Runs = Sequence[tuple[Load, tuple[Load, ...]]]


def made_profiles(rng: np.random.Generator) -> Profiles:
    """Return profiles of six synthetic models."""
    profiles = {}
    for i in range(6):
        fixed, work, use = 10 ** rng.uniform(-3, -2), 10 ** rng.uniform(-3.5, -2.5), rng.uniform(5, 60, 2)
        points = [
            Point(
                share=share,
                batch=batch,
                latency=fixed + work * batch * 1000 / share,
                memory=1,
                features=dict(zip(("l2_util_pct", "dram_util_pct"), (use * batch / (batch + 4)).tolist(), strict=True)),
            )
            for share in SHARES
            for batch in BATCHES
        ]
        profiles[f"m{i}", "k"] = Profile(f"m{i}", "k", points)
    return profiles


def made_samples(profiles: Profiles, count: int, rng: np.random.Generator) -> list[Sample]:
    """Return co-located samples of synthetic models."""
    samples = []
    for victim, colocated in made_runs(profiles, count, BATCHES, rng):
        alone = profiles[victim.model, "k"].latency(victim.batch, victim.share)
        used = profiles[colocated[0].model, "k"].features(colocated[0].batch, colocated[0].share)
        slowed = 1 + used["l2_util_pct"] / 200 + 0.02 * abs(rng.standard_normal())
        samples.append(Sample(victim, colocated, alone, alone * slowed))
    return samples


def made_runs(profiles: Profiles, count: int, batches: Sequence[int], rng: np.random.Generator) -> Runs:
    """Return random pairs of loads."""
    names = [model for model, _ in profiles]
    runs = []
    for _ in range(count):
        victim, colocated = rng.choice(names, 2).tolist()
        (one, other), share = rng.choice(batches, 2).tolist(), int(rng.choice(SHARES))
        runs.append((Load(victim, "k", one, share), (Load(colocated, "k", other, 1000 - share),)))
    return runs


def microseconds(predict: Callable[[Load, Sequence[Load]], float], runs: Runs) -> float:
    """Return CPU microseconds per prediction. runs: ROUNDS times PAIRS."""
    best = float("inf")
    for i in range(0, len(runs), PAIRS):
        start = time.thread_time()
        for victim, colocated in runs[i : i + PAIRS]:
            predict(victim, colocated)
        best = min(best, (time.thread_time() - start) / PAIRS)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    profiles = made_profiles(rng)
    samples = made_samples(profiles, given.samples, rng)
    runs = made_runs(profiles, ROUNDS * PAIRS, range(1, 33), rng)
    some = runs[: math.isqrt(len(runs)) + 1]
    grid = [(victim, colocated) for victim, _ in some for _, colocated in some]
    other = [grid[i] for i in rng.permutation(len(grid))[: len(runs)]]
    parts, figures = [], {"samples": float(given.samples)}
    for name in NAMES:
        took, fitted = seconds(partial(fit, name, samples, profiles))
        new_loads, new_pairs, cached = (microseconds(fitted.slowdown, pairs) for pairs in (runs, other, other))
        text = to_json(name, fitted)
        read, _ = seconds(partial(from_json, text, "here"))
        costs = f"{new_loads:.3g} us, {new_pairs:.2g} for known loads, {cached:.2g} for known pairs"
        parts.append(f"{name} {costs} (fitted in {took:.2g} s, read in {read:.2g} s)")
        figures |= {
            f"{name}_new_loads": new_loads,
            f"{name}_new_pairs": new_pairs,
            f"{name}_cached": cached,
            f"{name}_fit_s": took,
            f"{name}_read_s": read,
        }
    show("predictors", f"{given.samples} samples: " + "; ".join(parts), **figures)


def seconds(make: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    made = make()
    return time.process_time() - start, made


if __name__ == "__main__":
    main()
