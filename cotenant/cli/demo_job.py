"""Train a digit reader beside the demo's load, and tell how it fares: `cotenant demo --job`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec

from cotenant.app.running_jobs import RunningJobs
from cotenant.core.job import JobId, JobState, JobStatus, Progress, Training
from cotenant.core.units import show_rate
from cotenant.errors import ConfigError
from cotenant.render.jobs_table import show_steps

DIGIT_READER = Training(source="digits")
METRIC = "accuracy"
TOLD_EVERY = 1.0  # seconds between two lines, at least
FIRST_STEP = 60.0  # seconds that the job has to begin before the load does
PERIOD = 0.1  # seconds between two looks whether it has
_NUMBER = re.compile(r"\d[\d.]*")  # of a reason that is the same as before but for numbers


def check_can_train() -> None:
    """Raise ConfigError where PyTorch is missing, before anything is built or measured for the job."""
    if find_spec("torch") is None:
        raise ConfigError(
            "--job trains with PyTorch, which is not installed; pip install 'cotenant[torch]'; without a GPU, install "
            "PyTorch's CPU build first, as the default brings some 5 GB of CUDA"
        )


class JobWatch:
    """Watch a job. status: returns where it stands. say: takes a line."""

    def __init__(self, status: Callable[[JobId], Awaitable[JobStatus]], job: JobId, say: Callable[[str], None]) -> None:
        self._status = status
        self._job = job
        self._say = say
        self._told: tuple[JobState, str, float | None] | None = None
        self._first: float | None = None  # accuracy, as first reported

    async def look(self) -> JobStatus:
        """Say how far the job is, where anything worth telling has changed."""
        status = await self._status(self._job)
        accuracy = status.progress.metrics.get(METRIC)
        if self._first is None:
            self._first = accuracy
        news = status.state, _NUMBER.sub("", status.reason), accuracy
        if news != self._told:
            self._told = news
            self._say(describe_job(status))
        return status

    async def until_first_step(self) -> None:
        """Wait until the job has begun, or ended, or a minute is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_STEP
        while loop.time() < deadline:
            status = await self._status(self._job)
            if status.progress.steps or status.state.ended:
                return
            await asyncio.sleep(PERIOD)

    async def follow(self) -> None:
        """Look now and then, until this is cancelled or the job has ended."""
        while not (await self.look()).state.ended:
            await asyncio.sleep(TOLD_EVERY)

    def summary(self, status: JobStatus) -> str:
        """Say what the job came to."""
        progress = status.progress
        text = (
            f"{show_steps(progress)} steps on {show_rate(progress.share_seconds)} processor seconds that serving left"
        )
        last = progress.metrics.get(METRIC)
        if self._first is not None and last is not None:
            text += f", {METRIC} from {_percent(self._first)} to {_percent(last)}"
        if status.state not in (JobState.RUNNING, JobState.SUCCEEDED):
            text += f"; {status.state}" + (f": {status.reason}" if status.reason else "")
        return text


@asynccontextmanager
async def training(jobs: RunningJobs, say: Callable[[str], None]) -> AsyncIterator[JobWatch]:
    """Train within the block, which begins with the job's first step, and say how far it is."""
    submitted = await jobs.submit(DIGIT_READER)
    watch = JobWatch(jobs.status, submitted.job.id, say)
    await watch.until_first_step()
    following = asyncio.create_task(watch.follow())
    try:
        yield watch
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def describe_job(status: JobStatus) -> str:
    """Say in a line how far a job is."""
    told = [status.state.value] if status.state is not JobState.RUNNING else []
    told += [status.reason] if status.reason else []
    if status.progress != Progress():
        told += [f"step {show_steps(status.progress)}"]
        told += [f"{name} {_percent(value)}" for name, value in status.progress.metrics.items() if name == METRIC]
    return f"{status.job.id}: {', '.join(told) or 'starting'}"


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"
