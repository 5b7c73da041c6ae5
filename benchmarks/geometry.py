"""Measure geometry: gap to its bound, planning time, and comparison with all other planners.

    python -m benchmarks.geometry [--problems 200] [--devices 4 100] [--large 1000 10000] [--rivals 40]

Random problems with published profiles (`cotenant.published`), alternating between two to four models on V100s and
three to nine on A100s; SLOs of 1 to 2 times the papers' rule, twice the latency of a batch of 32 on the whole device;
log-normal rates; objective: the largest multiple of the rates on a number of devices. Large problems: 100 models with
the A100's profiles scaled in speed, on three kinds of device, at 60 % of the largest rates that all devices serve.
Rivals: devices that other planners need at the rates that geometry serves on the smallest fleet, and at fractions.

Seconds are CPU time. Memory is the peak of the process; large problems run first.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.harness import show
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile, Profiles
from cotenant.core.units import WHOLE
from cotenant.planners import BASELINES, PLANNERS, Problem, geometry, load_planner, portfolio
from cotenant.planners.check import check
from cotenant.published import a100, v100

Answer = TypeVar("Answer")

CUTS = (200, 400, 500, 600, 800, 1000)
RULE = 32  # rows of the batch of the SLO rule
PARTS = (0.5, 0.9, 1.01, 1.1)  # fractions of the multiple that geometry serves
SPEEDS = {"large": (1.0, 4.1), "middle": (0.55, 2.0), "small": (0.3, 1.2)}  # relative to an A100; price per hour
MODELS = 100


def random_problem(rng: np.random.Generator, known: Profiles, most: int, devices: int) -> Problem:
    """Return a problem with up to `most` of the models measured on one kind."""
    names = sorted(name for name, _ in known)
    chosen = rng.permutation(names)[: rng.integers(min(3, most // 2), most + 1)].tolist()
    kind = next(kind for _, kind in known)
    return Problem(
        models=tuple(Model(name=name, slo=target(known[name, kind], rng)) for name in chosen),
        rates={name: 100.0 * float(rng.lognormal()) for name in chosen},
        fleet=(Kind(name=kind, count=devices, cuts=CUTS),),
        profiles=known,
        objective="rate",
    )


def target(profile: Profile, rng: np.random.Generator) -> float:
    """Return an SLO of 1 to 2 times the papers' rule, in seconds."""
    return 2 * profile.latency(RULE, WHOLE) * float(rng.uniform(1, 2))


