"""Score geometry's plans against their proven bounds, on problems that nothing was chosen by.

    python -m benchmarks.planner_gap [--small 200] [--mixed 100] [--seed 1] [--time-limit S] [--results FILE]
        [--seconds S]

Small: random problems of four devices with published profiles (`benchmarks.geometry.random_problem`), the largest
multiple of the rates. Mixed: priced fleets of 10 to 1,000 devices of two or three kinds
(`benchmarks.planner_problems.mixed_fleets`), the least cost.

Plans and bounds are of one world, evenly spaced requests (`arrivals = "even"`): no part of a gap is the price of
random arrivals, for which `cotenant.planning` makes room in plans afterwards. No clock ends a search, so results do not
depend on the machine. --time-limit is that of each plan, which counts its work up to half of it.

Each problem is one line of the results file, which is continued where an earlier run stopped; --seconds ends a run
after so long. The process is niced. The gap is relative to the bound: of the multiple from below, of the cost from
above; it has no meaning where a plan leaves rates unserved, which are counted apart. Seconds are CPU time; memory is
the peak of the process so far. `one model each` is the integer program of `planner_problems.one_model_each`, to tell a
loose bound from a bad plan: no plan should cost more. It only adds up the shares of a kind's devices, so an answer of
it may fit no whole devices: one below the proven bound does not, and is counted apart.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.geometry import random_problem
from benchmarks.harness import former_results, keep_result, show
from benchmarks.planner_problems import mixed_fleets, one_model_each, problem
from cotenant.core.plan import Plan
from cotenant.planners import Problem, portfolio
from cotenant.planners.candidates import objective_value
from cotenant.planners.check import check
from cotenant.published import a100, v100

SMALL_DEVICES = 4
GOAL_MEAN, GOAL_WORST = 0.01, 0.03
SHOWN = 5  # problems with the largest gaps that are named
ONE_MODEL_SECONDS = 2.0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result for one problem.

    value: of the objective; gap: relative to the bound, None where rates are unserved or there is no bound; unserved:
    fraction of all requests; one_model_each: cost of that program's plan; seconds: CPU time; mib: peak of the process.
    """

    set: str
    number: int
    seed: int
    models: int
    devices: int
    value: float
    bound: float | None
    gap: float | None
    unserved: float
    faults: int
    proven: str | None
    source: str
    seconds: float
    mib: float
    one_model_each: float | None = None


def small_problems(count: int, seed: int) -> Iterator[Problem]:
    known = [(v100.profiles(), 4), (a100.profiles(), 9)]
    for n in range(count):
        profiles, most = known[n % 2]
        yield random_problem(np.random.default_rng([seed, n]), profiles, most, SMALL_DEVICES)


def scored(name: str, number: int, seed: int, asked: Problem, *, rival: bool) -> Score:
    """Plan, and compare with the bound. rival: also solve the program of one model a partition."""
    began = time.process_time()
    plan = portfolio.plan(asked)
    seconds = time.process_time() - began
    unserved = sum(plan.unserved.values()) / sum(asked.rates.values()) if asked.objective == "devices" else 0.0
    other = one_model_each(asked, ONE_MODEL_SECONDS).cost if rival else None
    return Score(
        set=name,
        number=number,
        seed=seed,
        models=len(asked.models),
        devices=sum(kind.count or 0 for kind in asked.fleet),
        value=objective_value(plan),
        bound=plan.bound,
        gap=_gap(plan),
        unserved=unserved,
        faults=len(check(plan, asked)),
        proven=plan.provenance.proven if plan.provenance else None,
        source=plan.provenance.source if plan.provenance else plan.planner,
        seconds=seconds,
        mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        one_model_each=other,
    )


def _gap(plan: Plan) -> float | None:
    if not plan.bound or (plan.objective == "devices" and plan.unserved):
        return None
    ratio = objective_value(plan) / plan.bound
    return max(0.0, 1 - ratio if plan.objective == "rate" else ratio - 1)


