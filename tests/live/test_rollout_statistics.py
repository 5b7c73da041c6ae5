"""What is counted of rollouts that end."""

from __future__ import annotations

import pytest

from cotenant.control.adaptation import Observed, Solve, Solved
from cotenant.control.events import RolloutEnded
from cotenant.control.revision import PlanRevision, RolloutDurations, RolloutOutcome
from cotenant.core.plan import Plan
from cotenant.live.adaptation_statistics import AdaptationStatistics
from cotenant.live.rollout_statistics import Past, RolloutStatistics
from cotenant.live.status import DurationSummary


def ended(number: int, outcome: RolloutOutcome, durations: RolloutDurations) -> RolloutEnded:
    return RolloutEnded(
        PlanRevision(number=number, plan=Plan(planner="hand"), reason="because"), outcome, "", durations
    )


def test_rollout_has_the_late_requests_from_its_request_to_its_end() -> None:
    now = 10.0
    statistics = RolloutStatistics(clock=lambda: now)
    statistics.requested(1, late=7)
    statistics.requested(2, late=9)  # it waits for the first
    first = ended(1, RolloutOutcome.COMPLETED, RolloutDurations(prepare=0.5, switch=0.001, drain=0.1))
    assert statistics.ended(first, late=12) == Past(10.0, first, late=5)
    now = 11.0
    second = ended(2, RolloutOutcome.SUPERSEDED, RolloutDurations(queued=0.6))
    statistics.ended(second, late=12)
    assert list(statistics.last) == [Past(11.0, second, late=3), Past(10.0, first, late=5)]
    assert statistics.outcomes[RolloutOutcome.COMPLETED] == statistics.outcomes[RolloutOutcome.SUPERSEDED] == 1
    assert statistics.phases["prepare"].count == 1 and statistics.phases["queued"].count == 2
    assert statistics.whole.count == 1 and statistics.whole.total == pytest.approx(0.601)


def test_request_that_is_late_during_two_rollouts_counts_once_among_all() -> None:
    statistics = RolloutStatistics(clock=lambda: 10.0)
    statistics.requested(1, late=7)
    statistics.requested(2, late=9)
    statistics.ended(ended(1, RolloutOutcome.COMPLETED, RolloutDurations()), late=12)
    statistics.ended(ended(2, RolloutOutcome.COMPLETED, RolloutDurations()), late=13)
    assert [past.late for past in statistics.last] == [4, 5]
    assert statistics.late == 6
    assert statistics.late_until(20) == 6
    statistics.requested(3, late=20)  # seven missed their target while no rollout was under way
    assert statistics.late == 6 and statistics.late_until(23) == 9
    statistics.ended(ended(3, RolloutOutcome.ABORTED, RolloutDurations()), late=21)
    assert statistics.late == 7


def test_decision_takes_what_it_takes_to_ask_to_solve_and_to_hear_of_the_plan() -> None:
    statistics, plan = AdaptationStatistics(), Plan(planner="hand")
    solve = Solve(number=1, rates={}, current=plan, devices=())
    statistics.decided(Observed(seconds=0.5, offered={}), [solve], seconds=0.001)
    statistics.decided(Observed(seconds=0.5, offered={}), [], seconds=0.002)  # in between, and no part of it
    assert statistics.deciding.count == 0
    statistics.decided(Solved(number=1, plan=plan, seconds=0.25), [], seconds=0.004)
    assert statistics.deciding.count == 1 and statistics.deciding.total == pytest.approx(0.255)
    assert DurationSummary.of(statistics.deciding) == DurationSummary(count=1, p50=0.255, p99=0.255, max=0.255)
    statistics.rolled(Past(10.0, ended(1, RolloutOutcome.COMPLETED, RolloutDurations(prepare=0.5, drain=0.1)), late=3))
    assert statistics.late == 3 and statistics.rollouts.total == pytest.approx(0.6)
