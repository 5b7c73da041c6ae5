"""Compare autoscalers on public traces, simulated: violations and device-seconds of ours and of others' loops.

    python -m benchmarks.traces [--trace code conv functions] [--start 0] [--seconds 3400] [--processes 2] [--json]

Requests of a trace are striped over the nine models of gpulet's evaluation, round robin, and multiplied so that the
busiest minute of the whole trace is 70 % of what four V100s sustain: LLM requests by copies at random times before the
next one, functions by their counts per minute. Latencies and SLOs are 20 times those measured (see
`benchmarks.steady`). Every loop but those limited to fewer devices begins with the same plan for the rates of that
minute on four devices, gets up to eight from a cloud that takes 20 s to launch one, plans with the same solver, and
starts workers in 0.5 s.

Others': a plan that stays (`plan`: on four devices, `plan-N` on N, for the largest multiple of the rates); fixed
devices, planned for again; utilisation every 15 s (Kubernetes HPA, at 70 %); concurrency every 2 s (Knative KPA, 8
requests a device); throughput every 180 s and latency every 5 s (Dynamo's planner); gpulet's Algorithm 2 every 20 s;
HetSev's heuristic every 15 s, for instances of half a device. HPA, KPA and Dynamo's planner decide how many devices
there are, not what runs on them: as with `plan-N`, each number of devices has one plan, for the largest multiple of the
rates. `cotenant-N` is ours with at most N devices, which an operator sets who would spend no more.

With `--profiles FOLDER` the models are the demo's, in the demo's proportions, on machines like the one where
`cotenant demo` has measured these profiles (it keeps them in ~/.cache/cotenant/profiles).

`--start` leaves out so many seconds of a trace, so that what is chosen on one part is judged on another.

Target: attainment of 99 % (97 % on the bursty `code`), and half the violations of each other loop at most, at no more
device-seconds.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import show
from benchmarks.steady import DEVICES, LOAD, STARTUP, Case, case
from cotenant.config.problem import read_profiles_file
from cotenant.control.adaptation import Solve, Solved
from cotenant.control.controller import Controller
from cotenant.control.controller_built import slo_targets
from cotenant.control.periodic import PeriodicController, PeriodicOptions
from cotenant.control.provider import DeviceOffer
from cotenant.control.scaling.concurrency import ConcurrencyScaling
from cotenant.control.scaling.gpulet import IncrementalScaling
from cotenant.control.scaling.hetsev import GreedyScaling
from cotenant.control.scaling.rates import TargetRateOptions
from cotenant.control.scaling.static import StaticScaling
from cotenant.control.scaling.two_loops import TwoLoopScaling
from cotenant.control.scaling.utilisation import UtilisationScaling
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import renumber_devices
from cotenant.core.profile import Profile
from cotenant.measure.report import Report
from cotenant.planners import Problem, load_planner
from cotenant.planners.rates import at_rates
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import Replanner, with_devices
from cotenant.published import FOLDER
from cotenant.sim.adaptation import Adaptation, ControllerMachine
from cotenant.sim.cloud import CloudKind, SimulatedCloud
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.sources import Curve
from cotenant.workload.traces import Trace, TraceSource, TraceSummary, read_minutes
from cotenant.zoo import DEMO, ZOO

QUOTA = 8  # devices at most
LAUNCH = 20.0  # seconds
TRACES = {
    "code": "azure_llm_2023_code.csv",
    "conv": "azure_llm_2023_conv.csv",
    "functions": "azure_functions_2019_100.csv",
}
Floats = NDArray[np.float64]
Maker = Callable[[Problem, tuple[DeviceId, ...], tuple[DeviceOffer, ...]], ControllerMachine]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one run. missed: requests late, rejected or dropped; stayed: of all whose caller stayed."""

    trace: str
    loop: str
    stayed: int
    missed: int
    device_seconds: float

    @property
    def attainment(self) -> float:
        return 1 - self.missed / self.stayed


def _ours(problem: Problem, devices: tuple[DeviceId, ...], offers: tuple[DeviceOffer, ...]) -> ControllerMachine:
    return Controller(devices, slo_targets(problem), offers=offers)


def _periodic(policy: Callable[[str], object], period: float, rates: TargetRateOptions | None = None) -> Maker:
    def make(problem: Problem, devices: tuple[DeviceId, ...], offers: tuple[DeviceOffer, ...]) -> ControllerMachine:
        launches = {offer.kind: offer.launch_seconds for offer in offers}
        options = PeriodicOptions(period=period, rates=rates or TargetRateOptions(), fill=True, launch_seconds=launches)
        return PeriodicController(policy(problem.fleet[0].name), problem, options, devices)  # type: ignore[arg-type]

    return make


