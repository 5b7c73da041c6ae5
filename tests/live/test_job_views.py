"""Best-effort jobs on the page, in a browser too, in metrics and in `cotenant status`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cotenant.core.job import Command, JobState
from cotenant.live.metrics import ServerCollector
from cotenant.live.page.job_views import RECENT_FAILURE, SHOWN_CURRENT, SHOWN_ENDED, job_alarms, job_views
from tests.live.browser import Browser, headless_browser
from tests.live.jobs_shown import ended, running, waiting
from tests.live.test_metrics import SCRAPER, samples
from tests.live.test_page import watching
from tests.live.test_page_browser import EVIL, PageServer


def test_page_shows_running_jobs_first_and_the_last_of_those_that_ended() -> None:
    old = [ended(f"old-{n}", at=n) for n in range(10)]
    views = job_views([*old, waiting("later-2"), running("digits-1")])
    assert [view.job for view in views] == ["digits-1", "later-2", *(f"old-{n}" for n in range(9, 9 - SHOWN_ENDED, -1))]
    first, second, third = views[:3]
    assert (first.health, first.granted, first.total, first.slows) == ("good", 0.5, 1200, 1.02)
    assert (second.health, second.reason, second.device) == ("idle", "too little memory is free", "")
    assert (third.health, third.throughput, third.slowed, third.predicted_end) == ("off", None, None, None)


def test_page_shows_no_more_jobs_than_a_reader_can_take_in() -> None:
    assert len(job_views([running(f"job-{n}") for n in range(500)])) == SHOWN_CURRENT


def test_job_that_yields_is_no_healthy_one() -> None:
    (view,) = job_views([running(granted=0, reason="requests wait")])
    assert (view.health, view.state, view.reason) == ("idle", "running", "requests wait")


def test_alarms_tell_of_deadlines_at_risk_and_of_failures_for_a_while() -> None:
    late = running("late-1", deadline=1010.0, will_miss_deadline=True)
    done = ended("done-2", at=1000.0)
    failed = ended("bad-3", at=1000.0, state=JobState.FAILED, reason="out of memory, 3 times")
    alarms = job_alarms([late, done, failed], now=1001.0)
    assert [(alarm.about, alarm.text) for alarm in alarms] == [
        ("job-late-1", "Job late-1 is expected to miss its deadline."),
        ("job-bad-3", "Job bad-3 failed: out of memory, 3 times."),
    ]
    assert job_alarms([failed], now=1000.0 + RECENT_FAILURE) == []


def test_stream_carries_jobs_as_they_are() -> None:
    async def main() -> None:
        async with watching() as watched:
            assert watched.last("tick")["jobs"] == []
            watched.source.jobs = [running()]
            watched.step()
            (view,) = watched.last("tick")["jobs"]
            assert (view["work"], view["metrics"], view["steps"]) == ("trains digits", {"accuracy": 0.9625}, 600)

    asyncio.run(main())


@pytest.mark.parametrize("accept", ["", SCRAPER])
def test_metrics_count_jobs_by_state_and_give_series_to_those_that_go_on(accept: str) -> None:
    jobs = [running(deadline=1010.0, will_miss_deadline=True), waiting(), ended("old-3", at=1.0)]
    values = samples(ServerCollector((), (), backend="cpu", isolation="a bucket", jobs=jobs), accept)
    wanted = {
        'cotenant_jobs{state="running"}': 1,
        'cotenant_jobs{state="queued"}': 1,
        'cotenant_jobs{state="succeeded"}': 1,
        'cotenant_jobs{state="failed"}': 0,
        'cotenant_job_steps_total{job="digits-1"}': 600,
        'cotenant_job_share_seconds_total{job="digits-1"}': 42.5,
        'cotenant_job_granted_share_ratio{job="digits-1"}': 0.5,
        'cotenant_job_deadline_at_risk{job="digits-1"}': 1,
        'cotenant_job_slowdown_observed_ratio{job="digits-1",victim="serving"}': 1.02,
        'cotenant_job_slowdown_predicted_ratio{job="digits-1",victim="serving"}': 1.1,
    }
    assert wanted.items() <= values.items()
    assert not any("old-3" in name for name in values)
    assert 'cotenant_job_deadline_at_risk{job="later-2"}' not in values


def test_metrics_of_a_server_without_jobs_have_none_of_them() -> None:
    assert not any("job" in name for name in samples(ServerCollector((), (), backend="cpu", isolation="a bucket")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_browser() as found:
        yield found


def test_browser_shows_jobs_while_there_are_any_and_takes_nothing_for_markup(browser: Browser) -> None:
    server = PageServer()
    try:
        browser.open(server.address)
        browser.until("document.querySelector('#model-rows li')")
        assert browser.run("return [document.getElementById('jobs').hidden, document.images.length]") == [True, 1]
        evil = running("evil-1", Command(argv=(EVIL,)), reason=EVIL)
        server.change(lambda source: setattr(source, "jobs", [running(), evil]))
        browser.until("document.querySelectorAll('#job-rows > li').length === 2")
        first = browser.run("return document.getElementById('job-digits-1').textContent")
        assert "trains digits" in first and "600 of 1,200" in first and "accuracy 0.9625" in first
        done = "document.querySelector('#job-digits-1 [role=progressbar]')"
        assert browser.run(f"return [{done}.getAttribute('aria-valuenow'), {done}.children[0].style.width]") == [
            "50",
            "50%",
        ]
        assert EVIL in browser.run("return document.getElementById('job-evil-1').textContent")
        assert browser.run("return [document.images.length, document.title]") == [1, "Cotenant"]
        server.change(lambda source: setattr(source, "jobs", []))
        browser.until("document.getElementById('jobs').hidden")
    finally:
        server.stop()
