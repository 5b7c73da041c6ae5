from __future__ import annotations

from cotenant.control.lead_time import LeadTime


def test_what_is_expected_counts_until_a_plan_or_a_launch_was_timed() -> None:
    lead = LeadTime(plan=2.0, launch=20.0)
    assert (lead.plan, lead.launch, lead.total) == (2.0, 20.0, 22.0)
    lead.in_force(0.0, 1.0)
    assert lead.total == 21.0


def test_longest_of_the_latest_plans_and_launches_counts() -> None:
    lead = LeadTime()
    lead.in_force(10.0, 19.0)
    for asked in (30.0, 40.0, 50.0):
        lead.in_force(asked, asked + 2.0)
    assert lead.plan == 9.0
    lead.in_force(60.0, 63.0)
    assert lead.plan == 3.0, "the first of five is forgotten"
    lead.acquired("v100", 1, 100.0)
    lead.found("v100", 120.0)
    assert (lead.launch, lead.total) == (20.0, 23.0)


def test_device_that_comes_is_the_one_of_its_kind_that_was_asked_for_first() -> None:
    lead = LeadTime()
    lead.acquired("a100", 1, 0.0)
    lead.acquired("v100", 1, 10.0)
    lead.acquired("v100", 1, 50.0)
    lead.found("v100", 60.0)
    assert lead.launch == 50.0
    lead.found("v100", 61.0)
    assert lead.launch == 50.0
    lead.found("v100", 62.0)
    assert lead.launch == 50.0, "nobody asked for the third"


def test_devices_that_do_not_come_tell_nothing() -> None:
    lead = LeadTime()
    lead.acquired("v100", 2, 0.0)
    lead.failed("v100", 2)
    lead.acquired("v100", 1, 100.0)
    lead.found("v100", 105.0)
    assert lead.launch == 5.0
