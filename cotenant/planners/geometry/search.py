"""Search for the best plan: which candidates are tried, in which order, and which plan is chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.provenance import Candidate, End, Provenance
from cotenant.planners import Problem
from cotenant.planners.candidates import objective_value, provenance_of, with_proof, with_provenance
from cotenant.planners.geometry.budget import COUNTED, Deadline, WorkBudget
from cotenant.planners.geometry.competitors import ALONE, Competitors
from cotenant.planners.geometry.context import MAX_MODELS_FOR_PAIRS, PlanningContext
from cotenant.planners.geometry.device_assembly import DeviceGroup
from cotenant.planners.geometry.large_fleet import solve_large_fleet
from cotenant.planners.geometry.modes import ModeCatalog
from cotenant.planners.geometry.rate_fitting import fitted_plan, plan_from_devices, served_fractions
from cotenant.planners.geometry.small_fleet import (
    MAX_SMALL_FLEET,
    rescaled_current_plan,
    solve_small_fleet,
)
from cotenant.planners.scale_search import SCALE_RATIO, accepts_more, search_scale, serves_all

MAX_BISECTIONS = 6
MAX_DEVICES_TO_RAISE = 40  # up to which larger multiples of the rates are planned for in turn
SECONDS_PER_COMPETITOR = {"bestfit": 5e-6, "squishy": 3e-6, "elastic-plus": 4e-5}  # that they take, for each two models
SECONDS_PER_COMPETITOR_AND_DEVICE = {"bestfit": 2e-6, "squishy": 2e-6, "elastic-plus": 3e-5}  # and for each two devices
COMPETITORS_SHARE = 0.05  # of the time limit, which quick planners may take
TRIES_PER_COMPETITOR = 20  # plans for one multiple of the rates or another, to find the largest that one serves
MIN_SECONDS = 0.01
LOCAL_SEARCH_SHARE = 0.8  # of the work left, for ruin and recreate on devices of one kind
LOCAL_SEARCH_SHARE_OF_MIXED = 0.4  # the same on several kinds, of which integer programs find cheaper fleets
PROGRAMS_SHARE = 0.7  # of the work left, for integer programs before devices are spared
FLEET_SEARCH_SHARE = 0.7  # of the work left, for sparing devices, where something follows that

# Names of the sources of plans.
CURRENT = "geometry, current plan"
RUIN_RECREATE = "geometry, ruin and recreate"
PROGRAM = "geometry, integer program"

Merit = tuple[float, float, float, int, int]
# Reasons why a plan is rejected, by the first part of its merit that is smaller.
REJECTED = (
    "serves a smaller part of the rates",
    "serves less in total",
    "needs more or costlier devices",
    "changes more partitions of the current plan",
    "runs more workers",
)


def search_plan(problem: Problem, competitors: Competitors = ALONE) -> Plan:
    """Return the best plan of the search and its competitors, with the bound."""
    context = PlanningContext(problem)
    limit = context.bound()
    incumbent = Incumbent(context)
    if context.names:
        for source, candidate in _candidates(context, competitors):
            incumbent.offer(source, candidate)
            if _reaches_bound(context, incumbent.plan, limit):
                break
    if context.maximize_scale and limit is not None and context.estimated_devices() <= MAX_DEVICES_TO_RAISE:
        _raise_scale(context, incumbent, limit, competitors)
    plan = msgspec.structs.replace(incumbent.plan, bound=limit, provenance=incumbent.provenance())
    if plan.provenance is None:
        return plan
    plan = with_proof(plan, infeasible=_proves_infeasible(context, plan))
    return with_provenance(plan, ended_by=_ended_by(context, plan))


def _ended_by(context: PlanningContext, plan: Plan) -> End:
    if provenance_of(plan).proven == "optimal":
        return "proof"
    return "clock" if context.budget.deadline.passed else "work"


def _proves_infeasible(context: PlanningContext, plan: Plan) -> bool:
    """Return whether it is proven that no plan serves all rates, where this one does not."""
    if not plan.unserved or context.maximize_scale:
        return False
    if context.has_unservable or context.relaxation is None:
        return True
    return not context.problem.interference.interferes and context.proves_infeasible()


def find_feasible(
    problem: Problem, competitors: Competitors = ALONE, *, thorough: bool = True, deadline: Deadline | None = None
) -> Plan | None:
    """Return any plan that serves the rates; None where none was found.

    thorough: use the full time limit. deadline: of the search that this is a part of.
    """
    context = PlanningContext(problem, deadline)
    if not context.names and not context.has_unservable:
        return plan_from_devices(context, ())
    if context.relaxation is None or context.has_unservable:
        return None
    for source, candidate in _candidates(context, competitors, first=True, thorough=thorough):
        if not candidate.unserved:
            ended_by: End = "clock" if context.budget.deadline.passed else "work"
            return msgspec.structs.replace(candidate, provenance=Provenance(source=source, ended_by=ended_by))
    return None


class Incumbent:
    """Hold the best plan so far, and the best of each source that it was compared with."""

    def __init__(self, context: PlanningContext) -> None:
        self.plan = plan_from_devices(context, ())
        self._context = context
        self._source = "geometry"
        self._merit = merit_of(context, self.plan) if context.names else None
        self._best: dict[str, tuple[Merit, Plan]] = {}
        self._plans: Counter[str] = Counter()

    def offer(self, source: str, plan: Plan) -> None:
        """Take the plan if it has more merit; of equal ones the first stays."""
        merit = self._record(source, plan)
        if self._merit is None or merit > self._merit:
            self._source, self._merit, self.plan = source, merit, plan

    def take(self, source: str, plan: Plan) -> None:
        """Take a plan whatever its merit."""
        self._source, self._merit, self.plan = source, self._record(source, plan), plan

    def provenance(self) -> Provenance | None:
        """Return where the plan comes from; None where there was no candidate."""
        if not self._best:
            return None
        return Provenance(source=self._source, candidates=tuple(self._candidate(source) for source in self._best))

    def _record(self, source: str, plan: Plan) -> Merit:
        merit = merit_of(self._context, plan)
        self._plans[source] += 1
        if source not in self._best or merit > self._best[source][0]:
            self._best[source] = merit, plan
        return merit

    def _candidate(self, source: str) -> Candidate:
        merit, plan = self._best[source]
        return Candidate(
            source=source,
            value=objective_value(plan),
            unserved=math.fsum(plan.unserved.values()),
            plans=self._plans[source],
            rejected="" if source == self._source else self._why_rejected(merit),
        )

    def _why_rejected(self, merit: Merit) -> str:
        assert self._merit is not None
        reasons = (reason for own, best, reason in zip(merit, self._merit, REJECTED, strict=True) if own < best)
        return next(reasons, "no better than one before it")


def _raise_scale(context: PlanningContext, incumbent: Incumbent, limit: float, competitors: Competitors) -> None:
    """Plan for larger multiples of the rates, from that of the incumbent up to the bound."""
    if len(context.catalogs) == 1:
        _raise_scale_by_competitors(context, incumbent, limit, competitors)
    else:
        _raise_scale_by_search(context, incumbent, limit, competitors)


def _raise_scale_by_competitors(
    context: PlanningContext, incumbent: Incumbent, limit: float, competitors: Competitors
) -> None:
    """Take the plan of a quick planner that serves more: without interference few do, which one try each tells."""
    for name, planner in competitors.quick.items():
        if _competitor_seconds(context, name) * TRIES_PER_COMPETITOR > COMPETITORS_SHARE * context.problem.time_limit:
            continue
        best = incumbent.plan
        if not best.scale or accepts_more(planner, context.problem, serves_all, best):
            found = search_scale(planner, context.problem, serves_all, above=best, below=limit * SCALE_RATIO)
            if found.scale > best.scale:
                incumbent.take(name, plan_from_devices(context, found.devices))


def _raise_scale_by_search(
    context: PlanningContext, incumbent: Incumbent, limit: float, competitors: Competitors
) -> None:
    """Search for plans for larger multiples in turn: under interference this finds more than maximising the scale."""
    problem = context.problem
    low, high = max(0.0, incumbent.plan.scale), limit
    for n in range(MAX_BISECTIONS):
        if not context.budget.left():
            break
        multiple = min(max(1.0, low * 1.001), high) if n == 0 else (low + high) / 2
        scaled_problem = msgspec.structs.replace(
            problem,
            rates={name: rate * multiple for name, rate in problem.rates.items()},
            objective="devices",
            time_limit=max(context.budget.left(), MIN_SECONDS) / MAX_BISECTIONS / COUNTED,
        )
        feasible_plan = find_feasible(scaled_problem, competitors, thorough=False, deadline=context.budget.deadline)
        if feasible_plan is not None:
            low = multiple
            incumbent.take(provenance_of(feasible_plan).source, plan_from_devices(context, feasible_plan.devices))
        else:
            high = multiple


def _candidates(
    context: PlanningContext, competitors: Competitors, *, first: bool = False, thorough: bool = True
) -> Generator[tuple[str, Plan], None, None]:
    """Yield plans to choose from, each with its source.

    first: accept any plan that serves the rates. thorough: use the full time limit.
    """
    problem = context.problem
    one_kind = len(context.fleet) == 1
    small = bool(context.names) and context.estimated_devices() <= MAX_SMALL_FLEET
    # Of many models on several kinds, ruin and recreate finds nothing that integer programs do not, and for the largest
    # rates of many models less than annealing.
    few = len(context.names) <= MAX_MODELS_FOR_PAIRS
    small = small and (few or (one_kind and not context.maximize_scale) or sum(context.counts) <= 1)
    quick = (
        [
            (name, planner)
            for name, planner in competitors.quick.items()
            if _competitor_seconds(context, name) <= COMPETITORS_SHARE * problem.time_limit
        ]
        if not context.maximize_scale
        else []
    )
    if context.names and context.current_devices:
        yield CURRENT, _rescaled_current(context)
    exhaustive = competitors.exhaustive
    if (
        not thorough
        or len(context.catalogs) == 1
        or context.maximize_scale
        or (exhaustive is not None and context.estimated_devices() > exhaustive.MAX_DEVICES)
    ):
        exhaustive = None
    if first:
        yield from ((name, plan_from_devices(context, planner(problem).devices)) for name, planner in quick)
        if thorough and context.proves_infeasible():
            return
        if exhaustive is not None and (exhaustive_plan := exhaustive.feasible(problem)) is not None:
            yield exhaustive_plan.planner, plan_from_devices(context, exhaustive_plan.devices)
    local_search = context.budget.part(LOCAL_SEARCH_SHARE if one_kind else LOCAL_SEARCH_SHARE_OF_MIXED)
    for n, catalog in enumerate(context.catalogs):
        budget = context.budget.part(1 / (len(context.catalogs) - n))
        done = small and (
            yield from _with_source(RUIN_RECREATE, solve_small_fleet(context, catalog, local_search, first=first))
        )
        if n == 0 and not first and context.names:
            context.budget.spend(sum(_competitor_seconds(context, name) for name, _ in quick))
            yield from ((name, plan_from_devices(context, planner(problem).devices)) for name, planner in quick)
        # On one device integer programs find nothing that ruin and recreate does not; of several kinds, cheaper fleets.
        done = done and (first or one_kind)
        if done or (small and (first or context.maximize_scale or sum(context.counts) <= 1)):
            continue
        programs = budget.part(PROGRAMS_SHARE)
        ends = not (context.maximize_scale or context.current_devices or problem.interference.interferes)
        fleet_search = budget.part(1.0 if ends else FLEET_SEARCH_SHARE)
        # A small fleet that serves everything has mostly been found by now: some work is left for equal parts of it.
        for_all = programs.part(0.7) if small else programs
        yield from _integer_programs(context, catalog, programs, for_all, fleet_search, first=first)
    if exhaustive is not None and not first:
        exhaustive_plan = exhaustive.plan(problem)
        yield exhaustive_plan.planner, plan_from_devices(context, exhaustive_plan.devices)


def _integer_programs(
    context: PlanningContext,
    catalog: ModeCatalog,
    budget: WorkBudget,
    for_all: WorkBudget,
    fleet_search: WorkBudget,
    *,
    first: bool,
) -> Generator[tuple[str, Plan], None, None]:
    """Yield plans for the rates and, where not all are served and some plan is wanted, for equal parts of them.
    for_all: what of the budget may go into plans for all rates. fleet_search: for sparing devices."""
    served = context.relaxation is not None and (
        yield from _with_source(
            PROGRAM, solve_large_fleet(context, catalog, for_all, fleet_search, maximize_scale=context.maximize_scale)
        )
    )
    # Of devices without a limit, no part of the rates is the largest.
    limited = math.inf not in context.counts
    wanted = not served and not context.maximize_scale and not first and limited
    if wanted and (context.relaxation is None or budget.left()):
        yield from _with_source(PROGRAM, solve_large_fleet(context, catalog, budget, fleet_search, maximize_scale=True))


def _competitor_seconds(context: PlanningContext, name: str) -> float:
    """Return about how long a quick planner takes: the heuristics of the papers try every model with every other, and
    every new partition on all devices before it."""
    models, devices = len(context.names), context.estimated_devices()
    per_pair = SECONDS_PER_COMPETITOR.get(name, max(SECONDS_PER_COMPETITOR.values()))
    per_device = SECONDS_PER_COMPETITOR_AND_DEVICE.get(name, max(SECONDS_PER_COMPETITOR_AND_DEVICE.values()))
    return models**2 * per_pair + devices**2 * per_device


def _with_source(source: str, plans: Generator[Plan, None, bool]) -> Generator[tuple[str, Plan], None, bool]:
    """Yield the plans with their source, and return what their generator does."""
    while True:
        try:
            plan = next(plans)
        except StopIteration as end:
            return bool(end.value)
        yield source, plan


def _rescaled_current(context: PlanningContext) -> Plan:
    """Return the current plan's devices and models, for the rates of the problem."""
    modes = rescaled_current_plan(context, context.catalog)
    groups = []
    for device in context.current_devices:
        kept_modes = tuple(modes[partition] for partition in device.partitions if partition in modes)
        if kept_modes:
            groups.append(DeviceGroup(device.kind, kept_modes, (device.id,)))
    return fitted_plan(context, context.catalog, groups)


