"""Measure how steady the controller is, simulated: plan changes where none are needed, and what a decision costs.

    python -m benchmarks.steady [--seeds 100] [--hours 1] [--processes 2] [--json]

- constant: Poisson arrivals at a constant rate, at 70 % of what four V100s sustain; one run per seed. Target: at most
  one plan change an hour, in every run.
- sine: all rates rise and fall by 30 % around 60 % in half an hour. Target: at most four plan changes a period.
- decisions: CPU seconds of `Controller.handle` per observation of 20 models with Poisson arrivals on 100 devices
  (target: 1 ms), and of a new plan for them (target: 1 s).

The nine models of gpulet's evaluation, played by models measured on a V100 (`experiments.gpulet.model_sets`), with
latencies and SLOs 20 times as long: an hour is then some 300,000 requests. Solving takes 0.5 s of simulated time, and
starting a worker 0.5 s.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import numpy as np

from benchmarks.harness import show
from cotenant.control.adaptation import Adopted, BatchLatency, Observed, Solve, SolveStep
from cotenant.control.controller import Controller
from cotenant.control.controller_built import ControllerBuilt
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.profile import slowed_profiles
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planners.rates import at_rates
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import Replanner
from cotenant.sim.adaptation import Adaptation
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.sources import Curve
from experiments.gpulet.model_sets import GLET, model_set

DEVICES = 4
LOAD = 0.7  # of the largest rates that the devices sustain
SINE_LOAD, SINE_AMPLITUDE, SINE_PERIOD = 0.6, 0.3, 1800.0
STARTUP = 0.5  # seconds
SLOWER = 20.0  # factor on latencies and SLOs


class Case(msgspec.Struct, frozen=True):
    """A problem at rates that its devices can serve, and the plan for them."""

    problem: Problem
    plan: Plan


class Outcome(msgspec.Struct, frozen=True):
    """Hold one run: how many plans came into force after the first, and the lowest attainment of a model."""

    changes: int
    attainment: float


def case(load: float) -> Case:
    """Return the nine models at that fraction of the largest common rate that the devices sustain."""
    played = model_set("v100")
    asked = played.problem(DEVICES, interference=False)
    asked = msgspec.structs.replace(
        asked,
        models=tuple(msgspec.structs.replace(model, slo=SLOWER * model.slo) for model in asked.models),
        profiles=slowed_profiles(asked.profiles, dict.fromkeys(GLET, SLOWER)),
        rates=dict.fromkeys(GLET, 1.0),
        objective="rate",
    )
    largest = plan_problem(asked, validate=False, clock=None)
    problem = at_rates(asked, dict.fromkeys(asked.rates, load * largest.scale))
    return Case(problem, plan_problem(problem, clock=None))


def run(given: Case, workload: Workload, seconds: float, seed: int) -> Outcome:
    """Simulate a case with the controller."""
    problem = given.problem
    controller = ControllerBuilt.of(problem, given.plan).controller()
    adaptation = Adaptation(controller=controller, solver=Replanner(problem))
    report: Report = simulate(
        given.plan, problem, workload, seconds=seconds, seed=seed, adaptation=adaptation, startup=STARTUP
    )
    changes = sum(decision.action.startswith("in force") for decision in controller.status().decisions)
    return Outcome(changes, min(row.attainment for row in report.models if row.attainment is not None))


def constant(given: Case, seconds: float, seed: int) -> Outcome:
    """Simulate constant rates."""
    return run(given, Workload.poisson(given.problem.rates), seconds, seed)


def sine(given: Case, seed: int) -> Outcome:
    """Simulate one period of a sine, after one to get used to it."""
    steps = 60
    sources = {
        name: Curve(
            points=tuple(
                (n * SINE_PERIOD / steps, rate * (1 + SINE_AMPLITUDE * math.sin(2 * math.pi * n / steps)))
                for n in range(2 * steps + 1)
            )
        )
        for name, rate in given.problem.rates.items()
    }
    return run(given, Workload(sources=sources), 2 * SINE_PERIOD, seed)


def decisions() -> tuple[float, float]:
    """Return CPU seconds of one observation, and of one plan, for 20 models on 100 devices."""
    models = 20
    names = [f"m{n}" for n in range(models)]
    rng = np.random.default_rng(0)
    sources = [profile for _, profile in sorted(model_set("v100").profiles.items())]
    profiles = {(name, "v100"): sources[n % len(sources)] for n, name in enumerate(names)}
    problem = Problem(
        models=tuple(Model(name=name, slo=2 * profiles[name, "v100"].latency(32, 1000)) for name in names),
        rates={name: 200.0 * float(rng.lognormal()) for name in names},
        fleet=(Kind(name="v100", count=100, cuts=(200, 400, 500, 600, 800, 1000)),),
        profiles=profiles,
    )
    plan = plan_problem(problem, validate=False)
    devices = tuple(DeviceId("v100", index) for index in range(100))
    controller = Controller(devices, {})
    controller.handle(Adopted(plan=plan, rates=problem.rates), 0.0)
    observations = []
    for _ in range(1000):
        counts = {name: int(rng.poisson(rate / 2)) for name, rate in problem.rates.items()}
        latencies = dict.fromkeys(names, BatchLatency(50, 1.0, 1.0))
        observations.append(
            Observed(seconds=0.5, offered=counts, stayed=counts, within_target=counts, latencies=latencies)
        )
    begun = time.process_time()
    for n, seen in enumerate(observations, 1):
        controller.handle(seen, 0.5 * n)
    each = (time.process_time() - begun) / len(observations)
    replanner = Replanner(problem)
    larger = {name: 1.5 * rate for name, rate in problem.rates.items()}
    solve = Solve(number=1, rates=larger, offered=problem.rates, current=plan, devices=devices, step=SolveStep.REPLAN)
    begun = time.process_time()
    solved = replanner(solve)
    assert solved.plan is not None, solved.error
    return each, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    observation, solving = decisions()
    show(
        "decisions",
        f"an observation of 20 models on 100 devices {observation * 1e3:.2f} ms; a plan for them {solving:.2f} s",
        observation_ms=observation * 1e3,
        plan_s=solving,
    )
    given, waved = case(LOAD), case(SINE_LOAD)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(constant, given, options.hours * 3600, seed) for seed in range(options.seeds)]
        sines = [pool.submit(sine, waved, seed) for seed in range(min(4, options.seeds))]
        outcomes = [future.result() for future in runs]
        periods = [future.result() for future in sines]
    per_hour = [outcome.changes / options.hours for outcome in outcomes]
    show(
        "constant",
        f"{len(outcomes)} runs of {options.hours:g} h at {LOAD:.0%}: plan changes an hour {np.mean(per_hour):.2f}, at "
        f"most {max(per_hour):g}; attainment at least {min(outcome.attainment for outcome in outcomes):.4f}",
        mean_changes=float(np.mean(per_hour)),
        most_changes=max(per_hour),
        least_attainment=min(outcome.attainment for outcome in outcomes),
    )
    most = max(outcome.changes / 2 for outcome in periods)
    show(
        "sine",
        f"plan changes a period at most {most:g}; attainment at least {min(o.attainment for o in periods):.4f}",
        most_changes=most,
        least_attainment=min(outcome.attainment for outcome in periods),
    )


if __name__ == "__main__":
    main()
