"""Plans that the simulator has agreed to.

The forecast, which `planners.solve` goes by, knows nothing of batches that take longer at times, and where models share
a partition it is up to two points too hopeful. So each plan is simulated before it is given, and made anew where that
breaks a promise.

A look at a plan is several runs with seeds of their own, counted together, and ends as soon as its verdict is as good
as sure: that more are missed than chance would have it, or that no more will be in the end, were as many missed from
here on as may be. While the largest rate is looked for, plans are told apart by one run; the one that is given stood
all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from cotenant.core.plan import Device, Plan
from cotenant.measure.binomial import CHANCE, binomial_cdf, consistent_with_rate, max_misses
from cotenant.measure.stats import Tally
from cotenant.planners import Problem, load_planner
from cotenant.planners.applications import carried_rates, slo_of, without_applications
from cotenant.planners.solve import (
    largest_accepted_scale,
    largest_scale,
    meets_slos,
    slo_budget_of,
    solve,
    with_headroom,
    with_slo_budget,
)
from cotenant.sim.run import simulate
from cotenant.workload import Workload

# How much the simulator looks at, at most, with each seed, and how many plans after the first; what becomes of the
# targets of models that are late.
LOOK_SECONDS = 300.0
LOOK_REQUESTS = 30_000
SEEDS = 3
LOOKS = 3
TIGHTER = 0.9
DOUBT = 0.02  # how likely a plan that is agreed to before the end may miss too much in it
RARE = 0.002  # how likely one is to have missed as much as it has that is refused before the end; misses come together
EVEN = 0.2  # how often plans that miss as much as is allowed are passed over where others are left


def validated(planner: str, problem: Problem) -> Plan:
    """The plan of a named planner that keeps promises in the simulator, or comes nearest to it."""
    if problem.objective == "rate":
        split = slo_budget_of(load_planner(planner), problem)
        asked = without_applications(problem, split)
        known: dict[tuple[Device, ...], bool] = {}  # planners often come to the same plan

        def kept(plan: Plan, scaled: Problem) -> bool:
            if plan.devices not in known:
                known[plan.devices] = _Look(msgspec.structs.replace(plan, split=split), problem, 1, EVEN).kept()
            return known[plan.devices]

        def kept_always(plan: Plan, scaled: Problem) -> bool:
            return meets_slos(plan, scaled) and _Look(msgspec.structs.replace(plan, split=split), problem).kept()

        plan = largest_scale(load_planner(planner), asked, judge=kept)
        if plan.scale:
            sure = largest_accepted_scale(plan, asked, accept=kept_always)
            plan = msgspec.structs.replace(sure, objective="rate", bound=plan.bound)
        return with_slo_budget(load_planner(planner), problem, plan, split)
    plan = solve(planner, problem)
    late = _Look(plan, problem).late()
    return _in_time(planner, problem, plan, late) if late else plan


def _in_time(planner: str, problem: Problem, plan: Plan, late: dict[str, float]) -> Plan:
    """For models that are late in the simulator, or whose application is, the plan is made anew with tighter targets.
    That with least late."""
    best, least, asked = plan, late, without_applications(problem, plan.split)
    models = {application.name: application.models() for application in problem.applications}
    for _ in range(LOOKS):
        asked = _tighter(asked, set().union(*(models.get(name, {name}) for name in late)))
        plan = msgspec.structs.replace(with_headroom(load_planner(planner), asked, plan), split=plan.split)
        late = _Look(plan, problem).late()
        if sum(late.values()) < sum(least.values()):
            best, least = plan, late
        if not late:
            break
    return best


class _Count:
    """The requests of one name. total: how many there will be, about; rate: the part that may miss; chance: how often
    who misses at that rate is taken to be late."""

    def __init__(self, total: float, rate: float, chance: float) -> None:
        self.stayed = self.missed = 0
        self._total = round(total)
        self._rate = rate
        self._chance = chance
        self._allowed = max_misses(self._total, rate, chance)

    def kept(self, stayed: int, missed: int) -> bool | None:
        """Whether no more miss than may, once so many more have stayed and missed; None as long as that is open."""
        stayed, missed = self.stayed + stayed, self.missed + missed
        if missed > stayed * self._rate and not consistent_with_rate(missed, stayed, self._rate, RARE):
            return False
        # Where nothing may be missed, one is counted upon: else it would seem sure from the start that none is.
        coming = max(self._rate, 1 / max(self._total, 1))
        return binomial_cdf(self._allowed - missed, max(self._total - stayed, 0), coming) > 1 - DOUBT or None

    @property
    def lacks(self) -> float:
        """How much of its promise it missed, where that is more than chance."""
        late = self.missed > max_misses(self.stayed, self._rate, self._chance)
        return self.missed / self.stayed - self._rate if late else 0.0


class _Look:
    """At a plan, in the simulator, at the rates that are served. runs: at most, each with a seed of its own; chance: as
    of `_Count`."""

    def __init__(self, plan: Plan, problem: Problem, runs: int = SEEDS, chance: float = CHANCE) -> None:
        self._plan = plan
        self._problem = problem
        self._runs = runs
        self._rates = {name: rate for name, rate in carried_rates(plan, problem).items() if rate}
        self._seconds = min(LOOK_SECONDS, LOOK_REQUESTS / sum(plan.rates().values())) if self._rates else 0.0
        self._counts = {
            name: _Count(runs * self._seconds * rate, 1 - slo_of(problem, name).attainment, chance)
            for name, rate in self._rates.items()
        }

    def late(self) -> dict[str, float]:
        """By how much models and applications miss the fraction promised; those that miss it by more than chance."""
        self._run(each=True)
        return {name: count.lacks for name, count in self._counts.items() if count.lacks > 0}

    def kept(self) -> bool:
        """Whether nobody misses more than chance may have it."""
        return not self._run(each=False) and not any(count.lacks > 0 for count in self._counts.values())

    def _run(self, *, each: bool) -> bool:
        """Whether somebody was found to be late. each: until it is known of all, and not only of one that is."""
        decided = late = False

        def over(tallies: Mapping[str, Tally]) -> bool:
            nonlocal decided, late
            verdicts = []
            for name, count in self._counts.items():
                stayed = tallies[name].stayed
                verdicts.append(count.kept(stayed, stayed - tallies[name].on_time))
            late = False in verdicts
            decided = None not in verdicts or (late and not each)
            return decided

        workload = Workload.poisson(self._rates)
        for seed in range(self._runs if self._counts else 0):
            report = simulate(self._problem, self._plan, workload, seconds=self._seconds, seed=seed, over=over)
            for row in report.models:
                if row.model in self._counts:
                    self._counts[row.model].stayed += row.stayed
                    self._counts[row.model].missed += row.missed
            if decided:
                break
        return late


def _tighter(problem: Problem, names: Collection[str]) -> Problem:
    models = (msgspec.structs.replace(it, slo=it.slo * TIGHTER) if it.name in names else it for it in problem.models)
    return msgspec.structs.replace(problem, models=tuple(models))