def large_problem(devices: int) -> Problem:
    """Return a problem at 60 % of the largest rates of a fleet with a third of each kind."""
    rng = np.random.default_rng(0)
    known = a100.profiles()
    roles = sorted(known)
    models, rates, profiles = [], {}, {}
    for i in range(MODELS):
        name, measured = f"m{i}", known[roles[i % len(roles)]]
        slower = float(rng.uniform(0.5, 3))
        for kind, (speed, _) in SPEEDS.items():
            points = [msgspec.structs.replace(p, latency=p.latency * slower / speed) for p in measured.points]
            profiles[name, kind] = Profile(name, kind, points)
        models.append(Model(name=name, slo=target(profiles[name, "large"], rng)))
        rates[name] = float(rng.lognormal())
    problem = Problem(
        models=tuple(models),
        rates=rates,
        fleet=tuple(
            Kind(name=kind, count=devices // len(SPEEDS), cuts=CUTS, price=price) for kind, (_, price) in SPEEDS.items()
        ),
        profiles=profiles,
        objective="rate",
    )
    return at(problem, 0.6 * (geometry.bound(problem) or 0.0))


def at(problem: Problem, multiple: float) -> Problem:
    rates = {name: rate * multiple for name, rate in problem.rates.items()}
    return msgspec.structs.replace(problem, rates=rates, objective="devices")


def timed(what: Callable[[Problem], Answer], problem: Problem) -> tuple[Answer, float]:
    start = time.process_time()
    answer = what(problem)
    return answer, time.process_time() - start


def large(devices: int) -> None:
    problem = large_problem(devices)
    plan, seconds = timed(portfolio.plan, problem)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    over = (plan.cost_per_hour or 0.0) / (plan.bound or 1.0)
    faults = len(check(plan, problem)) + len(plan.unserved)
    show(
        f"geometry, {MODELS} models, {len(SPEEDS)} kinds, {devices} devices",
        f"cost {over:.4f} times the bound on {plan.devices_used} devices, {seconds:.2f} s, {used:.2f} GiB, "
        f"{faults} faults",
        over=over,
        seconds=seconds,
        gib=used,
        used=plan.devices_used,
        faults=faults,
    )


def near(problems: list[Problem], devices: int) -> list[Plan]:
    """Show the gap to the bound and the time, over all problems and over those with nine models; return the plans."""
    found = [timed(portfolio.plan, problem) for problem in problems]
    ratios = np.array([plan.scale / plan.bound for plan, _ in found if plan.bound])
    took = np.array([seconds for _, seconds in found])
    nine = np.array([len(problem.models) == 9 for problem in problems])
    faults = sum(len(check(plan, problem)) for (plan, _), problem in zip(found, problems, strict=True))
    text = (
        f"{ratios.mean():.2%} of the bound on average, {ratios.min():.2%} at worst; "
        f"{took.mean():.2f} s on average, {took.max():.2f} s at worst"
    )
    figures = {"mean": ratios.mean(), "worst": ratios.min(), "seconds": took.mean(), "longest": took.max()}
    if nine.any():
        text += f"; nine models {took[nine].mean():.2f} s, {took[nine].max():.2f} s at worst"
        figures |= {"nine_seconds": took[nine].mean(), "nine_longest": took[nine].max()}
    show(
        f"geometry, {len(problems)} problems, {devices} devices",
        f"{text}; {faults} faults",
        faults=faults,
        **{name: float(value) for name, value in figures.items()},
    )
    return [plan for plan, _ in found]


def rivals(problems: list[Problem], plans: list[Plan]) -> None:
    """Show how often another planner serves more or uses fewer devices, and how many devices geometry saves."""
    loads = 0
    planners = sorted(PLANNERS.keys() - BASELINES)
    ours, theirs = [0] * len(planners), [0] * len(planners)
    better: list[str] = []
    for n, (problem, best) in enumerate(zip(problems, plans, strict=True)):
        for part in PARTS:
            rates = at(problem, part * best.scale)
            mine = portfolio.plan(rates)
            loads += 1
            for k, name in enumerate(planners):
                plan = mine if name == "geometry" else load_planner(name)(rates)
                if plan.unserved or check(plan, rates):
                    continue
                if mine.unserved or plan.devices_used < mine.devices_used:
                    better.append(f"{name} at {part} of problem {n}")
                else:
                    ours[k] += mine.devices_used
                    theirs[k] += plan.devices_used
    saved = {name: 1 - a / b for name, a, b in zip(planners, ours, theirs, strict=True) if b}
    show(
        "geometry against other planners",
        f"{len(better)} of {loads} loads are served better by another planner"
        + "".join(f", {one}" for one in better)
        + "; devices saved, where both serve all rates: "
        + ", ".join(f"{part:.1%} of {name}'s" for name, part in saved.items() if name != "geometry"),
        loads=loads,
        better=len(better),
        **{f"saved_{name}": part for name, part in saved.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 100])
    parser.add_argument("--large", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--rivals", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for devices in given.large:
        large(devices)
    sets = ((v100.profiles(), 4), (a100.profiles(), 9))
    for n, devices in enumerate(given.devices):
        rng = np.random.default_rng(0)
        problems = [random_problem(rng, *sets[k % 2], devices) for k in range(given.problems)]
        plans = near(problems, devices)
        if n == 0:
            rivals(problems[: given.rivals], plans[: given.rivals])


if __name__ == "__main__":
    main()