def merit_of(context: PlanningContext, plan: Plan) -> Merit:
    """Rank plans, larger is better: least served fraction, total served, price, partitions kept, and fewest workers."""
    fractions = served_fractions(context, plan).tolist()
    total_fraction = 0.0 if context.maximize_scale else sum(min(1.0, fraction) for fraction in fractions)
    workers = sum(placement.procs for _, _, placement in plan.placements())
    return (
        round(min(fractions), 6),
        round(total_fraction, 6),
        -_cost(context, plan),
        _kept_partitions(plan, context.problem.current),
        -workers,
    )


def _reaches_bound(context: PlanningContext, plan: Plan, limit: float | None) -> bool:
    if context.maximize_scale or limit is None or plan.unserved:
        return False
    return _cost(context, plan) * context.price_unit <= limit * (1 + 1e-6)


def _cost(context: PlanningContext, plan: Plan) -> float:
    price = {kind.name: price for kind, price in zip(context.fleet, context.prices, strict=True)}
    return sum(price[device.kind] for device in plan.devices)


def _kept_partitions(plan: Plan, current: Plan | None) -> int:
    """Count partitions that stay on the same device with the same share and models."""

    def partitions_of(side: Plan | None) -> Counter[object]:
        return Counter(
            (device.id, partition.share, frozenset(p.model for p in partition.placements))
            for device in (side.devices if side else ())
            for partition in device.partitions
        )

    return (partitions_of(plan) & partitions_of(current)).total() if current else 0
