"""How soon is a doubled rate proven, and how often does chance alone look like a risen one?

    python -m benchmarks.rate_changes [--hours 200] [--runs 1000] [--rates 9 37 43 100] [--json]

Counts of Poisson arrivals in intervals of half a second, as a controller observes them, and nothing else: no server, no
simulator, no plan. Per rate in requests/s:

- false: how often an hour a constant rate seems to have risen, by a fifth or more, so surely that a plan is looked for,
  and so surely that a plan is gone over to;
- doubled: seconds from a doubling until either, after 16 s of the rate before.

Target: of nine models over 100 hours, none is gone over to.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.harness import show
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.model_watch import ModelWatch

PERIOD = 0.5  # seconds between two observations
AHEAD = 1.0  # seconds until a plan is in force
BEFORE = 16.0  # seconds of the rate that doubles
WITHIN = 30.0  # seconds in which a doubling is seen
APART = 60.0  # seconds between two false alarms that are not the same
OPTIONS = ControllerOptions()
THRESHOLDS = (OPTIONS.suspected_threshold, OPTIONS.changed_threshold)


def rises(counts: list[int], limit: float) -> list[list[bool]]:
    """Return for each threshold whether the rate seems to have risen beyond a limit, after each count."""
    watch, seen = ModelWatch(OPTIONS), []
    for count in counts:
        watch.observe_arrivals(count, PERIOD, AHEAD)
        estimate = watch.estimate
        beyond = estimate.rate > limit
        seen.append([beyond and estimate.rose(threshold, OPTIONS.idle_rate) for threshold in THRESHOLDS])
    return [list(each) for each in zip(*seen, strict=True)]


def false_alarms(rate: float, hours: int, seed: int) -> list[float]:
    """Return how often an hour a constant rate seems to have risen, by threshold."""
    counts = np.random.default_rng(seed).poisson(rate * PERIOD, round(hours * 3600 / PERIOD)).tolist()
    alarms = []
    for each in rises(counts, OPTIONS.headroom * rate):
        times = np.flatnonzero(each) * PERIOD
        alarms.append((min(len(times), 1) + int(np.sum(np.diff(times) > APART))) / hours)
    return alarms


def delays(rate: float, runs: int, seed: int) -> list[list[float]]:
    """Return the seconds from a doubling until it is seen, by threshold. It comes at any moment of an interval."""
    seen: list[list[float]] = [[] for _ in THRESHOLDS]
    for run in range(runs):
        rng = np.random.default_rng([seed, run])
        first = rng.random() * PERIOD  # of the doubled rate in the interval in which it begins
        means = [rate * PERIOD] * round(BEFORE / PERIOD) + [rate * PERIOD + rate * first]
        means += [2 * rate * PERIOD] * round(WITHIN / PERIOD)
        known = round(BEFORE / PERIOD)
        for times, each in zip(seen, rises(rng.poisson(means).tolist(), OPTIONS.headroom * rate), strict=True):
            times.append(each[known:].index(True) * PERIOD + first)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=int, default=200)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rates", type=float, nargs="+", default=[9.0, 37.0, 43.0, 100.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for rate in options.rates:
        alarms = false_alarms(rate, options.hours, options.seed)
        doubled = delays(rate, options.runs, options.seed)
        for name, threshold, often, times in zip(
            ("looked for", "gone over to"), THRESHOLDS, alarms, doubled, strict=True
        ):
            median, most = np.quantile(times, [0.5, 0.95]).tolist()
            show(
                f"{rate:g}/s, a plan is {name}",
                f"beyond e^{threshold:g}: by chance {often:.3f} times an hour; a doubling after {median:.2f} s, in "
                f"95 % of cases {most:.2f}",
                false_per_hour=often,
                median_s=median,
                p95_s=most,
            )


if __name__ == "__main__":
    main()
