"""Draw best-effort jobs as a table for terminals: `cotenant jobs list`, `cotenant status`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.markup import escape
from rich.table import Table

from cotenant.core.job import JobState, JobStatus, Progress, describe_work
from cotenant.core.units import show_count, show_memory, show_rate, show_share
from cotenant.render.table import shorten_middle, table

_STYLES = {JobState.FAILED: "red", JobState.SUCCEEDED: "green", JobState.CANCELLED: "dim"}
_SECONDS, _MINUTES, _HOURS = 100, 6000, 360_000  # below which a time is told in seconds, minutes, hours


def jobs_table(jobs: Iterable[JobStatus], now: float) -> Table:
    """Return a table with a row a job. now: unix seconds."""
    rows = table(
        "best-effort jobs", "job", "state", ">steps", ">steps/s", ">granted", ">share- seconds", ">ends", "work"
    )
    for column in rows.columns[:-1]:
        column.no_wrap = True
    for status in jobs:
        runs = status.state is JobState.RUNNING
        ends = "-" if status.predicted_end is None or not runs else show_ahead(status.predicted_end - now)
        rows.add_row(
            escape(shorten_middle(status.job.id)),
            f"[{_STYLES[status.state]}]{status.state}[/]" if status.state in _STYLES else str(status.state),
            show_steps(status.progress),
            show_rate(status.progress.throughput) if runs and status.progress.steps else "-",
            show_share(status.granted) if runs else "-",
            show_rate(status.progress.share_seconds),
            f"[yellow]{ends}[/]" if status.will_miss_deadline and not status.state.ended else ends,
            escape(describe_work(status.job.work)),
        )
    return rows


def job_notes(jobs: Iterable[JobStatus], now: float) -> list[str]:
    """Return what is to be told of jobs below their table: why they wait or failed, and deadlines at risk."""
    notes = []
    for status in jobs:
        told = [status.reason] if status.reason else []
        if status.will_miss_deadline and not status.state.ended and status.job.deadline is not None:
            told.append(f"expected to miss its deadline, {show_ahead(status.job.deadline - now)}")
        if told:
            notes.append(f"{status.job.id}: {'; '.join(told)}")
    return notes


def job_details(status: JobStatus, now: datetime) -> Table:
    """Return a table of all that is known of a job. now: with the time zone of the times that are shown."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    job, progress = status.job, status.progress
    slowed = status.interference

    def moment(time: float | None) -> str:
        if time is None:
            return ""
        return f"{datetime.fromtimestamp(time, now.tzinfo):%Y-%m-%d %H:%M:%S} ({show_ahead(time - now.timestamp())})"

    def factors(predicted: float | None, observed: float | None) -> str:
        told = [f"{value:.2f} x {how}" for value, how in ((predicted, "predicted"), (observed, "observed")) if value]
        return ", ".join(told)

    runs = status.state is JobState.RUNNING
    deadline = moment(job.deadline)
    if deadline and status.will_miss_deadline:
        deadline += "; was missed" if status.state.ended else "; expected to be missed"
    known = {
        "job": job.id,
        "work": describe_work(job.work),
        "state": f"{status.state}: {status.reason}" if status.reason else str(status.state),
        "steps": f"{show_steps(progress)}, {show_rate(progress.throughput)}/s" if progress.steps else "",
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items()),
        "device": f"{status.device or ''}" + (f", {show_share(status.granted)} granted" if runs else ""),
        "taken": f"{show_rate(progress.share_seconds)} share-seconds",
        "priority": str(job.priority),
        "memory": "" if job.memory is None else show_memory(job.memory),
        "attempt": f"{status.attempt}, with at most {show_count(job.retries, 'retry', 'retries')} after failures",
        "submitted": moment(status.submitted_at),
        "started": moment(status.started_at),
        "ended": moment(status.ended_at),
        "predicted end": moment(status.predicted_end),
        "deadline": deadline,
        "its steps take": factors(slowed.job_predicted, slowed.job_observed),
        "serving takes": factors(slowed.serving_predicted, slowed.serving_observed),
    }
    for name, text in known.items():
        if text:
            rows.add_row(name, escape(text))
    return rows


def show_steps(progress: Progress) -> str:
    """Format how many steps are done, and of how many: ``600/1200``; ``-`` of a job that has none, or none yet."""
    if progress.total is None:
        return str(progress.steps) if progress.steps else "-"
    return f"{progress.steps}/{progress.total}"


def show_ahead(seconds: float) -> str:
    """Format a time from now, two digits being enough: ``in 45 s``, ``in 12 min``, ``3 h ago``."""
    size = abs(seconds)
    if size < 1:
        return "now"
    if size < _SECONDS:
        text = f"{size:.0f} s"
    elif size < _MINUTES:
        text = f"{size / 60:.0f} min"
    else:
        text = f"{size / 3600:.0f} h" if size < _HOURS else f"{size / 86400:.0f} d"
    return f"in {text}" if seconds > 0 else f"{text} ago"
