"""Reproduce Figure 1 by a model: throughput and GPU utilisation by the number of a model's instances on one GPU.

HetSev measured four models in TensorFlow Serving; nobody published such runs. So this is a model of them. An instance
alternates between a batch on the GPU, which takes what was measured on its part of a V100, and time on the host
(`fig05_clients.host_time`), in which its part of the GPU is idle. Host time is set for each model such that three
instances serve 1.85 times as much as one, the paper's mean, so throughput with three is no result. What two serve, and
utilisation, are. "as measured" has no host time.

Utilisation is what the driver reports, the part of time in which any instance runs, for instances that take turns
independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from experiments.hetsev import paper
from experiments.hetsev.cluster import MODELS, problem
from experiments.hetsev.fig05_clients import HOST_BOUND, MEASURED, host_time
from experiments.parallel import Options
from experiments.plotting import Bar, grouped

TITLE = "throughput and GPU utilisation by instances on one GPU, modelled (HetSev, Figure 1)"

INSTANCES = (1, 2, 3)
MEAN = "mean"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a model's instances on one GPU.

    throughput: rows/s; utilisation: percent of the time; of_one: throughput over one instance's, utilisation_of_one:
    the same. paper: what it has of both, of three instances and the mean of its models.
    """

    latencies: str
    model: str
    instances: int
    throughput: float | None
    utilisation: float | None
    of_one: float
    utilisation_of_one: float
    paper: str | None = None


def run(options: Options) -> list[Row]:
    """Compute all rows. The result is deterministic."""
    profiles = problem(dict.fromkeys(MODELS, 1.0)).profiles
    rows = [
        row
        for latencies in (MEASURED, HOST_BOUND)
        for (model, _), profile in profiles.items()
        for row in rows_of(latencies, model, profile, MODELS[model][2])
    ]
    return [
        *rows,
        *(mean_of(rows, latencies, instances) for latencies in (MEASURED, HOST_BOUND) for instances in INSTANCES),
    ]


def rows_of(latencies: str, model: str, profile: Profile, batch: int) -> list[Row]:
    """Return a row for each number of instances of one model. batch: rows of each query."""
    host = host_time(profile, batch) if latencies == HOST_BOUND else 0.0
    found = [instances_on_one(profile, batch, host, instances) for instances in INSTANCES]
    alone, busy = found[0]
    return [
        Row(
            latencies=latencies,
            model=model,
            instances=instances,
            throughput=throughput,
            utilisation=100 * utilisation,
            of_one=throughput / alone,
            utilisation_of_one=utilisation / busy,
        )
        for instances, (throughput, utilisation) in zip(INSTANCES, found, strict=True)
    ]


def instances_on_one(profile: Profile, batch: int, host: float, instances: int) -> tuple[float, float]:
    """Return the rows/s of equal instances on one GPU, and the part of time in which it runs. host: seconds a batch."""
    running = profile.latency(batch, WHOLE // instances)
    busy = running / (running + host)
    return instances * batch / (running + host), 1 - (1 - busy) ** instances


def mean_of(rows: Sequence[Row], latencies: str, instances: int) -> Row:
    """Return the mean of the models' ratios."""
    mine = [row for row in rows if (row.latencies, row.instances) == (latencies, instances)]
    reported = f"{paper.FIG01_THROUGHPUT_RATIO} and {paper.FIG01_UTILISATION_RATIO}"
    return Row(
        latencies=latencies,
        model=MEAN,
        instances=instances,
        throughput=None,
        utilisation=None,
        of_one=float(np.mean([row.of_one for row in mine])),
        utilisation_of_one=float(np.mean([row.utilisation_of_one for row in mine])),
        paper=reported if instances == paper.FIG01_INSTANCES else None,
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    bars = [
        Bar(f"{panel}, {row.latencies}", row.model, f"{row.instances} on a GPU", "modelled", height)
        for panel, ratio in (("throughput", "of_one"), ("utilisation", "utilisation_of_one"))
        for row in rows
        for height in [getattr(row, ratio)]
    ]
    lines = [
        ("throughput of three, paper", paper.FIG01_THROUGHPUT_RATIO),
        ("utilisation of three, paper", paper.FIG01_UTILISATION_RATIO),
    ]
    grouped(path, bars, lines=lines, ylabel="over one instance's", title="HetSev, Figure 1, modelled")
