"""Describe best-effort jobs for the page, and what somebody should look at about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cotenant.core.job import JobState, JobStatus, describe_work
from cotenant.core.units import WHOLE
from cotenant.live.page.snapshot import Alarm, JobView

SHOWN_ENDED = 5  # jobs that have ended, the latest
SHOWN_CURRENT = 50  # jobs that have not
RECENT_FAILURE = 600.0  # seconds for which a job that failed is told


def job_views(jobs: Iterable[JobStatus]) -> list[JobView]:
    """Describe the jobs that have not ended, running ones first, then the last of those that have."""
    jobs = list(jobs)
    current = sorted((job for job in jobs if not job.state.ended), key=lambda job: job.state is not JobState.RUNNING)
    ended = sorted((job for job in jobs if job.state.ended), key=lambda job: -(job.ended_at or 0.0))
    return [_view(job) for job in (*current[:SHOWN_CURRENT], *ended[:SHOWN_ENDED])]


def job_alarms(jobs: Sequence[JobStatus], now: float) -> list[Alarm]:
    """Return what somebody should look at. now: in seconds since 1970."""
    found = []
    for status in jobs:
        about, name = f"job-{status.job.id}", status.job.id
        if status.state is JobState.FAILED and now - (status.ended_at or 0.0) < RECENT_FAILURE:
            found.append(Alarm("warn", about, f"Job {name} failed{f': {status.reason}' if status.reason else ''}."))
        elif status.will_miss_deadline and not status.state.ended:
            found.append(Alarm("warn", about, f"Job {name} is expected to miss its deadline."))
    return found


def _view(status: JobStatus) -> JobView:
    progress, seen = status.progress, status.interference
    runs = status.state is JobState.RUNNING
    return JobView(
        job=status.job.id,
        work=describe_work(status.job.work),
        state=status.state.value,
        health=_health(status),
        reason=status.reason,
        device="" if status.device is None else str(status.device),
        granted=status.granted / WHOLE,
        steps=progress.steps,
        total=progress.total,
        throughput=progress.throughput if runs else None,
        share_seconds=progress.share_seconds,
        metrics=progress.metrics,
        attempt=status.attempt,
        deadline=status.job.deadline,
        predicted_end=status.predicted_end if runs else None,
        late=status.will_miss_deadline and not status.state.ended,
        slowed=seen.job_observed if runs else None,
        slows=seen.serving_observed if runs else None,
    )


def _health(status: JobStatus) -> str:
    if status.state is JobState.FAILED:
        return "bad"
    if status.state.ended:
        return "off"
    return "good" if status.state is JobState.RUNNING and status.granted else "idle"
