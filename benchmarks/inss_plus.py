"""Measure what `inss-plus` serves at rates that its policy was not trained at, and how long a decision takes.

    python -m benchmarks.inss_plus [--problems 200] [--load 0.8] [--seed 0]

Six models on four V100s (experiments/inss/cluster.py); the policy is trained first, minutes on one core, unless
build/inss has it. Rates are drawn anew for each problem and scaled to a part of the largest multiple that geometry's
bound allows, so that all of them may be served: what is served is then a fraction of the proven optimum from below. The
plan in force is geometry's for the rates at which InSS' evaluation starts. Targets: 99 %, 5 ms, no violation.
"""

from __future__ import annotations

import argparse
import time

import msgspec
import numpy as np

from benchmarks.harness import show
from cotenant.core.plan import Plan
from cotenant.planners import geometry, load_planner
from cotenant.planners.check import check
from cotenant.planners.rates import at_rates
from experiments.inss import cluster
from experiments.inss.trained import Training, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = cluster.problem()
    policy = trained(Training(seed=options.seed, planner="inss-plus")).policy
    current = geometry.plan(asked)
    planner = load_planner("inss-plus")
    rng = np.random.default_rng(1000 + options.seed)
    low, high = (np.array(cluster.scaled(asked, which)) for which in ("low", "high"))
    served, seconds, violations, acted = [], [], 0, 0
    for _ in range(options.problems):
        rates = dict(zip(asked.rates, rng.uniform(low, high).tolist(), strict=True))
        most = geometry.bound(msgspec.structs.replace(at_rates(asked, rates), objective="rate"))
        assert most is not None, "there are devices, and models that they serve"
        rates = {name: options.load * most * rate for name, rate in rates.items()}
        problem = msgspec.structs.replace(at_rates(asked, rates), policy=policy, current=current)
        begun = time.process_time()
        plan = planner(problem)
        seconds.append(time.process_time() - begun)
        served.append(1 - sum(plan.unserved.values()) / sum(rates.values()))
        violations += len(check(plan, problem))
        acted += plan.devices_used != current.devices_used or _shares(plan) != _shares(current)
    figures = {
        "served_mean": float(np.mean(served)),
        "served_p05": float(np.quantile(served, 0.05)),
        "all_served": float(np.mean(np.array(served) > 1 - 1e-9)),
        "acted": acted / options.problems,
        "decision_ms_p50": 1e3 * float(np.median(seconds)),
        "decision_ms_p99": 1e3 * float(np.quantile(seconds, 0.99)),
        "violations": float(violations),
    }
    show(
        "inss_plus",
        f"{options.problems} problems at {options.load:g} of the bound, served: {100 * figures['served_mean']:.2f} % on"
        f" average, {100 * figures['served_p05']:.1f} % in the worst twentieth, all in"
        f" {100 * figures['all_served']:.0f} %; other shares in {100 * figures['acted']:.0f} %; decisions take"
        f" {figures['decision_ms_p50']:.2f} ms CPU, at p99 {figures['decision_ms_p99']:.2f}; {violations} violations",
        **figures,
    )


def _shares(plan: Plan) -> list[int]:
    return [partition.share for device in plan.devices for partition in device.partitions]


if __name__ == "__main__":
    main()
