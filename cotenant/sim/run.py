"""Simulate one run: a plan, a workload and a seed in, a report out."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import msgspec
import numpy as np

from cotenant.core.identity import LaneId
from cotenant.core.model import Model
from cotenant.core.plan import Partition, Plan
from cotenant.core.request import Request, make_requests
from cotenant.errors import PlanError
from cotenant.measure.ledger import OutcomeLedger
from cotenant.measure.report import Report
from cotenant.planners import Problem
from cotenant.planners.applications import budgets_of, slo_of
from cotenant.planners.capacity import slowdown
from cotenant.planners.check import check
from cotenant.predictors import Load
from cotenant.runtime.applications import Applications, application_specs
from cotenant.runtime.dispatcher import Dispatcher
from cotenant.runtime.events import ApplicationSpec, Applied, Event, LaneSpec, Ready, Reply
from cotenant.runtime.lane_assignment import LaneAssignment
from cotenant.runtime.lane_specs import lane_specs
from cotenant.sim.adaptation import Adaptation, AdaptationDriver
from cotenant.sim.applications import drawn_fanouts, reported_slos
from cotenant.sim.closed_loop import ClosedLoopCallers
from cotenant.sim.jobs import JobsActor, SimulatedJobs, Watch
from cotenant.sim.lending import LendingActor, LentProcessors
from cotenant.sim.loop import Actor, Handle, Script, play
from cotenant.sim.metrics import CountingService
from cotenant.sim.service import BatchTimes, Key, Noise, Overhead, RecordedBatches, Service
from cotenant.sim.workers import Workers
from cotenant.workload import Workload
from cotenant.workload.arrivals import Arrivals, merge_arrivals, random_streams
from cotenant.workload.failures import Failure
from cotenant.workload.sources import ClosedLoop

# Whether a run has shown enough, given the ledgers by name.
Over = Callable[[Mapping[str, OutcomeLedger]], bool]

_BLOCK = 256  # requests generated at a time
_GLANCE = 1024  # requests between two checks whether the run has shown enough

# The violations that keep a plan from running at all; missed targets are for the run to show.
_STANDS = ("kind", "count", "id", "sum", "geometry", "memory", "job", "job twice", "job profile")


def simulate(
    plan: Plan,
    problem: Problem,
    workload: Workload | None = None,
    *,
    seconds: float,
    seed: int = 0,
    failures: Iterable[Failure] = (),
    changes: Iterable[tuple[float, Plan]] = (),
    adaptation: Adaptation | None = None,
    foreign_load: Iterable[tuple[float, float]] = (),
    startup: float | None = None,
    standbys: int = 0,
    overhead: Overhead | None = None,
    observed: Mapping[Key, BatchTimes | RecordedBatches] = MappingProxyType({}),
    lend: bool = False,
    handle: Handle | None = None,
    over: Over | None = None,
    watch_jobs: Watch | None = None,
) -> Report:
    """Simulate a plan under a workload, by default Poisson arrivals at the problem's own rates. Requests and reports
    may be of applications as well as of models.

    The problem is the ground truth: the latency of batches, and its variance (`Noise`), come from its profiles and its
    interference, whatever the plan predicts.

    changes: later plans, and when their rollouts begin; adaptation: a controller that decides that during the run, with
    devices of its own. foreign_load: (time, slowdown of all batches from then on, until the next), for other programs
    on the same machine.
    startup: seconds until a worker is ready; None: as profiled (``start_s``), or 0. standbys: standby workers of each
    device, as `standby_workers` of a server. observed: batch latencies observed
    on a lane, instead of those of profiles and interference. lend: shares of processors are floors, and what is idle is
    lent, as a server does by default; otherwise they are ceilings. handle: replaces that of a new dispatcher, to record
    events and commands. over: called periodically with the ledgers; once it returns True, no more requests arrive.
    Best-effort jobs run where the plans say, decided by the server's scheduler of jobs. watch_jobs: hears what they
    take.

    Raises PlanError for a plan that cannot stand on the problem's devices, or for a rollout during which a device lacks
    the memory for the workers of both plans, and ConfigError for lending where no device has processors.
    """
    workload = Workload.poisson(problem.rates) if workload is None else workload
    for name in (*workload.sources, *workload.timeouts):
        slo_of(problem, name)  # refuses a name that it does not know
    models = {model.name: model for model in problem.models}
    watched = reported_slos(problem, plan, workload)
    ledgers = {each.name: OutcomeLedger() for each in watched}
    service = Service(seed=seed, overhead=overhead)
    processors = LentProcessors(problem) if lend else None
    jobs: SimulatedJobs | None = None

    def lanes(plan: Plan) -> tuple[LaneSpec, ...]:
        _stands(plan, problem)
        return lane_specs(plan, models, problem.profiles)

    def opened(lanes: Mapping[LaneId, LaneAssignment]) -> None:
        service.open([lane.spec for lane in lanes.values()], _really(lanes, problem) | dict(observed))
        if processors is not None:
            processors.open(lanes)
        if jobs is not None:
            jobs.open(lanes)

    def starts(lane: LaneAssignment) -> float:
        return _profiled(lane, problem) if startup is None else startup

    def wholes(plan: Plan) -> tuple[ApplicationSpec, ...]:
        return application_specs(
            problem.applications, {each.name: budgets_of(each, plan.split) for each in problem.applications}
        )

    workers = Workers(plan, problem, lanes, opened, starts, wholes, standbys)
    if any(device.jobs for device in plan.devices):
        rollout = workers.orchestrator.rollout
        jobs = SimulatedJobs(
            plan,
            problem,
            seconds=seconds,
            processors=processors,
            rolling=lambda: rollout.desired is not rollout.revision,
            watch=watch_jobs,
        )
    workers.fail(failures)
    workers.change(changes)
    for time, slower in foreign_load:
        workers.at(time, partial(_slow_down, service, slower))
    driver = None
    if adaptation is not None:
        driver = AdaptationDriver(adaptation, workers, ledgers, seconds)
        driver.start(plan, problem.rates if adaptation.rates is None else adaptation.rates)
    if problem.applications:
        handle = Applications(handle or Dispatcher().handle, drawn_fanouts(problem.applications, seed)).handle
    if workers.cuts:
        handle = workers.hearing(handle or Dispatcher().handle)
    _run(workers, watched, ledgers, workload, service, seconds, seed, handle, over, driver, processors, jobs)
    report = Report.of("simulated", watched, ledgers, seconds, timeouts=workload.timeouts)
    return report if jobs is None else msgspec.structs.replace(report, jobs=jobs.finish())


def _slow_down(service: Service, slowdown: float, now: float) -> None:
    service.slowdown = slowdown


def simulate_lanes(
    lanes: Sequence[LaneSpec],
    models: Sequence[Model],
    workload: Workload,
    service: Service,
    *,
    seconds: float,
    seed: int = 0,
    handle: Handle | None = None,
) -> Report:
    """A workload over any lanes, all of them up; it asks for names of `models` only."""
    ledgers = {model.name: OutcomeLedger() for model in models}
    events: list[tuple[float, Event]] = [(0.0, Applied(tuple(lanes))), *((0.0, Ready(lane.id)) for lane in lanes)]
    _run(Script(events), models, ledgers, workload, service, seconds, seed, handle)
    return Report.of("simulated", models, ledgers, seconds, timeouts=workload.timeouts)


def _run(
    actor: Actor,
    models: Iterable[Model],
    ledgers: Mapping[str, OutcomeLedger],
    workload: Workload,
    service: Service,
    seconds: float,
    seed: int,
    handle: Handle | None,
    over: Over | None = None,
    driver: AdaptationDriver | None = None,
    processors: LentProcessors | None = None,
    jobs: SimulatedJobs | None = None,
) -> None:
    """Simulate, filling the ledgers as requests end."""
    requests, follow = generate_requests(models, workload, seconds, seed)
    if driver is not None:
        requests = driver.count(requests)
    if over is not None:
        requests = _until(requests, lambda: over(ledgers))
    began = actor.began if isinstance(actor, Workers) else None
    busy = None if driver is None else driver.busy
    counted = CountingService(ledgers, service, follow, began, busy)
    serve, ended = counted.serve, counted.ended
    if processors is not None:
        actor = lending = LendingActor(processors, counted, actor)
        serve = lending.serve
    if jobs is not None:
        actor = beside = JobsActor(jobs, service, serve, ended, actor)
        serve, ended = beside.serve, beside.ended
    play(handle or Dispatcher(), requests, serve, ended, actor)


def generate_requests(
    models: Iterable[Model], workload: Workload, seconds: float, seed: int
) -> tuple[Iterator[Request], Callable[[Reply, float], Iterable[Request]] | None]:
    """Generate requests of one row each, numbered from 0, due within their timeout or else their model's target; and
    return the closed-loop callers, which generate theirs from replies, where there are any."""
    numbers = itertools.count()
    within = {model.name: model.slo for model in models} | dict(workload.timeouts)
    rngs = random_streams(seed, workload.sources)
    open_ = {name: source for name, source in workload.sources.items() if not isinstance(source, ClosedLoop)}
    callers = {
        name: ClosedLoopCallers(name, source, rngs[name], within[name], numbers, seconds)
        for name, source in workload.sources.items()
        if isinstance(source, ClosedLoop)
    }
    names = np.array(list(open_), dtype=object)
    timeouts = np.array([within[name] for name in open_])
    chunks = merge_arrivals([source.times(rngs[name]) for name, source in open_.items()], seconds)
    requests = itertools.chain.from_iterable(
        make_requests(
            list(itertools.islice(numbers, len(times))),
            names[sources].tolist(),
            times.tolist(),
            (times + timeouts[sources]).tolist(),
        )
        for times, sources in _blocks(chunks)
    )
    if not callers:
        return requests, None

    def follow(reply: Reply, now: float) -> Iterable[Request]:
        waiting = callers.get(reply.requests[0].model)
        return waiting.next(reply, now) if waiting else ()

    first = [each.first() for each in callers.values()]
    return heapq.merge(requests, *first, key=lambda request: request.arrived), follow


def _blocks(chunks: Arrivals) -> Arrivals:
    """Generate requests in blocks, so that none is made long before it arrives."""
    for times, sources in chunks:
        for start in range(0, len(times), _BLOCK):
            yield times[start : start + _BLOCK], sources[start : start + _BLOCK]


def _until(requests: Iterator[Request], over: Callable[[], bool]) -> Iterator[Request]:
    """Yield requests until the run is over, which is checked every so many requests."""
    while block := list(itertools.islice(requests, _GLANCE)):
        yield from block
        if over():
            return


def _stands(plan: Plan, problem: Problem) -> None:
    wrong = [str(violation) for violation in check(plan, problem) if violation.rule in _STANDS]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise PlanError(f"the plan is for other devices: {wrong[0]}{more}; plan again")


def _really(lanes: Mapping[LaneId, LaneAssignment], problem: Problem) -> dict[Key, BatchTimes | RecordedBatches]:
    """Return the true latencies of batches by lane and model. The ratio to planned latencies, and the variance, are
    those of the largest batch, which matters most under load."""
    batch_times: dict[Key, BatchTimes | RecordedBatches] = {}
    for name, lane in lanes.items():
        kind, share = lane.device.kind, lane.partition.share
        others = list(lane.device.partitions)
        others.remove(lane.partition)
        beside = [_loads(other, kind) for other in others]
        for placement, spec in zip(lane.placements, lane.spec.models, strict=True):
            load = Load(placement.model, kind, placement.batch, share)
            profile = problem.profiles[placement.model, kind]
            takes = profile.latency(placement.batch, share, placement.procs) * slowdown(problem, load, beside)
            slower = takes / placement.latency
            latencies = tuple(seconds * slower for seconds in spec.latencies)
            nearest = profile.nearest(placement.batch, share)
            batch_times[name, placement.model] = BatchTimes(latencies, Noise.of(nearest.features, nearest.latency))
    return batch_times


def _profiled(lane: LaneAssignment, problem: Problem) -> float:
    """Return the profiled seconds that a worker takes to start; 0 where unknown. One process loads all of its models:
    the longest counts."""
    profiles = [(problem.profiles[each.model, lane.device.kind], each.batch) for each in lane.placements]
    return max(
        [known.features(batch, lane.partition.share).get("start_s", 0.0) for known, batch in profiles], default=0.0
    )


def _loads(partition: Partition, kind: str) -> list[Load]:
    return [Load(placement.model, kind, placement.batch, partition.share) for placement in partition.placements]