class PlanPerCount:
    """Answer a `Solve` by the one plan that each number of devices has: for the largest multiple of the rates of the
    problem, whatever is offered."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._plans: dict[int, Plan] = {}

    def __call__(self, solve: Solve) -> Solved:
        count = len(solve.devices)
        if count not in self._plans:
            self._plans[count] = largest_plan(self._problem, count)
        plan = renumber_devices(self._plans[count], solve.current, solve.devices)
        return Solved(number=solve.number, plan=plan, rates=solve.rates)


PLANS = {"plan": DEVICES} | {f"plan-{count}": count for count in range(1, QUOTA + 1) if count != DEVICES}
BUDGETS = {f"cotenant-{count}": count for count in range(1, QUOTA)}  # devices at most
UNMOVED = TargetRateOptions(rise=math.inf, rise_by=math.inf, fall=1.0)  # plan anew for other devices alone
BY_COUNT = ("utilisation", "concurrency", "two loops")  # loops that decide how many devices there are, and no more
LOOPS: dict[str, Maker] = {
    "cotenant": _ours,
    "fixed": _periodic(lambda kind: StaticScaling(devices={kind: DEVICES}), 15.0),
    "utilisation": _periodic(lambda kind: UtilisationScaling(kind=kind, target=0.7), 15.0, UNMOVED),
    "concurrency": _periodic(lambda kind: ConcurrencyScaling(kind=kind, target=8.0, to_zero=False), 2.0, UNMOVED),
    "two loops": _periodic(lambda kind: TwoLoopScaling(kind=kind), 5.0, UNMOVED),
    "gpulet": _periodic(lambda kind: IncrementalScaling(planner=load_planner("elastic-plus")), 20.0),
    "HetSev": _periodic(lambda kind: GreedyScaling(share=500), 15.0),
} | dict.fromkeys(BUDGETS, _ours)


def demo_case(load: float, folder: Path) -> Case:
    """Return the demo's models at that fraction of the largest rates that the machines sustain. folder: of profiles."""
    profiles: dict[tuple[str, str], Profile] = {}
    for file in sorted(folder.glob("*.csv"), key=lambda file: file.stat().st_mtime):
        profiles |= {(model, kind): it for (model, kind), it in read_profiles_file(file).items() if model in DEMO}
    missing = set(DEMO) - {model for model, _ in profiles}
    if missing:
        sys.exit(f"{folder}: no profiles of {', '.join(sorted(missing))}; run `cotenant demo` first")
    cuts = sorted({point.share for profile in profiles.values() for point in profile.points})
    asked = Problem(
        models=tuple(Model(name=name, slo=ZOO[name].slo) for name in DEMO),
        rates={name: ZOO[name].weight for name in DEMO},
        fleet=(Kind(name="cpu", count=DEVICES, cuts=tuple(cuts)),),
        profiles=profiles,
        objective="rate",
    )
    largest = plan_problem(asked, validate=False, clock=None).scale
    problem = at_rates(asked, {name: load * largest * rate for name, rate in asked.rates.items()})
    return Case(problem, plan_problem(problem, clock=None))


