from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cotenant.cli import demo_job
from cotenant.cli.demo_job import JobWatch, check_can_train
from cotenant.core.job import JobId, JobState, JobStatus, Progress
from cotenant.errors import ConfigError
from tests.live.jobs_shown import ended, running, waiting


def at(steps: int, **metrics: float) -> JobStatus:
    return running(progress=Progress(steps=steps, total=3000, share_seconds=steps / 100, metrics=metrics))


def watching(jobs: list[JobStatus], say: Callable[[str], None]) -> JobWatch:
    async def status(id: JobId) -> JobStatus:
        assert id == "digits-1"
        return jobs[0]

    return JobWatch(status, "digits-1", say)


def test_lines_tell_of_what_has_changed_alone() -> None:
    said: list[str] = []
    jobs = [waiting("digits-1")]
    watch = watching(jobs, said.append)

    async def scene() -> None:
        for status in (
            jobs[0],
            at(0),
            at(21, loss=2.1, accuracy=0.4),
            at(25, loss=2.0, accuracy=0.4),
            at(42, accuracy=0.913),
        ):
            jobs[0] = status
            await watch.look()

    asyncio.run(scene())
    assert said == [
        "digits-1: queued, too little memory is free",
        "digits-1: step 0/3000",
        "digits-1: step 21/3000, accuracy 40.0 %",
        "digits-1: step 42/3000, accuracy 91.3 %",
    ]
    text = "42/3000 steps on 0.42 processor seconds that serving left, accuracy from 40.0 % to 91.3 %"
    assert watch.summary(jobs[0]) == text


def test_a_job_that_fails_ends_the_wait_for_it_and_tells_why() -> None:
    failed = ended("digits-1", 5.0, JobState.FAILED, "PyTorch is not installed")
    said: list[str] = []
    watch = watching([failed], said.append)

    async def scene() -> None:
        await watch.until_first_step()
        await watch.follow()

    asyncio.run(scene())
    assert said[0].startswith("digits-1: failed, PyTorch is not installed")
    assert watch.summary(failed).endswith("; failed: PyTorch is not installed")


def test_demo_without_pytorch_says_so_before_it_builds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_job, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'cotenant\[torch\]'"):
        check_can_train()
