"""Tabulate best-effort jobs: what a plan predicts for them, what a run gave them, and what that cost serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.core.plan import Plan
from cotenant.core.units import show_rate, show_seconds
from cotenant.measure.report import JobReport, ModelReport, Report
from cotenant.planners import Problem
from cotenant.planners.forecast import Forecast, JobForecast, forecast_jobs
from cotenant.render.report import show_duration
from cotenant.render.table import table


def planned_jobs(plan: Plan, problem: Problem, served: Forecast) -> list[RenderableType]:
    """Return what is to be said of the jobs of a plan; nothing where it has none. served: its forecast."""
    forecasts = forecast_jobs(plan, problem, served)
    return [job_forecast_table(forecasts, plan.waiting_jobs)] if forecasts or plan.waiting_jobs else []


def reported_jobs(report: Report) -> list[RenderableType]:
    """Return what is to be said of the jobs of a run; nothing where it had none."""
    if report.jobs is msgspec.UNSET:
        return []
    without = () if report.without_jobs is msgspec.UNSET else report.without_jobs
    return [job_report_table(report.jobs), *([job_cost_table(report.models, without)] if without else [])]


def job_forecast_table(forecasts: Mapping[str, JobForecast], waiting: Mapping[str, str]) -> RenderableType:
    """Tabulate the jobs that a plan places, and say why the others wait."""
    rows = table(
        "best-effort jobs, predicted", "job", "device", ">of the device", ">steps/s", ">done after", ">deadline"
    )
    for name, job in forecasts.items():
        rows.add_row(
            escape(name),
            str(job.device),
            _percent(job.share),
            f"{job.steps:.3g}",
            *_ends(job.end, job.deadline, job.end),
        )
    return Group(*([rows] if forecasts else []), *_waiting(waiting))


def job_report_table(jobs: Sequence[JobReport]) -> RenderableType:
    """Tabulate what jobs got in a run, and say why others got nothing."""
    headings = (">steps", ">steps/s", ">predicted", ">share-seconds", ">of what was idle", ">done after", ">deadline")
    rows = table("best-effort jobs", "job", "device", *headings)
    for job in jobs:
        if job.device is None:
            continue
        predicted = "-" if job.predicted_steps_per_s is None else f"{job.predicted_steps_per_s:.3g}"
        numbers = f"{job.steps:,}", f"{job.steps_per_s:.3g}", predicted, show_rate(job.share_seconds)
        end = job.predicted_end if job.ended is None else job.ended
        rows.add_row(
            escape(job.job), job.device, *numbers, _percent(job.idle_part), *_ends(job.ended, job.deadline, end)
        )
    waiting = {job.job: job.reason for job in jobs if job.device is None}
    return Group(*([rows] if rows.rows else []), *_waiting(waiting))


def job_cost_table(models: Sequence[ModelReport], without: Sequence[ModelReport]) -> RenderableType:
    """Compare what is served with and without jobs in the same run."""
    headings = (">p50", ">without jobs", ">p99", ">without jobs", ">attainment", ">without jobs")
    rows = table("serving beside jobs, and without them", "model", *headings)
    for row, other in zip(models, without, strict=True):
        latencies = [show_duration(value) for value in (row.p50, other.p50, row.p99, other.p99)]
        rows.add_row(escape(row.model), *latencies, _attainment(row), _attainment(other))
    return rows


def _ends(end: float | None, deadline: float | None, expected: float | None) -> tuple[str, str]:
    """Return when a job is done and its deadline, which is red where it is, or is expected to be, missed."""
    shown = "-" if end is None else show_seconds(end)
    if deadline is None:
        return shown, "-"
    missed = expected is None or expected > deadline
    return shown, f"[red]{show_seconds(deadline)}, missed[/]" if missed else f"[green]{show_seconds(deadline)}[/]"


def _waiting(waiting: Mapping[str, str]) -> list[Text]:
    return [Text.assemble((f"job {name} waits", "red"), f": {reason}") for name, reason in waiting.items()]


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.0f} %"


def _attainment(row: ModelReport) -> str:
    return "-" if row.attainment is None else f"{row.attainment * 100:.2f} %"
