"""Ask why Figure 5 does not reproduce in size: clients who wait for answers, and instances that leave a GPU idle.

Section 6 says that clients submit sequentially, with a configured batch size: each sends its next query when the last
one is answered. In the spike all GPUs are in use, so a fixed number of such clients asks for as much as is served. By
Little's law response time is clients over throughput, and a system that serves 2.21 times as much answers in 1/2.21 of
the time, whatever else it does. The paper reports 2.21 and 2.3.

How much more several instances serve than one depends on how much of the GPU one leaves idle. The V100's measurements
are of TensorRT, which hardly does. HetSev's instances are TensorFlow Serving's: by its Figure 1, three of them on a GPU
serve 1.85 times as much as one. `HOST` adds time on the host to each batch, in which its GPU is left to others, such
that this holds. Instances have equal parts of a GPU and do not slow each other otherwise, so gains are upper bounds;
any number of one model may share a GPU, without which two models have two instances on each at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cotenant.control.scaling.hetsev import instance_capacity
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Problem
from cotenant.predictors import NoInterference
from cotenant.sim.run import simulate
from cotenant.workload import Workload
from cotenant.workload.sources import ClosedLoop
from experiments.hetsev import paper
from experiments.hetsev.cluster import MODELS, problem
from experiments.hetsev.instances import InstancePlanner
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "clients who wait, and instances that leave a GPU idle, in Figure 5's spike (HetSev)"

CLIENTS = 40
INSTANCES = (1, 2, 3, 5)  # on a GPU; the first is K8S
SECONDS = 60.0
MEASURED, HOST_BOUND = "as measured", "with host time"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a run of all GPUs, full, for a number of instances on each.

    queries: answered, per second; response_ms: mean time of a query; of_one: queries over those of one instance a GPU,
    response_of_one: response time of that over this one's. paper: its largest of both.
    """

    latencies: str
    instances: int
    queries: float
    response_ms: float
    of_one: float
    response_of_one: float
    paper: str | None = None


def run(options: Options) -> list[Row]:
    rows: list[Row] = []
    for latencies in (MEASURED, HOST_BOUND):
        asked = msgspec.structs.replace(problem(paper.FIG05_MIX), interference=NoInterference())
        if latencies == HOST_BOUND:
            asked = with_host_time(asked)
        rows += rows_of(latencies, {many: answered(asked, many, options.seed) for many in INSTANCES})
    return rows


def with_host_time(asked: Problem) -> Problem:
    """Return the problem with time on the host in every batch, such that instances share as in HetSev's Figure 1."""
    profiles = {}
    for (model, kind), profile in asked.profiles.items():
        host = host_time(profile, MODELS[model][2])
        points = (msgspec.structs.replace(point, latency=point.latency + host) for point in profile.points)
        profiles[model, kind] = Profile(model, kind, points)
    return msgspec.structs.replace(asked, profiles=profiles)


def host_time(profile: Profile, batch: int) -> float:
    """Return the seconds h for which 3 (alone + h) / (third + h) is the paper's gain by three instances.

    alone, third: seconds of a batch on a whole GPU and on a third of one.
    """
    gain, many = paper.FIG01_THROUGHPUT_RATIO, paper.FIG01_INSTANCES
    alone, third = profile.latency(batch, WHOLE), profile.latency(batch, WHOLE // many)
    return max(0.0, (gain * third - many * alone) / (many - gain))


def answered(asked: Problem, instances: int, seed: int) -> tuple[float, float]:
    """Simulate clients who wait, on GPUs with so many instances each; return queries/s and mean seconds of a query."""
    plan = instance_plan(asked, instances)
    models = [model.name for model in asked.models]
    sources = {model: ClosedLoop(CLIENTS // len(models), samples=MODELS[model][2]) for model in models}
    report = simulate(plan, asked, Workload(sources, dict.fromkeys(sources, math.inf)), seconds=SECONDS, seed=seed)
    queries = sum(row.outcomes["served"] / MODELS[row.model][2] for row in report.models) / SECONDS
    return queries, CLIENTS / queries


def instance_plan(asked: Problem, instances: int) -> Plan:
    """Return a plan that fills all GPUs with so many equal instances each, as many of either model."""
    share = WHOLE // instances
    (kind,) = asked.fleet
    fleet = (msgspec.structs.replace(kind, cuts=(share,), max_partitions=instances),)
    rates = {name: instance_capacity(asked, name, kind.name, share) for name in asked.rates}
    return InstancePlanner(share, repeats=True)(msgspec.structs.replace(asked, fleet=fleet, rates=rates))


def rows_of(latencies: str, results: dict[int, tuple[float, float]]) -> list[Row]:
    """Return a row for each number of instances. results: queries/s and seconds of a query."""
    alone, waited = results[1]
    most = max(results)
    claimed = f"{paper.FIG05_THROUGHPUT_RATIO} and {paper.FIG05_RESPONSE_TIME_RATIO}"
    return [
        Row(
            latencies=latencies,
            instances=instances,
            queries=queries,
            response_ms=1e3 * response,
            of_one=queries / alone,
            response_of_one=waited / response,
            paper=claimed if instances == most else None,
        )
        for instances, (queries, response) in results.items()
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [Bar("", row.latencies, f"{row.instances} on a GPU", "simulated", row.of_one) for row in rows]
    lines = [
        ("HetSev, paper, Figure 5, at most", paper.FIG05_THROUGHPUT_RATIO),
        ("three instances, Figure 1", paper.FIG01_THROUGHPUT_RATIO),
    ]
    grouped(path, bars, lines=lines, ylabel="queries over those of one instance a GPU", title="HetSev, Figure 5: why")