def summarise(scores: Sequence[Score], name: str, *, as_json: bool) -> None:
    """Print what the problems of one set come to, and those with the largest gaps."""
    own = [score for score in scores if score.set == name]
    gaps = [score.gap for score in own if score.gap is not None]
    if not gaps:
        return
    short = [score for score in own if score.unserved > 0]
    above = sum(gap > GOAL_WORST for gap in gaps)
    dearer = [
        score for score in own if score.one_model_each is not None and score.value > score.one_model_each * 1.000001
    ]
    no_plans = sum(score.one_model_each < (score.bound or 0.0) * 0.999999 for score in dearer if score.one_model_each)
    seconds = [score.seconds for score in own]
    proven = sum(score.proven == "optimal" for score in own)
    memory, faults = max(score.mib for score in own), sum(score.faults for score in own)
    text = [
        f"mean {np.mean(gaps):.2%}, median {np.median(gaps):.2%}, worst {max(gaps):.2%}",
        f"{above} above {GOAL_WORST:.0%}",
        f"{len(short)} leave rates unserved",
        f"{proven} proven optimal",
        f"{len(dearer)} dearer than one model each, of which {no_plans} are below the bound: proven to be no plans",
        f"{faults} faults",
        f"{np.mean(seconds):.2f} s on average, {max(seconds):.2f} s at worst",
        f"{memory:.0f} MiB",
    ]
    show(
        f"planner gap, {len(own)} {name} problems",
        "; ".join(text),
        mean=float(np.mean(gaps)),
        worst=max(gaps),
        above=above,
        unserved=len(short),
        seconds=float(np.mean(seconds)),
        longest=max(seconds),
        goals=bool(np.mean(gaps) <= GOAL_MEAN and not above),
    )
    for score in () if as_json else sorted(own, key=lambda score: -(score.gap or 0.0))[:SHOWN]:
        print(
            f"  {name} {score.number}: {score.models} models, {score.devices} devices, {score.value:.4g} for a bound of"
            f" {score.bound or 0:.4g} ({score.gap or 0:.2%}), one model each {score.one_model_each or 0:.4g},"
            f" {score.source}, {score.seconds:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=200, help="random problems of four devices")
    parser.add_argument("--mixed", type=int, default=100, help="mixed priced fleets")
    parser.add_argument("--seed", type=int, default=1, help="random seed of both sets")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds, of which each plan may take half")
    parser.add_argument("--results", type=Path, help="file of results, continued where it exists")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    options = parser.parse_args()
    os.nice(10)
    scores = former_results(options.results, Score)
    done = {(score.set, score.number, score.seed) for score in scores}
    end = time.monotonic() + options.seconds
    for name, number, asked in _problems(options.small, options.mixed, options.seed, done):
        if time.monotonic() > end:
            break
        asked = msgspec.structs.replace(asked, arrivals="even", time_limit=options.time_limit)
        score = scored(name, number, options.seed, asked, rival=name == "mixed")
        scores.append(score)
        keep_result(options.results, score)
    for name in ("small", "mixed"):
        summarise([score for score in scores if score.seed == options.seed], name, as_json=options.json)


def _problems(small: int, mixed: int, seed: int, done: set[tuple[str, int, int]]) -> Iterator[tuple[str, int, Problem]]:
    """Yield the problems that are not done yet, of both sets in turns, so that a short run has some of each."""
    recipes = mixed_fleets(mixed, seed)
    every = max(1, small // mixed) if mixed else 1
    for n, asked in enumerate(small_problems(small, seed)):
        if ("small", n, seed) not in done:
            yield "small", n, asked
        at = n // every
        if n % every == 0 and at < mixed and ("mixed", at, seed) not in done:
            yield "mixed", at, problem(recipes[at])
    for at in range(-(-small // every), mixed):
        if ("mixed", at, seed) not in done:
            yield "mixed", at, problem(recipes[at])


if __name__ == "__main__":
    main()
