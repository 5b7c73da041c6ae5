"""One simulated run: lanes, arrivals and a seed in, a report out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.request import Request
from cotenant.measure.report import Report
from cotenant.measure.stats import Tally
from cotenant.planners import Problem
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import Applied, Died, Event, LaneSpec, Ready, Reply, Run
from cotenant.runtime.lanes import lane_id, lanes_of
from cotenant.sim.loop import Handle, play
from cotenant.sim.service import Service
from cotenant.workload.arrivals import Arrivals, independent


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The worker of a lane dies at `time`; another is up after `restart` seconds. Both in seconds."""

    lane: str
    time: float
    restart: float


def simulate(
    problem: Problem,
    plan: Plan,
    *,
    seconds: float,
    seed: int = 0,
    rates: Mapping[str, float] | None = None,
    deaths: Iterable[Death] = (),
    per_batch: float = 0.0,
    per_request: float = 0.0,
) -> Report:
    """What the plan does under Poisson arrivals at `rates` (requests/s by model), or else at the problem's own.

    Batches vary as the profile says (feature ``cv_pct``: standard deviation over mean, in percent), and take
    `per_batch` and `per_request` seconds longer than it says.
    """
    rates = problem.rates if rates is None else rates
    for name in rates:
        problem.model(name)  # refuses a name that it does not know
    arrivals = independent({model.name: rates.get(model.name, 0.0) for model in problem.models}, seconds, seed)
    lanes = lanes_of(plan, {model.name: model for model in problem.models}, problem.profiles)
    service = Service(lanes, seed, _cv(plan, problem), per_batch=per_batch, per_request=per_request)
    return run(lanes, problem.models, arrivals, service, seconds, deaths=deaths)


def run(
    lanes: tuple[LaneSpec, ...],
    models: Sequence[Model],
    arrivals: Arrivals,
    service: Service,
    seconds: float,
    *,
    deaths: Iterable[Death] = (),
    handle: Handle | None = None,
) -> Report:
    """Any arrivals over any lanes. `arrivals` count their sources as `models` does.

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
    for death in deaths:
        events.append((death.time, Died(death.lane, "as planned")))
        events.append((death.time + death.restart, Ready(death.lane)))
    play(handle or Dispatcher().handle, requests(models, arrivals), serve, ended, events)
    return Report.of("simulated", models, tallies, seconds)


def requests(models: Sequence[Model], arrivals: Arrivals) -> Iterator[Request]:
    """Requests of one row each, numbered from 0, due within their model's target."""
    numbers = itertools.count()
    named = [(model.name, model.slo) for model in models]
    for times, sources in arrivals:
        for time, source in zip(times.tolist(), sources.tolist(), strict=True):
            name, slo = named[source]
            yield Request(next(numbers), name, time, time + slo)


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