def workload(trace: str, rates: dict[str, float], start: float, seconds: float, folder: Path) -> Workload:
    """Stripe a part of a trace over models, and multiply each stripe in proportion to the model's rate, so that in the
    busiest minute of the whole trace as many requests arrive as at `rates`."""
    file = FOLDER / "traces" / TRACES[trace]
    names, busiest = list(rates), sum(rates.values())
    weights = {name: len(names) * rate / busiest for name, rate in rates.items()}
    if trace == "functions":
        minutes = [np.asarray(counts) for _, counts in read_minutes(file)]
        striped = [sum(minutes[n :: len(names)], np.zeros_like(minutes[0])) for n in range(len(names))]
        factor = busiest / float(np.max(sum(striped, np.zeros_like(minutes[0]))))
        part = slice(int(start // 60), int((start + seconds) // 60))
        return Workload(
            sources={
                name: Curve.steps([factor * weights[name] * float(count) for count in counts[part]], 60.0)
                for name, counts in zip(names, striped, strict=True)
            }
        )
    with file.open() as lines:
        times = [row["TIMESTAMP"] for row in csv.DictReader(lines)]
    arrivals = np.array([datetime.fromisoformat(time).timestamp() for time in times])
    factor = 60 * busiest / _busiest(arrivals, 60.0)
    since = arrivals - arrivals[0]
    kept = [time for time, at in zip(times, since.tolist(), strict=True) if start <= at < start + seconds]
    sources = {}
    for n, name in enumerate(names):
        chosen = folder / f"{trace}-{name}.csv"
        chosen.write_text("time\n" + "\n".join(kept[n :: len(names)]) + "\n")
        known = Trace(file=chosen, column="time")
        sources[name] = TraceSource(trace=known, summary=TraceSummary.of(known)).scaled(factor * weights[name])
    return Workload(sources=sources)


def _busiest(arrivals: Floats, seconds: float) -> int:
    """Return the most arrivals in a window of that length."""
    return int(np.max(np.arange(1, arrivals.size + 1) - np.searchsorted(arrivals, arrivals - seconds)))


def run(trace: str, loop: str, given: Case, start: float, seconds: float, seed: int) -> Result:
    """Simulate one loop on one trace."""
    with tempfile.TemporaryDirectory() as folder:
        load = workload(trace, given.problem.rates, start, seconds, Path(folder))
        if loop in PLANS:
            report, device_seconds = _fixed_plan(given.problem, PLANS[loop], load, seconds, seed)
        else:
            report, device_seconds = _controlled(given, loop, load, seconds, seed)
    return Result(
        trace=trace,
        loop=loop,
        stayed=sum(row.stayed for row in report.models),
        missed=sum(row.missed for row in report.models),
        device_seconds=device_seconds,
    )


def _fixed_plan(problem: Problem, devices: int, load: Workload, seconds: float, seed: int) -> tuple[Report, float]:
    """Return a report, and device-seconds, of one plan for the largest multiple of the rates."""
    problem = with_devices(problem, {problem.fleet[0].name: devices})
    report = simulate(largest_plan(problem, devices), problem, load, seconds=seconds, seed=seed)
    return report, devices * seconds


def largest_plan(problem: Problem, devices: int) -> Plan:
    """Return the plan of so many devices for the largest multiple of the rates, the same whatever else runs."""
    problem = msgspec.structs.replace(with_devices(problem, {problem.fleet[0].name: devices}), objective="rate")
    return plan_problem(problem, validate=False, clock=None)


def _controlled(given: Case, loop: str, load: Workload, seconds: float, seed: int) -> tuple[Report, float]:
    kind = given.problem.fleet[0].name
    quota = BUDGETS.get(loop, QUOTA)
    fleet: tuple[Kind, ...] = (msgspec.structs.replace(given.problem.fleet[0], count=quota),)
    problem = msgspec.structs.replace(given.problem, fleet=fleet)
    devices = tuple(DeviceId(kind, index) for index in range(min(DEVICES, quota)))
    plan = given.plan if quota >= given.plan.devices_used else largest_plan(problem, quota)
    cloud = SimulatedCloud([CloudKind(kind=kind, launch_seconds=LAUNCH, quota=quota)], seed=seed, used=devices)
    controller = LOOPS[loop](problem, devices, cloud.offers())
    solver = PlanPerCount(problem) if loop in BY_COUNT else Replanner(problem)
    adaptation = Adaptation(controller=controller, solver=solver, provider=cloud)
    report = simulate(plan, problem, load, seconds=seconds, seed=seed, adaptation=adaptation, startup=STARTUP)
    return report, sum(cloud.device_seconds(seconds).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument(
        "--loop",
        nargs="+",
        choices=[*LOOPS, *PLANS],
        default=[*(loop for loop in LOOPS if loop not in BUDGETS), "plan"],
    )
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--start", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=3400.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    given = case(LOAD) if options.profiles is None else demo_case(LOAD, options.profiles)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(run, trace, loop, given, options.start, options.seconds, options.seed)
            for trace in options.trace
            for loop in options.loop
        ]
        for future in futures:
            result = future.result()
            show(
                f"{result.trace}, {result.loop}",
                f"attainment {result.attainment:.4f}, {result.missed} of {result.stayed} missed, "
                f"{result.device_seconds / options.seconds:.2f} devices",
                attainment=result.attainment,
                missed=result.missed,
                stayed=result.stayed,
                devices=result.device_seconds / options.seconds,
            )


if __name__ == "__main__":
    main()
