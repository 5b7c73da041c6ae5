"""What is counted of rollouts that end."""

from __future__ import annotations

from cotenant.control.events import RolloutEnded
from cotenant.control.revision import PlanRevision, RolloutDurations, RolloutOutcome
from cotenant.core.plan import Plan
from cotenant.live.rollout_statistics import Past, RolloutStatistics


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
