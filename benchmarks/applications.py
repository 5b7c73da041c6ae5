"""Measure the time to split SLOs of applications over stages, and the error of their forecast.

    python -m benchmarks.applications [--problems 40] [--planner elastic]

Random graphs of two to four stages over two to five models, fan-outs fixed or drawn, at 2 to 40 requests/s on at most
six devices. Each plan is simulated for two minutes at the rates that it was made for.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.harness import show
from cotenant.core.application import Application, Choice, Fanout, Fixed, Poisson, Stage
from cotenant.core.model import Kind, Model
from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.forecast import forecast
from cotenant.planners.portfolio import choose_planner
from cotenant.planners.slo_budget import split_slo_budgets
from cotenant.planning import plan as plan_problem
from cotenant.sim.run import simulate

CUTS = (100, 200, 300, 400, 500, 600, 800, 1000)
BATCHES = (1, 2, 4, 8, 16)
FANOUTS: tuple[Fanout, ...] = (Fixed(1), Fixed(2), Poisson(1.3), Choice((0, 1, 3), (0.3, 0.4, 0.3)))
SECONDS = 120.0
NEAR = 5.0  # points of attainment


def random_problem(rng: np.random.Generator) -> Problem:
    """Return a problem with one application; four of five stages follow one or two earlier ones."""
    names = [f"m{i}" for i in range(rng.integers(2, 6))]
    profiles = {}
    for name in names:
        fixed, work = rng.uniform(0.001, 0.01), rng.uniform(0.0005, 0.008)
        latency = {(s, b): (fixed + work * b) * 1000 / s for s in CUTS for b in BATCHES}
        points = [Point(share=s, batch=b, latency=seconds, memory=1) for (s, b), seconds in latency.items()]
        profiles[name, "k"] = Profile(name, "k", points)
    stages: list[Stage] = []
    for i in range(rng.integers(2, 5)):
        count = min(i, int(rng.integers(1, 3))) if rng.random() < 0.8 else 0
        after = tuple(stages[n].name for n in rng.choice(i, size=count, replace=False)) if count else ()
        fanout = FANOUTS[rng.integers(len(FANOUTS))]
        stages.append(Stage(name=f"s{i}", model=str(rng.choice(names)), after=after, fanout=fanout))
    application = Application(name="app", slo=rng.uniform(0.2, 1.0), stages=tuple(stages))
    return Problem(
        models=tuple(Model(name=name, slo=1.0) for name in names),
        rates={"app": rng.uniform(2, 40)},
        fleet=(Kind(name="k", count=6, cuts=CUTS),),
        profiles=profiles,
        applications=(application,),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--planner", default="elastic")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rng = np.random.default_rng(1)
    split, planning, errors, violated = 0.0, 0.0, [], 0
    for _ in range(given.problems):
        problem = random_problem(rng)
        begun = time.perf_counter()
        try:
            parts = split_slo_budgets(choose_planner(given.planner).plan, problem)
        except PlanError:
            continue  # no split meets the SLO
        done = time.perf_counter()
        plan_problem(without_applications(problem, parts), given.planner, validate=False)
        split, planning = split + done - begun, planning + time.perf_counter() - done
        plan = plan_problem(problem, given.planner, validate=False)
        if plan.unserved:
            continue
        expected = forecast(plan, problem).applications["app"].attainment
        (seen, *_) = simulate(plan, problem, seconds=SECONDS).models
        if seen.attainment is not None:
            errors.append(100 * (expected - seen.attainment))
            violated += not seen.slo_met
    points = np.array(errors)
    near = int((np.abs(points) <= NEAR).sum())
    took = [seconds / given.problems * 1e3 for seconds in (split, planning)]
    text = (
        f"{given.planner}: split in {took[0]:.0f} ms, planned in {took[1]:.0f} ms; forecast {points.min():+.1f} to"
        f" {points.max():+.1f} points from the simulator, {near} of {len(points)} within {NEAR:g};"
        f" {violated} plans rejected by validation"
    )
    show("applications", text, split_ms=took[0], near=near, plans=len(points), rejected=violated)


if __name__ == "__main__":
    main()
