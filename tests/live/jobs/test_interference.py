from __future__ import annotations

import pytest

from cotenant.live.jobs.interference import ENOUGH, JobSlowdowns


def test_slowdown_is_of_the_model_that_is_slowed_most() -> None:
    seen = JobSlowdowns()
    seen.observe({"a": (11.0, 10.0), "b": (9.0, 10.0)}, [])
    seen.observe({"a": (11.0 + 12.1, 20.0), "b": (9.0 + 9.9, 20.0)}, ["job-1"])
    assert seen.slowdown("job-1") == pytest.approx(1.1)
    seen.observe({"a": (11.0 + 12.1, 20.0), "b": (9.0 + 9.9 + 13.5, 30.0)}, ["job-1"])
    assert seen.slowdown("job-1") == pytest.approx((23.4 / 20) / 0.9)


def test_what_ran_faster_beside_the_job_is_no_slowdown() -> None:
    seen = JobSlowdowns()
    seen.observe({"a": (11.0, 10.0)}, [])
    seen.observe({"a": (20.0, 20.0)}, ["job-1"])
    assert seen.slowdown("job-1") == 1.0


def test_too_few_batches_on_either_side_tell_nothing() -> None:
    seen = JobSlowdowns()
    assert seen.slowdown("job-1") is None
    seen.observe({"a": (ENOUGH / 2, ENOUGH / 2)}, [])
    seen.observe({"a": (50.0, 50.0)}, ["job-1"])
    assert seen.slowdown("job-1") is None


def test_jobs_are_told_apart_and_forgotten() -> None:
    seen = JobSlowdowns()
    seen.observe({"a": (10.0, 10.0)}, [])
    seen.observe({"a": (30.0, 20.0)}, ["job-1", "job-2"])
    seen.observe({"a": (40.0, 30.0)}, ["job-2"])
    assert (seen.slowdown("job-1"), seen.slowdown("job-2")) == (2.0, 1.5)
    seen.forget_others(["job-1"])
    assert (seen.slowdown("job-1"), seen.slowdown("job-2")) == (2.0, None)
