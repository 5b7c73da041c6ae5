"""Validate plans by simulation.

The planners' forecast ignores the variance of batch latency, and overestimates attainment by up to two points where
models share a partition. So each plan is simulated before it is returned.

A plan is simulated with several seeds, and the requests of all runs are counted together. A run ends early once its
verdict is nearly certain: more requests miss their target than chance explains, or no more than allowed will, even if
the rest miss at the allowed rate. Only a plan that passes all runs is returned.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotenant.core.plan import Plan
from cotenant.core.provenance import WorstAttainment
from cotenant.measure.binomial import CHANCE, binomial_cdf, consistent_with_rate, max_misses
from cotenant.measure.ledger import OutcomeLedger
from cotenant.planners import Problem
from cotenant.planners.applications import carried_rates, slo_of
from cotenant.sim.run import simulate
from cotenant.workload import Workload

# Maximum seconds and requests to simulate with each seed, and the number of seeds.
MAX_SECONDS = 300.0
MAX_REQUESTS = 30_000
RUNS = 3
EARLY_PASS_RISK = 0.02  # probability of failing at the end that is accepted when a plan passes early
# Probability of as many misses, at the allowed rate, below which a plan fails early; misses come in bursts.
EARLY_FAIL_RISK = 0.002


class SimulatedSlos(msgspec.Struct, frozen=True, kw_only=True):
    """Summarise how a plan met its SLOs in the simulator.

    passed: whether none was missed by more than chance explains. seeds: of the runs. requests: answered or missed.
    shortfall: by model or application, the attainment below its objective, where chance does not explain it. worst:
    None without requests.
    """

    passed: bool
    seeds: tuple[int, ...]
    requests: int
    shortfall: dict[str, float]
    worst: WorstAttainment | None


def simulate_slos(
    plan: Plan,
    problem: Problem,
    *,
    runs: int = RUNS,
    chance: float = CHANCE,
    all_verdicts: bool = True,
    max_requests: int = MAX_REQUESTS,
) -> SimulatedSlos:
    """Simulate a plan under Poisson arrivals at the rates that it serves.

    runs: at most, each with its own seed. chance: probability of failing a plan that misses exactly as much as allowed.
    all_verdicts: whether to continue after the first missed SLO, until every verdict is known.
    max_requests: to simulate with each seed.
    """
    rates = {name: rate for name, rate in carried_rates(plan, problem).items() if rate}
    seconds = min(MAX_SECONDS, max_requests / sum(plan.rates().values())) if rates else 0.0
    counts = {
        name: _MissCount(runs * seconds * rate, 1 - slo_of(problem, name).attainment, chance)
        for name, rate in rates.items()
    }
    decided = failed = False

    def over(ledgers: Mapping[str, OutcomeLedger]) -> bool:
        nonlocal decided, failed
        verdicts = []
        for name, count in counts.items():
            stayed = ledgers[name].stayed
            verdicts.append(count.verdict(stayed, stayed - ledgers[name].within_target))
        failed = False in verdicts
        decided = None not in verdicts or (failed and not all_verdicts)
        return decided

    workload = Workload.poisson(rates)
    seeds: list[int] = []
    for seed in range(runs if counts else 0):
        report = simulate(plan, problem, workload, seconds=seconds, seed=seed, over=over)
        seeds.append(seed)
        for row in report.models:
            if row.model in counts:
                counts[row.model].stayed += row.stayed
                counts[row.model].missed += row.missed
        if decided:
            break
    shortfall = {name: count.shortfall for name, count in counts.items() if count.shortfall > 0}
    return SimulatedSlos(
        passed=not failed and not shortfall,
        seeds=tuple(seeds),
        requests=sum(count.stayed for count in counts.values()),
        shortfall=shortfall,
        worst=_worst(counts, problem),
    )


def _worst(counts: Mapping[str, _MissCount], problem: Problem) -> WorstAttainment | None:
    worst = (
        WorstAttainment(
            name=name, attainment=1 - count.missed / count.stayed, objective=slo_of(problem, name).attainment
        )
        for name, count in counts.items()
        if count.stayed
    )
    return min(worst, key=lambda one: one.attainment - one.objective, default=None)


class _MissCount:
    """Count the requests of one model or application, and how many of them missed their target."""

    def __init__(self, expected: float, allowed_rate: float, chance: float) -> None:
        """expected: requests of all runs, approximately. allowed_rate: the fraction that may miss. chance: of
        `simulate_slos`."""
        self.stayed = self.missed = 0
        self._expected = round(expected)
        self._allowed_rate = allowed_rate
        self._chance = chance
        self._allowed = max_misses(self._expected, allowed_rate, chance)

    def verdict(self, stayed: int, missed: int) -> bool | None:
        """Return whether the SLO is met, given these requests of the current run; None as long as that is open."""
        stayed, missed = self.stayed + stayed, self.missed + missed
        if missed > stayed * self._allowed_rate and not consistent_with_rate(
            missed, stayed, self._allowed_rate, EARLY_FAIL_RISK
        ):
            return False
        # Where no miss is allowed, one is assumed: otherwise a pass would seem certain from the start.
        coming = max(self._allowed_rate, 1 / max(self._expected, 1))
        left = max(self._expected - stayed, 0)
        return binomial_cdf(self._allowed - missed, left, coming) > 1 - EARLY_PASS_RISK or None

    @property
    def shortfall(self) -> float:
        """Return by how much the attainment objective was missed; 0 where chance explains it."""
        failed = self.missed > max_misses(self.stayed, self._allowed_rate, self._chance)
        return self.missed / self.stayed - self._allowed_rate if failed else 0.0
