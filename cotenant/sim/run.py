"""One simulated run: lanes, a workload and a seed in, a report out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.request import Request
from cotenant.measure.report import Report
from cotenant.measure.stats import Tally
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Event, LaneSpec, Ready, Reply, Run
from cotenant.runtime.lanes import lane_id, lanes_of
from cotenant.sim.failures import Failure, failing
from cotenant.sim.loop import Handle, play
from cotenant.sim.service import Service
from cotenant.workload import Workload
from cotenant.workload.arrivals import arrivals


def simulate(
    problem: Problem,
    plan: Plan,
    workload: Workload | None = None,
    *,
    seconds: float,
    seed: int = 0,
    failures: Iterable[Failure] = (),
    per_batch: float = 0.0,
    per_request: float = 0.0,
    handle: Handle | None = None,
) -> Report:
    """What the plan does under a workload, or else under Poisson arrivals at the problem's own rates.

    Batches vary as the profile says (feature ``cv_pct``: standard deviation over mean, in percent), and take
    `per_batch` and `per_request` seconds longer than it says. handle: as of `run`.
    """
    workload = Workload.poisson(problem.rates) if workload is None else workload
    for name in (*workload.sources, *workload.timeouts):
        problem.model(name)  # refuses a name that it does not know
    lanes = lanes_of(plan, {model.name: model for model in problem.models}, problem.profiles)
    service = Service(lanes, seed, _cv(plan, problem), per_batch=per_batch, per_request=per_request)
    return run(lanes, problem.models, workload, service, seconds=seconds, seed=seed, failures=failures, handle=handle)


def run(
    lanes: tuple[LaneSpec, ...],
    models: Sequence[Model],
    workload: Workload,
    service: Service,
    *,
    seconds: float,
    seed: int = 0,
    failures: Iterable[Failure] = (),
    handle: Handle | None = None,
) -> Report:
    """A workload over any lanes; it asks for names of `models` only.

    handle: takes the place of a fresh dispatcher's, to record what it is told and answers.
    """
    tallies = {model.name: Tally() for model in models}

    def serve(run: Run) -> float:
        rows, predicted, took = service(run)
        tallies[run.model].ran(rows, predicted, took)
        return took

    def ended(reply: Reply, now: float) -> tuple[()]:
        tallies[reply.requests[0].model].ended(reply.requests, reply.outcome, now)
        return ()

    events: list[tuple[float, Event]] = [(0.0, Applied(lanes)), *((0.0, Ready(lane.id)) for lane in lanes)]
    events += failing(failures, lanes)
    play(handle or Dispatcher().handle, requests(models, workload, seconds, seed), serve, ended, events)
    return Report.of("simulated", models, tallies, seconds)


def requests(models: Iterable[Model], workload: Workload, seconds: float, seed: int) -> Iterator[Request]:
    """Requests of one row each, numbered from 0, due within their timeout or else their model's target."""
    numbers = itertools.count()
    within = {model.name: model.slo for model in models} | dict(workload.timeouts)
    named = [(name, within[name]) for name in workload.sources]
    for times, sources in arrivals(workload, seconds, seed):
        for time, source in zip(times.tolist(), sources.tolist(), strict=True):
            name, timeout = named[source]
            yield Request(next(numbers), name, time, time + timeout)


def _cv(plan: Plan, problem: Problem) -> dict[tuple[str, str], float]:
    """How much batches vary, by lane and model; at the largest batch, which is the one that matters under load."""
    cv: dict[tuple[str, str], float] = {}
    for device in plan.devices:
        for slot, partition in enumerate(device.partitions):
            for placement in partition.placements:
                profile = problem.profiles[placement.model, device.kind]
                features = profile.features(placement.batch, partition.share)
                cv[lane_id(device, slot), placement.model] = features.get("cv_pct", 0.0) / 100
    return cv
