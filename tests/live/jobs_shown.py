"""Best-effort jobs as they stand, for tests of what shows them."""

from __future__ import annotations

from typing import Any

from cotenant.core.identity import DeviceId
from cotenant.core.job import Job, JobInterference, JobState, JobStatus, Progress, Training, Work

DIGITS = Training(source="digits")


def running(name: str = "digits-1", work: Work = DIGITS, *, deadline: float | None = None, **given: Any) -> JobStatus:
    """A job half of whose steps are done, on half of its device."""
    fields: dict[str, Any] = {
        "state": JobState.RUNNING,
        "attempt": 1,
        "device": DeviceId("cpu"),
        "granted": 500,
        "progress": Progress(steps=600, total=1200, share_seconds=42.5, metrics={"accuracy": 0.9625}, throughput=80.0),
        "submitted_at": 900.0,
        "started_at": 901.0,
        "predicted_end": 1015.0,
        "interference": JobInterference(job_observed=1.25, serving_predicted=1.1, serving_observed=1.02),
    }
    return JobStatus(job=Job(id=name, name=name, work=work, deadline=deadline), **(fields | given))


def waiting(name: str = "later-2") -> JobStatus:
    return running(
        name, state=JobState.QUEUED, reason="too little memory is free", attempt=0, device=None, granted=0,
        progress=Progress(), started_at=None, predicted_end=None, interference=JobInterference(),
    )  # fmt: skip


def ended(name: str, at: float, state: JobState = JobState.SUCCEEDED, reason: str = "") -> JobStatus:
    return running(name, state=state, reason=reason, granted=0, ended_at=at, predicted_end=None)
