"""Simulate applications: random fan-outs, and the SLOs to report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec
import numpy as np

from cotenant.core.application import Application, Fanout
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.runtime.applications import Fanouts
from cotenant.runtime.events import ApplicationSpec
from cotenant.workload import Workload
from cotenant.workload.arrivals import random_streams

_BLOCK = 1024  # draws at a time


def drawn_fanouts(applications: Iterable[Application], seed: int) -> Fanouts:
    """Return fan-outs that draw from one random stream per stage when the application's request arrives, so that the
    n-th request is the same whatever the plan."""
    stages = [(application, number) for application in applications for number in range(len(application.order))]
    rngs = random_streams(
        seed, (f"fan-out {application.name} {application.order[number].name}" for application, number in stages)
    )
    counts = {
        (application.name, number): _counts(application.order[number].fanout, rng)
        for (application, number), rng in zip(stages, rngs.values(), strict=True)
    }

    def fanouts(spec: ApplicationSpec, number: int, times: int) -> Sequence[int]:
        return list(islice(counts[spec.name, number], times))

    return fanouts


def reported_slos(problem: Problem, plan: Plan, workload: Workload) -> list[Model]:
    """Return what a run reports on, applications first.

    A model that only applications use has no SLO of its own: its target is its part of theirs, its attainment 0.
    """
    wholes = [Model(name=app.name, slo=app.slo, attainment=app.attainment) for app in problem.applications]
    parts = [
        model
        if model.name in workload.sources or not problem.applications
        else msgspec.structs.replace(part, attainment=0.0)
        for model, part in zip(problem.models, without_applications(problem, plan.split).models, strict=True)
    ]
    return wholes + parts


def _counts(fanout: Fanout, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from fanout.draw(rng, _BLOCK).tolist()
