"""Export what best-effort jobs get and cost. Jobs that have ended are counted, and have no series of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cotenant.core.job import JobState, JobStatus
from cotenant.core.units import WHOLE


def job_families(jobs: Sequence[JobStatus]) -> Iterator[Metric]:
    """Yield the metrics of best-effort jobs."""
    states = Counter(job.state for job in jobs)
    by_state = GaugeMetricFamily("cotenant_jobs", "Best-effort jobs, by state.", labels=("state",))
    for state in JobState:
        by_state.add_metric((state.value,), states[state])
    yield by_state
    current = [job for job in jobs if not job.state.ended]
    steps = CounterMetricFamily("cotenant_job_steps", "Steps that a job has done.", labels=("job",))
    share_seconds = CounterMetricFamily(
        "cotenant_job_share_seconds", "Idle share-seconds that a job has used.", labels=("job",)
    )
    granted = GaugeMetricFamily(
        "cotenant_job_granted_share_ratio", "Share of its device that a job's next step may use.", labels=("job",)
    )
    late = GaugeMetricFamily(
        "cotenant_job_deadline_at_risk", "Whether a job is expected to miss its deadline.", labels=("job",)
    )
    for job in current:
        labels = (job.job.id,)
        steps.add_metric(labels, job.progress.steps)
        share_seconds.add_metric(labels, job.progress.share_seconds)
        granted.add_metric(labels, job.granted / WHOLE)
        if job.job.deadline is not None:
            late.add_metric(labels, float(job.will_miss_deadline))
    yield from (steps, share_seconds, granted, late)
    yield from _slowdowns(current)


def _slowdowns(jobs: Sequence[JobStatus]) -> Iterator[Metric]:
    predicted = GaugeMetricFamily(
        "cotenant_job_slowdown_predicted_ratio",
        "Predicted slowdown: of a job's steps by the models co-located with it, and vice versa.",
        labels=("job", "victim"),
    )
    observed = GaugeMetricFamily(
        "cotenant_job_slowdown_observed_ratio",
        "Observed slowdown: of a job's steps by the models co-located with it, and vice versa.",
        labels=("job", "victim"),
    )
    for job in jobs:
        seen = job.interference
        for family, victim, value in (
            (predicted, "job", seen.job_predicted),
            (predicted, "serving", seen.serving_predicted),
            (observed, "job", seen.job_observed),
            (observed, "serving", seen.serving_observed),
        ):
            if value is not None:
                family.add_metric((job.job.id, victim), value)
    yield from (predicted, observed)
