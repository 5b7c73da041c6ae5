"""Applications in the simulator: their fan-outs are drawn."""

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
    """Each stage draws from a stream of its own, when the application's request arrives: whatever the plan, the n-th
    request becomes the same."""
    stages = [(application, number) for application in applications for number in range(len(application.order))]
    rngs = random_streams(seed, (f"fan-out {it.name} {it.order[number].name}" for it, number in stages))
    counts = {
        (it.name, number): _counts(it.order[number].fanout, rng)
        for (it, number), rng in zip(stages, rngs.values(), strict=True)
    }

    def fanned(spec: ApplicationSpec, number: int, times: int) -> Sequence[int]:
        return list(islice(counts[spec.name, number], times))

    return fanned


def reported_slos(problem: Problem, plan: Plan, workload: Workload) -> list[Model]:
    """What a run reports on, applications first. Models that only they ask for have promised nobody anything; their
    target is what the plan gives them."""
    wholes = [Model(name=it.name, slo=it.slo, attainment=it.attainment) for it in problem.applications]
    parts = [
        own if own.name in workload.sources or not problem.applications else msgspec.structs.replace(it, attainment=0.0)
        for own, it in zip(problem.models, without_applications(problem, plan.split).models, strict=True)
    ]
    return wholes + parts


def _counts(fanout: Fanout, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from fanout.draw(rng, _BLOCK).tolist()
