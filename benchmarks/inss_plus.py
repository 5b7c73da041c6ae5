"""Measure what `inss-plus` serves of models that its policy has never seen, and how long a decision takes.

    python -m benchmarks.inss_plus [--problems 100] [--loads 0.5 0.8 0.9] [--fleet six|eight|a100] [--seed 0] [--bare]

The policy is trained on generated fleets first (experiments/inss/generated.py), some minutes on one core, unless
build/inss has it. Fleets: six and eight models on four V100s (experiments/inss/cluster.py), ten on four A100s with
gpulet's interference. The plan in force is geometry's. Rates are drawn anew for each problem and scaled to a part of
the largest multiple that is proven possible, by geometry's bound at the least interference that any plan has; what is
served is a fraction of the proven optimum from below. For a tenth of the problems an integer program (HiGHS, 20 s for
each) chooses among the same options of devices, and says what it finds and what it proves of them. Beside it: moves by
gain in the policy's place, and geometry's own plans; `--bare` leaves these out. Targets: 99 %, 5 ms, no violation.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable

import msgspec
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.harness import show
from cotenant.core.plan import Plan
from cotenant.planners import Problem, geometry, load_planner
from cotenant.planners.check import check
from cotenant.planners.inss.device_options import options_of
from cotenant.planners.inss.moves import FEATURES
from cotenant.planners.policy import Policy, layer
from cotenant.planners.rates import at_rates
from cotenant.planners.registry import Planner
from cotenant.planning.study_problems import study_problem
from experiments.inss import cluster
from experiments.inss.trained import PlusTraining, trained_plus

OTHERS_EVERY = 10  # problems
PROGRAM_SECONDS = 20.0
RUNS = 3  # of a decision, of which the median counts: other programs disturb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.9])
    parser.add_argument("--fleet", choices=tuple(FLEETS), default="six")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked, low, high = FLEETS[options.fleet]()
    policy = trained_plus(PlusTraining(seed=options.seed)).policy
    current = geometry.plan(asked)
    options_of(asked)  # made once for a problem, not in a decision
    rng = np.random.default_rng(1000 + options.seed)
    drawn = [dict(zip(asked.rates, rng.uniform(low, high).tolist(), strict=True)) for _ in range(options.problems)]
    bounds = [
        geometry.bound_with_interference(msgspec.structs.replace(at_rates(asked, rates), objective="rate"))
        for rates in drawn
    ]
    for load in options.loads:
        problems = []
        for rates, most in zip(drawn, bounds, strict=True):
            assert most is not None, "there are devices, and models that they serve"
            scaled = {name: load * most * rate for name, rate in rates.items()}
            problems.append(msgspec.structs.replace(at_rates(asked, scaled), policy=policy, current=current))
        _report(options.fleet, load, problems, bare=options.bare)


def _report(fleet: str, load: float, problems: list[Problem], *, bare: bool) -> None:
    planner = load_planner("inss-plus")
    served, seconds, violations = [], [], 0
    gc.collect()
    gc.freeze()  # a collection of all that was prepared is no part of a decision
    for problem in problems:
        runs = [_timed(planner, problem) for _ in range(RUNS)]
        seconds.append(float(np.median([took for _, took in runs])))
        plan = runs[0][0]
        served.append(_served(plan, problem))
        violations += len(check(plan, problem))
    figures = {
        "load": load,
        "served_mean": float(np.mean(served)),
        "served_p05": float(np.quantile(served, 0.05)),
        "served_worst": float(np.min(served)),
        "decision_ms_p50": 1e3 * float(np.median(seconds)),
        "decision_ms_p99": 1e3 * float(np.quantile(seconds, 0.99)),
        "violations": float(violations),
    }
    said = (
        f"{len(problems)} problems at {load:g} of the bound, served: {100 * figures['served_mean']:.2f} % on average,"
        f" {100 * figures['served_p05']:.2f} % in the worst twentieth, {100 * figures['served_worst']:.2f} % in the"
        f" worst; decisions take {figures['decision_ms_p50']:.2f} ms CPU, at p99 {figures['decision_ms_p99']:.2f};"
        f" {violations} violations"
    )
    if not bare:
        others = _others(problems, served)
        figures |= others
        said += (
            f"; by gain in the policy's place {100 * others['by_gain_mean']:.2f} %, geometry in a second"
            f" {100 * others['geometry_mean']:.2f} %; {100 * others['over_program_mean']:.2f} % of what an integer"
            f" program finds among the same options ({100 * others['program_mean']:.2f} %, and at most"
            f" {100 * others['program_bound_mean']:.2f} %)"
        )
    show(f"inss_plus_{fleet}", said, **figures)


def _others(problems: list[Problem], served: list[float]) -> dict[str, float]:
    """Return what others serve of the same problems, geometry and the integer program of some of them."""
    planner, some = load_planner("inss-plus"), slice(None, None, OTHERS_EVERY)
    greedy = [_served(planner(msgspec.structs.replace(p, policy=_by_gain())), p) for p in problems]
    programs = [_best_of_options(problem) for problem in problems[some]]
    return {
        "by_gain_mean": float(np.mean(greedy)),
        "geometry_mean": float(np.mean([_served(geometry.plan(problem), problem) for problem in problems[some]])),
        "over_program_mean": float(np.mean([s / found for s, (found, _) in zip(served[some], programs, strict=True)])),
        "program_mean": float(np.mean([found for found, _ in programs])),
        "program_bound_mean": float(np.mean([proven for _, proven in programs])),
    }


def _timed(planner: Planner, problem: Problem) -> tuple[Plan, float]:
    begun = time.process_time()
    plan = planner(problem)
    return plan, time.process_time() - begun


def _served(plan: Plan, problem: Problem) -> float:
    return 1 - sum(plan.unserved.values()) / sum(problem.rates.values())


def _best_of_options(problem: Problem) -> tuple[float, float]:
    """Return the part of the rates that the best options of the devices serve, as far as it is found, and as far as it
    is proven of them."""
    options, (kind,) = options_of(problem), problem.fleet
    assert kind.count is not None, "the fleets have counts"
    rates = np.array([problem.rates[model.name] for model in problem.models])
    count, models = options.capacities.shape
    # How many devices have each option, and the requests/s that are served of each model.
    result = milp(
        np.concatenate([np.zeros(count), -np.ones(models)]),
        constraints=[
            LinearConstraint(np.hstack([-options.capacities.T, np.eye(models)]), -np.inf, 0.0),
            LinearConstraint(np.concatenate([np.ones(count), np.zeros(models)])[None], -np.inf, kind.count),
        ],
        integrality=np.concatenate([np.ones(count), np.zeros(models)]),
        bounds=Bounds(0.0, np.concatenate([np.full(count, kind.count), rates])),
        options={"time_limit": PROGRAM_SECONDS, "mip_rel_gap": 1e-4},
    )
    return float(-result.fun / rates.sum()), float(min(1.0, -result.mip_dual_bound / rates.sum()))


@functools.cache
def _by_gain() -> Policy:
    """Return a policy that makes the first move offered, which is the one that serves most at once."""
    weights = np.array([[-1.0 if name == "rank" else 0.0] for name in FEATURES])
    return Policy(planner="inss-plus", updates=1, seed=0, features=FEATURES, layers=(layer(weights, np.zeros(1)),))


Drawn = tuple[Problem, list[float], list[float]]


def _roles(models: tuple[str, ...]) -> Drawn:
    asked = cluster.problem(models)
    return asked, cluster.scaled(asked, "low"), cluster.scaled(asked, "high")


def _a100() -> Drawn:
    """Return the study's problem on four devices, at a quarter to all of its rates."""
    asked = study_problem("a100/steady", 0)
    asked = msgspec.structs.replace(asked, fleet=(msgspec.structs.replace(asked.fleet[0], count=4),))
    rates = list(asked.rates.values())
    return asked, [0.25 * rate for rate in rates], rates


FLEETS: dict[str, Callable[[], Drawn]] = {
    "six": lambda: _roles(cluster.SIX),
    "eight": lambda: _roles(cluster.EIGHT),
    "a100": _a100,
}


if __name__ == "__main__":
    main()
