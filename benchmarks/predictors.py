"""What an answer of a predictor costs: of loads and pairs that it was not asked for before, and of those that it was.

    python -m benchmarks.predictors [--samples 1500]

Fitted to pairs of six made models, whose latencies and whose use of L2 and DRAM differ; the pairs that are asked for
have other batches. First come pairs of which most loads are new; then, as planners ask, some of those loads beside each
other; then the same pairs again. Microseconds of processor time for an answer, the best of 20 rounds, since other work
on the machine can only slow them; and seconds to fit, and to read what was written down. The target is 5 us.
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

NAMES = ("ours", "linear", "analytic", "igniter", "kernels")
BATCHES, SHARES = (1, 2, 4, 8, 16, 32), (200, 400, 500, 600, 800)
ROUNDS, ASKED = 20, 100  # rounds, and pairs in each

T = TypeVar("T")
Runs = Sequence[tuple[Load, tuple[Load, ...]]]


def made_profiles(rng: np.random.Generator) -> Profiles:
    found = {}
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
        found[f"m{i}", "k"] = Profile(f"m{i}", "k", points)
    return found


def made_samples(profiles: Profiles, count: int, rng: np.random.Generator) -> list[Sample]:
    samples = []
    for victim, beside in made_runs(profiles, count, BATCHES, rng):
        alone = profiles[victim.model, "k"].latency(victim.batch, victim.share)
        used = profiles[beside[0].model, "k"].features(beside[0].batch, beside[0].share)
        slowed = 1 + used["l2_util_pct"] / 200 + 0.02 * abs(rng.standard_normal())
        samples.append(Sample(victim, beside, alone, alone * slowed))
    return samples


def made_runs(profiles: Profiles, count: int, batches: Sequence[int], rng: np.random.Generator) -> Runs:
    names = [model for model, _ in profiles]
    found = []
    for _ in range(count):
        victim, beside = rng.choice(names, 2).tolist()
        (one, other), share = rng.choice(batches, 2).tolist(), int(rng.choice(SHARES))
        found.append((Load(victim, "k", one, share), (Load(beside, "k", other, 1000 - share),)))
    return found


def microseconds(ask: Callable[[Load, Sequence[Load]], float], runs: Runs) -> float:
    """For an answer. runs: ROUNDS times ASKED."""
    best = float("inf")
    for i in range(0, len(runs), ASKED):
        start = time.thread_time()
        for victim, beside in runs[i : i + ASKED]:
            ask(victim, beside)
        best = min(best, (time.thread_time() - start) / ASKED)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    profiles = made_profiles(rng)
    samples = made_samples(profiles, given.samples, rng)
    runs = made_runs(profiles, ROUNDS * ASKED, range(1, 33), rng)
    some = runs[: math.isqrt(len(runs)) + 1]
    grid = [(victim, beside) for victim, _ in some for _, beside in some]
    other = [grid[i] for i in rng.permutation(len(grid))[: len(runs)]]
    parts, figures = [], {"samples": float(given.samples)}
    for name in NAMES:
        took, fitted = seconds(partial(fit, name, samples, profiles))
        strange, new, known = (microseconds(fitted.slowdown, asked) for asked in (runs, other, other))
        text = to_json(name, fitted)
        read, _ = seconds(partial(from_json, text, "here"))
        costs = f"{strange:.3g} us, {new:.2g} of loads asked before, {known:.2g} of pairs asked before"
        parts.append(f"{name} {costs} (fitted in {took:.2g} s, read in {read:.2g} s)")
        figures |= {
            f"{name}_strange": strange,
            f"{name}_new": new,
            f"{name}_known": known,
            f"{name}_fit_s": took,
            f"{name}_read_s": read,
        }
    show("predictors", f"{given.samples} samples: " + "; ".join(parts), **figures)


def seconds(make: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    made = make()
    return time.process_time() - start, made


if __name__ == "__main__":
    main()
