"""Send the same arrivals to the same plan on a live server and in the simulator: `cotenant validate`.

The server is a process of its own, as in production. Each load is sent twice, and simulated twice. Once with the
recorded batch latencies of the second run: the remaining difference is the simulator's own error in queueing and
admission (correlated inspection of a trace-driven model). And once with the latencies of the first run alone: this
prediction cannot be closer than the two live runs are to each other, which is shown next to it, since on a shared
machine batch latencies drift by a tenth within minutes. A third simulation has only the profiles to go by, and lends
idle share of processors where the server does: what is said of a plan before anything has run, but for the time that
requests spend outside of the server, which is the first run's.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.adaptive_validation import adaptive_comparison_view, compare_adaptive
from cotenant.cli.interrupt import interruptible
from cotenant.cli.latency_tuning import tune_for_latency
from cotenant.cli.loading import load_settings, load_unplanned
from cotenant.cli.options import Duration, Json, ModelRepository, PlannerName, Seed, SettingsFile
from cotenant.cli.output import aside, console, print_labelled, show_json
from cotenant.cli.served_process import complete_lines, served_process
from cotenant.core.identity import LaneId
from cotenant.core.plan import Plan
from cotenant.core.units import show_seconds, show_share
from cotenant.measure.report import ModelReport, Report
from cotenant.render.table import table
from cotenant.runtime.log import read_log

if TYPE_CHECKING:
    from cotenant.planners import Problem
    from cotenant.sim.service import BatchTimes, Key, RecordedBatches
    from cotenant.sim.trace_replay import Observations
    from cotenant.workload import Workload

SCALES = (0.3, 0.6, 0.9, 1.2)
ADAPTIVE_SCALES = (0.4, 0.8, 1.2, 0.4)
CLOSE = 0.05  # relative difference of latencies, or points of attainment, shown as agreement
MIN_REQUESTS = 200  # minimum requests of a model; with fewer, chance moves a p99 by more than CLOSE
MAX_LAG = 0.01  # seconds of send lag above which another load uses the machine


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Compare the runs at one load. Each report is of the same arrivals.

    live: of the second run; first: of the one before it. simulated: with the batch latencies of the second run, each
    when it ran. predicted: with the distribution of batch latencies of the first run. profiled: with those of the
    profiles, idle share lent where the server lends it (`lent`).
    batches: how long batches took in the second run over how long they took in the first, by model. slowdowns: what
    they took over their profile, by model and share in percent; outside: seconds that a request spent outside of the
    server, by model; both of the second run.
    """

    load: float
    live: Report
    simulated: Report
    predicted: Report
    first: Report
    profiled: Report
    lent: bool
    batches: dict[str, float]
    slowdowns: dict[str, float]
    outside: dict[str, float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    loads: tuple[Comparison, ...]


def validate(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    planner: PlannerName = None,
    scale: Annotated[
        list[float] | None,
        typer.Option(
            "--scale", min=0.01, help="Multiple of the planned rates; repeat for several. Default: 0.3, 0.6, 0.9, 1.2."
        ),
    ] = None,
    duration: Duration = 60.0,
    adapt: Annotated[bool, typer.Option("--adapt", help="Validate one adaptive run through all loads.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Validate the simulator against a live server: same plan, same arrivals. Needs an otherwise idle machine."""
    import uvloop

    wanted = load_settings(settings, model_repository, planner)
    problem = load_unplanned(wanted).problem
    flags = [str(settings)] if settings is not None else []
    flags += ["--model-repository", str(model_repository)] if model_repository is not None else []
    flags += ["--planner", planner] if planner is not None else []
    if adapt:
        compared = uvloop.run(
            compare_adaptive(problem, wanted.planner, flags, scale or ADAPTIVE_SCALES, duration, seed)
        )
        if json:
            show_json(compared)
        else:
            console.print(adaptive_comparison_view(compared))
        if compared.replay_difference:
            raise typer.Exit(1)
        return
    lend = wanted.lend and any(kind.processors for kind in problem.fleet)
    result = uvloop.run(compare_loads(problem, flags, scale or SCALES, duration, seed, lend=lend))
    if json:
        show_json(result)
    else:
        console.print(result_view(result))


async def compare_loads(
    problem: Problem, flags: Sequence[str], loads: Sequence[float], seconds: float, seed: int, *, lend: bool = False
) -> Result:
    """Run every load twice live, and simulate it. flags: of `cotenant serve`, whose plan must be for this problem.
    lend: whether it lends idle share of processors."""
    from cotenant.cli.client import bodies_for
    from cotenant.live.load_generator import generate_load as send
    from cotenant.runtime.lane_specs import lane_specs
    from cotenant.sim.run import simulate
    from cotenant.sim.trace_replay import collect_observations, fit_batch_times, recorded_batches
    from cotenant.workload import Workload
    from cotenant.workload.arrivals import generate_arrivals

    async with interruptible(), served_process(flags) as (plan, http, log):
        models = [model for model in problem.models if plan.rate(model.name)]
        bodies = await bodies_for(http, models, seed)
        lanes = list(lane_specs(plan, {model.name: model for model in problem.models}, problem.profiles))

        async def live(workload: Workload) -> tuple[Report, Observations]:
            arrivals = generate_arrivals(workload, seconds, seed)
            tune_for_latency()
            since, written = time.monotonic(), log.stat().st_size
            report = await send(http, models, bodies, arrivals, seconds)
            return report, collect_observations(
                read_log(complete_lines(log, written), str(log)), since, time.monotonic()
            )

        def simulated(
            workload: Workload,
            batches: Mapping[Key, BatchTimes | RecordedBatches],
            outside: Mapping[str, OutsideTime],
            lend: bool = False,  # what was recorded has been lent already
        ) -> Report:
            report = simulate(
                plan,
                _without_outside_time(problem, outside),
                workload,
                seconds=seconds,
                seed=seed,
                observed=batches,
                lend=lend,
            )
            return _with_outside_time(report, outside, [model.name for model in models])

        comparisons = []
        for load in loads:
            workload = Workload.poisson({model.name: plan.rate(model.name) * load for model in models})
            aside.print(f"{load:g} × the planned rates, twice {seconds:g} s", highlight=False)
            first, first_observed = await live(workload)
            if (first.lag or 0.0) > MAX_LAG:
                lag = show_seconds(first.lag or 0.0)
                print_labelled("machine busy:", f"send lag p99 {lag}; the comparison is unreliable")
            second, observed = await live(workload)
            outside = outside_time(second, observed)
            comparisons.append(
                Comparison(
                    load=load,
                    live=second,
                    simulated=simulated(workload, recorded_batches(lanes, observed.batches), outside),
                    predicted=simulated(
                        workload, fit_batch_times(lanes, first_observed.batches), outside_time(first, first_observed)
                    ),
                    first=first,
                    profiled=simulated(workload, {}, outside_time(first, first_observed), lend),
                    lent=lend,
                    batches=batch_time_drift(first_observed, observed),
                    slowdowns=slowdowns(plan, problem, observed),
                    outside={name: spent.mean for name, spent in outside.items()},
                )
            )
    return Result(loads=tuple(comparisons))


def slowdowns(plan: Plan, problem: Problem, seen: Observations) -> dict[str, float]:
    """Return batch latencies over profiled ones, by model and share, over all lanes of that share."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            for placement in partition.placements:
                curve = problem.profiles[placement.model, device.kind].curve(partition.share, placement.procs)
                key = f"{placement.model} {show_share(partition.share)}"
                for batch in seen.batches.get((LaneId(device.id, slot), placement.model), ()):
                    sums[key][0] += batch.seconds
                    sums[key][1] += curve[batch.rows - 1]
    return {key: taken / alone for key, (taken, alone) in sums.items() if alone > 0}


def batch_time_drift(before: Observations, after: Observations) -> dict[str, float]:
    """Return batch latencies over those of as many rows in the run before, by model."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for key in before.batches.keys() & after.batches.keys():
        took: defaultdict[int, list[float]] = defaultdict(list)
        for batch in before.batches[key]:
            took[batch.rows].append(batch.seconds)
        means = {rows: statistics.fmean(seconds) for rows, seconds in took.items()}
        for batch in after.batches[key]:
            if batch.rows in means:
                sums[key[1]][0] += batch.seconds
                sums[key[1]][1] += means[batch.rows]
    return {model: now / then for model, (now, then) in sorted(sums.items())}


class OutsideTime(msgspec.Struct, frozen=True):
    """Measure the seconds that requests of a model spend outside of the dispatcher: on sockets, being read and written,
    and in the load generator.

    What callers saw over what its event log tells of the same requests, by mean and by quantile: the few that wait long
    for a processor are late at the p99 and not at the median.
    """

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


def outside_time(report: Report, seen: Observations) -> dict[str, OutsideTime]:
    """Return the time outside by model, of those with answers. With few requests the p99 is taken as the mean."""
    times = {}
    for row in report.models:
        inside = seen.requests.get(row.model)
        if not inside or row.mean is None or row.p50 is None or row.p99 is None:
            continue
        mean = max(0.0, row.mean - statistics.fmean(inside))
        p50, p99 = np.quantile(inside, (0.5, 0.99)).tolist()
        last = max(0.0, row.p99 - p99) if len(inside) >= MIN_REQUESTS else mean
        times[row.model] = OutsideTime(mean=mean, p50=max(0.0, row.p50 - p50), p99=last)
    return times


def _without_outside_time(problem: Problem, outside: Mapping[str, OutsideTime]) -> Problem:
    """Return the problem with targets reduced by the time that requests spend outside."""
    models = tuple(
        msgspec.structs.replace(model, slo=max(model.slo - outside.get(model.name, OutsideTime()).mean, 1e-6))
        for model in problem.models
    )
    return msgspec.structs.replace(problem, models=models)


def _with_outside_time(report: Report, outside: Mapping[str, OutsideTime], names: Sequence[str]) -> Report:
    """Return the report of these models with latencies as callers see them, the time outside included."""

    def later(row: ModelReport) -> ModelReport:
        more = outside.get(row.model, OutsideTime())
        times = {"target": more.mean, "mean": more.mean, "p50": more.p50, "p99": more.p99, "p999": more.p99}
        changed = {name: time + extra for name, extra in times.items() if (time := getattr(row, name)) is not None}
        return msgspec.structs.replace(row, **changed)

    return msgspec.structs.replace(report, models=tuple(later(row) for row in report.models if row.model in names))


def result_view(result: Result) -> RenderableType:
    """Tabulate each load, and summarise the differences between runs."""
    parts: list[RenderableType] = []
    for compared in result.loads:
        slowdowns = ", ".join(f"{name} {factor:.2f}" for name, factor in compared.slowdowns.items())
        outside = show_seconds(max(compared.outside.values(), default=0.0))
        notes = f"batch latency over profile: {slowdowns or '-'}; outside the server up to {outside}"
        parts += [comparison_table(compared), *map(Text, comparison_summary(compared)), Text(notes, style="dim"), ""]
    return Group(*parts[:-1])


def comparison_table(compared: Comparison) -> RenderableType:
    headings = (">requests", ">p50", ">Δ", ">p99", ">Δ", ">attainment", ">Δ", ">batches Δ")
    title = f"{compared.load:g} × the planned rates: simulated; Δ of the live run; Δ of batches between the live runs"
    rows = table(title, "model", *headings)
    for simulated, live in _pairs(compared.simulated, compared.live):
        took = compared.batches.get(simulated.model)
        rows.add_row(
            escape(simulated.model),
            f"{_count(simulated)}",
            _duration(simulated.p50),
            _apart(simulated.p50, live.p50),
            _duration(simulated.p99),
            _apart(simulated.p99, live.p99),
            "-" if simulated.attainment is None else f"{simulated.attainment * 100:.2f} %",
            _points(simulated, live),
            "-" if took is None else f"{(took - 1) * 100:+.0f} %",
        )
    return rows


def comparison_summary(compared: Comparison) -> list[str]:
    """Sum up how far the live run is from the simulation of its own batches, the prediction, and the run before."""
    lag = compared.live.lag or 0.0
    busy = f". Unreliable: the machine was busy, send lag p99: {show_seconds(lag)}"
    return [
        f"simulated with its own batches: {largest_difference(compared.simulated, compared.live)}"
        + (busy if lag > MAX_LAG else ""),
        f"predicted from the first run: {largest_difference(compared.predicted, compared.live)}",
        f"predicted from the profiles{', idle share lent' if compared.lent else ''}: "
        + largest_difference(compared.profiled, compared.live),
        f"the first live run: {largest_difference(compared.first, compared.live)}",
    ]


def largest_difference(one: Report, other: Report) -> str:
    """Return the largest differences of two runs, over models with enough requests."""
    differences = []
    pairs = [(a, b) for a, b in _pairs(one, other) if min(_count(a), _count(b)) >= MIN_REQUESTS]
    for name in ("p50", "p99"):
        parts = {
            a.model: abs(getattr(b, name) / getattr(a, name) - 1)
            for a, b in pairs
            if getattr(a, name) and getattr(b, name)
        }
        if parts:
            worst = max(parts, key=lambda model: parts[model])
            half = statistics.median(parts.values())
            differences.append(f"{name} within {parts[worst] * 100:.1f} % ({worst}), half within {half * 100:.1f}")
    points = {a.model: abs((b.attainment or 0.0) - (a.attainment or 0.0)) for a, b in pairs}
    if points:
        worst = max(points, key=lambda model: points[model])
        differences.append(f"attainment within {points[worst] * 100:.1f} points ({worst})")
    return ", ".join(differences) or f"no model had {MIN_REQUESTS} requests; run longer with --duration"


def _pairs(one: Report, other: Report) -> list[tuple[ModelReport, ModelReport]]:
    rows = {row.model: row for row in other.models}
    return [(row, rows[row.model]) for row in one.models if row.model in rows]


def _count(row: ModelReport) -> int:
    return sum(row.outcomes.values())


def _duration(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def _apart(a: float | None, b: float | None) -> Text:
    if not a or b is None:
        return Text("-")
    return Text(f"{(b / a - 1) * 100:+.0f} %", style="green" if abs(b / a - 1) <= CLOSE else "red")


def _points(a: ModelReport, b: ModelReport) -> Text:
    if a.attainment is None or b.attainment is None:
        return Text("-")
    apart = b.attainment - a.attainment
    return Text(f"{apart * 100:+.1f} pt", style="green" if abs(apart) <= CLOSE else "red")
