"""Audits of CPU time, driven by an injected clock."""

from __future__ import annotations

import logging

import pytest

from cotenant.core.identity import LaneId
from cotenant.live.share_audit import EXCESS, WINDOW, ShareAudit

LANE = LaneId.parse("cpu-0/0")
BUDGET = 0.5  # CPU seconds per second that a share of 500 ‰ allows


def audited(*fractions: float) -> ShareAudit:
    """Audit a worker of 500 ‰ that uses these fractions of its budget, each for one window."""
    audit = ShareAudit(LANE, 500, BUDGET)
    used = 7.0
    audit.sample(used, 100.0)
    for number, fraction in enumerate(fractions, 1):
        used += fraction * BUDGET * WINDOW
        audit.sample(used, 100.0 + number * WINDOW)
    return audit


def test_share_audit_before_one_window_knows_no_used_share() -> None:
    audit = ShareAudit(LANE, 500, BUDGET)
    audit.sample(7.0, 100.0)
    audit.sample(9.0, 100.0 + 0.99 * WINDOW)
    assert (audit.used_share, audit.over_share) == (None, False)


def test_share_audit_used_share_is_that_of_the_last_window() -> None:
    assert audited(0.2, 0.6).used_share == pytest.approx(300)


@pytest.mark.parametrize(("used", "over"), [(500 + EXCESS - 1, False), (500 + EXCESS + 1, True)])
def test_share_audit_excess_is_tolerated_up_to_its_limit(used: float, over: bool) -> None:
    audit = audited(used / 500)
    assert audit.used_share == pytest.approx(used)
    assert audit.over_share is over


def test_share_audit_excess_is_logged_once_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    assert not audited(1.4, 1.4, 0.5).over_share
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "cpu-0/0 uses 70 % of its device, and its share is 50 %"
    ]
    caplog.clear()
    audited(1.4, 0.5, 1.4)
    assert len(caplog.records) == 2


def test_used_share_above_a_floor_is_no_breach() -> None:
    audit = ShareAudit(LANE, 500, BUDGET, lent=True)
    audit.sample(7.0, 100.0)
    audit.sample(7.0 + 2 * BUDGET * WINDOW, 100.0 + WINDOW)
    assert audit.used_share == pytest.approx(1000)
    assert not audit.over_share
