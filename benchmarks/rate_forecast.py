"""Judge forecasts of rates, a trend (the default) and Holt-Winters, against none, on public traces and on a sine.

    python -m benchmarks.rate_forecast [--only sine code conv functions] [--seconds 3400] [--processes 2] [--json]

- error: mean absolute error of the rate that Holt-Winters forecasts for the next minute (the largest of six steps of
  ten seconds) against the largest ten seconds that came, over the mean rate; and of the rate of the last ten seconds,
  which is no forecast.
- run: the controller with each forecast, without, and without but with more headroom, simulated as in
  `benchmarks.traces` (four V100s of eight at the beginning, a launch takes 20 s) or, for the sine, as in
  `benchmarks.steady`: attainment and device-seconds. Holt-Winters knows no season of the traces, which are too short;
  for the sine, its period is the season.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness import show
from benchmarks.steady import DEVICES, LOAD, SINE_AMPLITUDE, SINE_LOAD, SINE_PERIOD, STARTUP, Case, case
from benchmarks.traces import LAUNCH, QUOTA, TRACES, workload
from cotenant.control.controller import Controller
from cotenant.control.controller_built import slo_targets
from cotenant.control.controller_options import ControllerOptions
from cotenant.control.rate_forecast import HoltWintersForecast, HoltWintersOptions
from cotenant.control.rate_monitor import RateEstimate
from cotenant.core.identity import DeviceId
from cotenant.planning.replan import Replanner
from cotenant.sim.adaptation import Adaptation
from cotenant.sim.cloud import CloudKind, SimulatedCloud
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.arrivals import generate_arrivals
from cotenant.workload.sources import Curve

SINE = "sine"
PERIODS = 3  # of the sine: two to learn from
HEADROOM = 1.3  # of a controller that is simply more careful, in place of 1.2
WARM_UP = 0.1  # part of a trace that no error is counted of


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one run. attainment: of all requests; changes: rollouts that ended."""

    name: str
    variant: str
    attainment: float
    missed: int
    devices: float
    changes: int


def forecast_of(name: str) -> HoltWintersOptions:
    """Return the options of the forecast for one load."""
    return HoltWintersOptions(season=SINE_PERIOD if name == SINE else 0.0)


def load_of(name: str, given: Case, seconds: float, folder: Path) -> Workload:
    """Return a trace striped over the models, or a sine of all of them."""
    rates = given.problem.rates
    if name != SINE:
        return workload(name, rates, 0.0, seconds, folder)
    steps = 60 * PERIODS
    waves = [1 + SINE_AMPLITUDE * math.sin(2 * math.pi * n / 60) for n in range(steps + 1)]
    return Workload(
        sources={
            model: Curve(points=tuple((n * SINE_PERIOD / 60, rate * wave) for n, wave in enumerate(waves)))
            for model, rate in rates.items()
        }
    )


def errors(name: str, given: Case, seconds: float) -> tuple[float, float]:
    """Return the mean absolute error over the mean rate, with a forecast and without."""
    options = forecast_of(name)
    ahead = round(options.horizon / options.period)
    with tempfile.TemporaryDirectory() as folder:
        load = load_of(name, given, seconds, Path(folder))
        chunks = list(generate_arrivals(load, seconds, 0))
    times, sources = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    edges = np.arange(0.0, seconds + options.period, options.period)
    with_forecast, without, rates = [], [], []
    for index in range(len(load.sources)):
        values = np.histogram(times[sources == index], edges)[0] / options.period
        forecast = HoltWintersForecast(options)
        skipped = values.size * (1 - 1 / PERIODS if name == SINE else WARM_UP)
        for n, value in enumerate(values[: values.size - ahead]):
            forecast.observe(round(value * options.period), options.period, RateEstimate(value, options.period, 1.0))
            expected = max(value, forecast.expected(0.0))
            if n >= skipped:
                came = float(values[n + 1 : n + 1 + ahead].max())
                with_forecast.append(abs(expected - came))
                without.append(abs(value - came))
        rates.append(values.mean())
    mean = float(np.mean(rates))
    return float(np.mean(with_forecast)) / mean, float(np.mean(without)) / mean


def variants(name: str) -> dict[str, ControllerOptions]:
    """Return what is compared under one load."""
    return {
        "none": ControllerOptions(forecast=None),
        "trend": ControllerOptions(),
        "Holt-Winters": ControllerOptions(forecast=forecast_of(name)),
        f"none, headroom {HEADROOM:g}": ControllerOptions(forecast=None, headroom=HEADROOM),
    }


def run(name: str, given: Case, seconds: float, variant: str) -> Run:
    """Simulate the controller under one load."""
    kind = given.problem.fleet[0].name
    fleet = (msgspec.structs.replace(given.problem.fleet[0], count=QUOTA),)
    problem = msgspec.structs.replace(given.problem, fleet=fleet)
    devices = tuple(DeviceId(kind, index) for index in range(DEVICES))
    cloud = SimulatedCloud([CloudKind(kind=kind, launch_seconds=LAUNCH, quota=QUOTA)], seed=0, used=devices)
    controller = Controller(devices, slo_targets(problem), variants(name)[variant])
    changes = 0

    def told(now: float, event: object, commands: list[object]) -> None:
        nonlocal changes
        changes += type(event).__name__ == "RollEnded"

    adaptation = Adaptation(controller=controller, solver=Replanner(problem), provider=cloud, log=told)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        report = simulate(
            given.plan,
            problem,
            load_of(name, given, seconds, Path(folder)),
            seconds=seconds,
            seed=0,
            adaptation=adaptation,
            startup=STARTUP,
        )
    stayed, missed = sum(row.stayed for row in report.models), sum(row.missed for row in report.models)
    used = sum(cloud.device_seconds(seconds).values()) / seconds
    return Run(
        name=name,
        variant=variant,
        attainment=1 - missed / stayed,
        missed=missed,
        devices=used,
        changes=changes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [SINE, *TRACES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=3400.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    traces, waves = case(LOAD), case(SINE_LOAD)

    def of(name: str) -> tuple[Case, float]:
        return (waves, PERIODS * SINE_PERIOD) if name == SINE else (traces, options.seconds)

    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        known = {name: pool.submit(errors, name, *of(name)) for name in options.only}
        runs = {
            name: [pool.submit(run, name, *of(name), variant) for variant in variants(name)] for name in options.only
        }
        for name in options.only:
            predicted, latest = known[name].result()
            show(
                f"{name}, error",
                f"of the next minute's largest rate: forecast {predicted:.3f}, none {latest:.3f} of the mean rate",
                forecast=predicted,
                none=latest,
            )
            for future in runs[name]:
                made = future.result()
                show(
                    f"{name}, {made.variant}",
                    f"attainment {made.attainment:.4f}, {made.missed} missed, {made.devices:.2f} devices, "
                    f"{made.changes} rollouts",
                    attainment=made.attainment,
                    missed=made.missed,
                    devices=made.devices,
                    changes=made.changes,
                )


if __name__ == "__main__":
    main()
