"""Simulate a day of a public trace with best-effort jobs: how much batch work a fleet does on what serving leaves.

    python -m benchmarks.job_day [--hours 24] [--devices 6] [--plot FILE.svg] [--json]

The 57 minutes of `azure_llm_2023_code`, over and over, striped over gpulet's nine models on V100s as in
`benchmarks.traces`: multiplied so that the busiest minute is 70 % of what four devices sustain, with latencies and SLOs
20 times those measured. The plan is for the largest multiple of those rates on all devices, and stays. Each device has
a job that trains BERT: its step takes as long as KACE measured on a V100 (8 rows, 20 times as long here), on smaller
shares in proportion. Batches that begin while a job runs on their device take 1.2 times as long, which is the margin
that a server counts on without a predictor.

The run is made with and without jobs.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from benchmarks.harness import show
from benchmarks.steady import LOAD, SLOWER, case
from benchmarks.traces import TRACES
from cotenant.core.background_job import BackgroundJob
from cotenant.core.plan import Partition, Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planners.job_placement import place_jobs, without_jobs
from cotenant.planning import plan as plan_problem
from cotenant.planning.replan import with_devices
from cotenant.predictors import Load
from cotenant.published import FOLDER, kace
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.traces import Trace, TraceSource, TraceSummary

HOUR = 3600.0
TRACE = "code"
MODEL, BATCH = "bert-base-cased-train", 8
MARGIN = 1.2
PEAK = 6  # devices, with which 99 % of the requests of the bursts are in time
BIN = 60.0  # seconds


class JobMargin(msgspec.Struct, frozen=True):
    """Slow what runs beside a job by a factor, and nothing else."""

    factor: float

    interferes: ClassVar[bool] = True

    def slowdown(self, victim: Load, colocated: Sequence[Load]) -> float:
        return self.factor if victim.model != MODEL and any(load.model == MODEL for load in colocated) else 1.0


class Usage(msgspec.Struct):
    """Hold what jobs took and lanes left, in share-seconds, up to the end of each bin; in all, at the last look."""

    taken: list[float] = msgspec.field(default_factory=lambda: [0.0])
    left: list[float] = msgspec.field(default_factory=lambda: [0.0])

    all_taken: float = 0.0
    all_left: float = 0.0

    def watch(self, now: float, taken: float, left: float) -> None:
        self.all_taken, self.all_left = taken, left
        if now >= len(self.taken) * BIN:
            self.taken.append(taken)
            self.left.append(left)


def planned_with_jobs(devices: int) -> tuple[Problem, Plan]:
    """Return the nine models at their rates on so many devices, with a job for each, and the plan."""
    asked = case(LOAD).problem
    asked = with_devices(asked, {asked.fleet[0].name: devices})
    (kind,) = asked.fleet
    measured = kace.profiles()[MODEL, kace.KIND]
    whole, memory = measured.latency(BATCH, WHOLE), measured.memory(BATCH)
    points = [
        Point(share=share, batch=BATCH, latency=SLOWER * whole * WHOLE / share, memory=memory) for share in kind.cuts
    ]
    jobs = tuple(BackgroundJob(name=f"train-{n}", model=MODEL, batch=BATCH) for n in range(devices))
    largest = plan_problem(msgspec.structs.replace(asked, objective="rate"), clock=None)
    problem = msgspec.structs.replace(
        asked,
        profiles={**asked.profiles, (MODEL, kind.name): Profile(MODEL, kind.name, points)},
        interference=JobMargin(MARGIN),
        jobs=jobs,
    )
    return problem, place_jobs(_at_rates(largest), problem)


def _at_rates(plan: Plan) -> Plan:
    """Return the plan for the rates themselves, of which it serves a multiple."""

    def lowered(partition: Partition) -> Partition:
        placements = tuple(msgspec.structs.replace(each, rate=each.rate / plan.scale) for each in partition.placements)
        return msgspec.structs.replace(partition, placements=placements)

    devices = tuple(
        msgspec.structs.replace(device, partitions=tuple(map(lowered, device.partitions))) for device in plan.devices
    )
    return msgspec.structs.replace(plan, objective="devices", devices=devices, scale=1.0, bound=None)


def repeated(rates: dict[str, float], seconds: float, folder: Path) -> Workload:
    """Stripe the trace over the models, from its start again and again, with as many requests in its busiest minute as
    at the rates."""
    with (FOLDER / "traces" / TRACES[TRACE]).open() as lines:
        times = np.array([datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in csv.DictReader(lines)])
    times -= times[0]
    busiest = int(np.max(np.arange(1, times.size + 1) - np.searchsorted(times, times - BIN)))
    factor = BIN * sum(rates.values()) / busiest
    period = float(times[-1]) + 1.0
    rounds = range(int(np.ceil(seconds / period)))
    sources = {}
    for n, name in enumerate(rates):
        own = times[n :: len(rates)]
        every = [time for each in rounds for time in (own + each * period).tolist() if time < seconds]
        file = folder / f"{name}.csv"
        file.write_text("time\n" + "\n".join(f"{time:.6f}" for time in every) + "\n")
        known = Trace(file=file, column="time")
        weight = len(rates) * rates[name] / sum(rates.values())
        sources[name] = TraceSource(trace=known, summary=TraceSummary.of(known)).scaled(factor * weight)
    return Workload(sources=sources)


def run(problem: Problem, plan: Plan, seconds: float, usage: Usage | None = None) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        workload = repeated(problem.rates, seconds, Path(folder))
        return simulate(plan, problem, workload, seconds=seconds, watch_jobs=None if usage is None else usage.watch)


def attainment(report: Report) -> float:
    return 1 - sum(row.missed for row in report.models) / sum(row.stayed for row in report.models)


def worst(report: Report) -> float:
    """Return the attainment of the model with the lowest."""
    return min(1.0 if row.attainment is None else row.attainment for row in report.models)


def save_day(usage: Usage, devices: int, path: Path) -> None:
    """Draw the devices that serve, that train, and that neither does: over the day, and in its first hour."""
    figure = figure_for(path, 9, 3.4)
    day, hour = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
    for axes, bins, unit, word in ((day, 10, HOUR, "hours"), (hour, 1, 60.0, "minutes of the first hour")):
        taken, left = (np.diff(np.array(values)[::bins]) / (BIN * bins) for values in (usage.taken, usage.left))
        if axes is hour:
            taken, left = taken[:60], left[:60]
        times = np.arange(len(taken)) * BIN * bins / unit
        serving = devices - left
        parts = {"serving": serving, "best-effort jobs": taken, "idle": left - taken}
        colours = COLOURS[0], COLOURS[4], "#dddddd"
        axes.stackplot(times, *parts.values(), labels=list(parts), colors=colours, step="post", lw=0)
        axes.set_xlim(0, times[-1])
        axes.set_ylim(0, devices)
        axes.set_xlabel(word, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    day.set_ylabel("devices", fontsize=8)
    day.legend(fontsize=8, loc="lower right")
    figure.suptitle(
        "azure_llm_2023_code on V100s, simulated: what serves, and what trains", x=0.01, ha="left", fontsize=10
    )
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--devices", type=int, default=PEAK)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON alone.")
    given = parser.parse_args()
    seconds, usage = given.hours * HOUR, Usage()
    problem, plan = planned_with_jobs(given.devices)
    beside = run(problem, plan, seconds, usage)
    alone = run(problem, without_jobs(plan), seconds)
    used, left, taken = len(plan.devices) * seconds, usage.all_left, usage.all_taken
    rows = taken / kace.profiles()[MODEL, kace.KIND].latency(BATCH, WHOLE) * BATCH
    figures = {
        "serving": (used - left) / HOUR,
        "jobs": taken / HOUR,
        "of_idle": taken / left,
        "attainment": attainment(beside),
        "attainment_without": attainment(alone),
        "worst": worst(beside),
        "worst_without": worst(alone),
        "rows": rows,
    }
    show(
        "jobs on the trace code",
        "{devices} devices in {hours:g} h serve {serving:.1f} and train {jobs:.1f} device-hours, {of_idle:.1%} of what"
        " serving leaves: {rows:.3g} rows of BERT; attainment {attainment:.3%}, without jobs {attainment_without:.3%};"
        " of the worst model {worst:.2%} and {worst_without:.2%}".format(
            devices=len(plan.devices), hours=given.hours, **figures
        ),
        devices=len(plan.devices),
        hours=given.hours,
        **figures,
    )
    pairs = zip(beside.models, alone.models, strict=True)
    ratios = [row.p99 / other.p99 for row, other in pairs if row.p99 and other.p99]
    show(
        "p99 with jobs over without", f"{min(ratios):.2f} to {max(ratios):.2f}", lowest=min(ratios), highest=max(ratios)
    )
    if given.plot is not None:
        save_day(usage, len(plan.devices), given.plot)


if __name__ == "__main__":
    main()
