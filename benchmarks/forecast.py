"""Measure the forecast of plans: calls per second, and its error against the simulator.

    python -m benchmarks.forecast [--simulate 30]

Random plans of nine models on four devices, about a dozen placements. Cold: rates differ in each call, so nothing is
cached; warm: the same calls again. Best of three rounds, since other work on the machine can only slow them down. With
`--simulate N`, N plans are also simulated with 100,000 requests each, and attainments compared, of models with at least
2,000 requests and of whole plans. Target: no error above 5 percentage points.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from benchmarks.harness import show
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Point, Profile
from cotenant.planners import Problem, load_planner
from cotenant.planners.forecast import forecast
from cotenant.sim.run import simulate

PLANS = 40
FAR = 5.0  # points of attainment
CUTS = tuple(range(50, 1001, 50))
BATCHES = (1, 2, 4, 8, 16, 32)


def random_problem(rng: np.random.Generator) -> Problem:
    """Return models whose speeds differ by up to 30 times, with SLOs of 2 to 4 times a batch on half a device."""
    models, rates, profiles = [], {}, {}
    batches = BATCHES[: rng.integers(3, 7)]
    for i in range(9):
        name = f"m{i}"
        fixed, work, bend = 10 ** rng.uniform(-3.3, -1.7), 10 ** rng.uniform(-3.7, -1.9), rng.choice((0.0, 0.3, 0.6))
        latency = {(s, b): (fixed + work * b) * (bend + (1 - bend) * 1000 / s) for s in CUTS for b in batches}
        points = [Point(share=s, batch=b, latency=seconds, memory=1) for (s, b), seconds in latency.items()]
        profiles[name, "k"] = Profile(name, "k", points)
        models.append(Model(name=name, slo=latency[500, batches[rng.integers(1, len(batches))]] * rng.uniform(2, 4)))
        rates[name] = batches[-1] / latency[1000, batches[-1]] * rng.uniform(0.05, 0.25)
    return Problem(models=tuple(models), rates=rates, fleet=(Kind(name="k", count=4, cuts=CUTS),), profiles=profiles)


def random_plans(count: int) -> Iterator[tuple[Plan, Problem]]:
    """Yield plans with rates of 0.7 to 1.1 times those they were made for."""
    rng = np.random.default_rng(0)
    while count:
        problem = random_problem(rng)
        planner = load_planner(str(rng.choice(["elastic", "squishy"])))
        for _ in range(12):
            plan = planner(problem)
            if not plan.unserved:
                yield plan, at(problem, float(rng.uniform(0.7, 1.1)))
                count -= 1
                break
            problem = at(problem, 0.75)


def at(problem: Problem, factor: float) -> Problem:
    """Return the problem with all rates multiplied."""
    return msgspec.structs.replace(problem, rates={name: rate * factor for name, rate in problem.rates.items()})


def calls_a_second(plans: list[tuple[Plan, Problem]], next_rates: Callable[[Problem, int], Problem]) -> float:
    """Return calls per CPU-second, best of three rounds."""
    best = 0.0
    for turn in range(3):
        calls = [(plan, next_rates(problem, turn)) for plan, problem in plans]
        start = time.thread_time()
        for plan, problem in calls:
            forecast(plan, problem)
        best = max(best, len(calls) / (time.thread_time() - start))
    return best


def differences(plans: list[tuple[Plan, Problem]]) -> tuple[list[float], list[float], list[float]]:
    """Return forecast minus simulated attainment.

    Of models with lanes of their own, of models that share one, and of all requests of each plan.
    """
    own: list[float] = []
    shared: list[float] = []
    whole: list[float] = []
    for plan, problem in plans:
        expected = forecast(plan, problem).models
        sharing = {p.model for _, partition, p in plan.placements() if len(partition.placements) > 1}
        total, requests = 0.0, 0
        for seen in simulate(plan, problem, seconds=100_000 / sum(problem.rates.values()), seed=1).models:
            if seen.attainment is not None:
                difference, count = expected[seen.model].attainment - seen.attainment, sum(seen.outcomes.values())
                total, requests = total + count * difference, requests + count
                if count >= 2000:
                    (shared if seen.model in sharing else own).append(difference)
        whole.append(total / requests)
    return own, shared, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    plans = list(random_plans(max(PLANS, given.simulate)))
    placements = sum(len(list(plan.placements())) for plan, _ in plans) / len(plans)
    for plan, problem in plans:
        forecast(plan, problem)
    cold = calls_a_second(plans, lambda problem, turn: at(problem, 1 + 1e-6 * (turn + 1)))
    warm = calls_a_second(plans, lambda problem, _: problem)
    text = f"{cold:,.0f} calls/s cold, {warm:,.0f} warm ({len(plans)} plans of {placements:.1f} placements)"
    figures = {"cold": cold, "warm": warm, "placements": placements}
    if given.simulate:
        for name, errors in zip(
            ("own lanes", "shared lanes", "whole plans"), differences(plans[: given.simulate]), strict=True
        ):
            points = 100 * np.array(errors)
            far = int((np.abs(points) > FAR).sum())
            text += (
                f"; {name}: {np.abs(points).mean():.2f} points mean"
                f" error, {points.min():+.1f} to {points.max():+.1f}, {far} above {FAR:g}"
                f" (of {len(points)})"
            )
            figures |= {
                f"{name.split()[0]}_mean": float(np.abs(points).mean()),
                f"{name.split()[0]}_most": float(np.abs(points).max()),
                f"{name.split()[0]}_far": far,
            }
    show("forecast", text, **figures)


if __name__ == "__main__":
    main()
