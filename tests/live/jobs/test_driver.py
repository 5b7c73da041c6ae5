"""The driver with the real scheduler and real processes, beside a server that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from cotenant.app.jobs import function_of
from cotenant.backends.fake import Fake
from cotenant.control.jobs.events import (
    JobCancelAsked,
    JobPauseAsked,
    JobPlaced,
    JobResumeAsked,
    JobSubmitted,
    PlaceJob,
    StoredJob,
)
from cotenant.control.jobs.options import JobsOptions
from cotenant.control.jobs.scheduler import JobScheduler
from cotenant.core.identity import DeviceId
from cotenant.core.job import BatchInference, Command, Job, JobState, JobStatus, Training
from cotenant.core.tensor import TensorSpec
from cotenant.errors import ConfigError, NotFoundError
from cotenant.live.jobs import driver as module
from cotenant.live.jobs.attempts import Preparation
from cotenant.live.jobs.driver import JobDriver, first_device
from cotenant.live.jobs.pressure import ServingCounts
from cotenant.worker.wire import WorkerModel
from tests.live.jobs.shims import SAY, in_loop, is_alive, parent_of, state_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are held by means of Linux")

DEVICE = DeviceId("fake")


class Server:
    """What jobs see of a server: all of a device is idle, unless a test says otherwise."""

    def __init__(self) -> None:
        self.idle = 1000
        self.seen = ServingCounts(arrived=0, ended=0, missed=0)
        self.loaded = frozenset({"digits"})
        self.took = {"digits": (10.0, 10.0)}

    def counts(self) -> ServingCounts:
        return self.seen

    def devices(self, model: str = "") -> tuple[DeviceId, ...]:
        return (DEVICE,)

    def idle_of(self, device: DeviceId, now: float) -> int | None:
        return self.idle

    def models(self) -> frozenset[str]:
        return self.loaded

    def batch_seconds(self) -> dict[str, tuple[float, float]]:
        return self.took


class World:
    def __init__(self, folder: Path, driver: JobDriver, server: Server) -> None:
        self.folder = folder
        self.driver = driver
        self.server = server

    def submit(self, program: str, *, id: str = "job-1", **options: object) -> None:
        """Submit a command of Python, with `say(name, text)` as in `shims`."""
        work = Command(argv=(sys.executable, "-c", SAY + program))
        self.driver.feed(JobSubmitted(Job(id=id, name="job", work=work, **options)))  # type: ignore[arg-type]

    def status(self, id: str = "job-1") -> JobStatus:
        return next(status for status in self.driver.statuses() if status.job.id == id)

    def said(self, name: str, id: str = "job-1") -> str:
        path = self.folder / id / "work" / name
        return path.read_text() if path.exists() else ""

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition)


def model_of(name: str) -> WorkerModel:
    """A model that takes 5 ms for a row."""
    if name != "digits":
        raise NotFoundError(f"model '{name}' is gone")
    x = TensorSpec("x", "FP32", (-1, 2))
    return WorkerModel(name=name, inputs=(x,), outputs=(TensorSpec("y", "FP32", (-1, 2)),), latencies=(0.005,))


@contextlib.asynccontextmanager
async def world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, restored: Sequence[StoredJob] = (), **options: object
) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "OBSERVE", 0.01)
    monkeypatch.setattr(module, "LOOK", 0.01)
    server = Server()
    preparation = Preparation(folder=folder, function=function_of, model=model_of, background=False)
    scheduler = JobScheduler(JobsOptions(first_delay=0.01))
    driver = JobDriver(scheduler, server, Fake(), preparation, **options)  # type: ignore[arg-type]
    driver.start(restored)
    try:
        yield World(folder, driver, server)
    finally:
        await driver.stop(10.0)


@in_loop
async def test_command_runs_and_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[StoredJob] = []
    async with world(tmp_path, monkeypatch, keep=kept.append) as jobs:
        jobs.submit("print('hello')")
        await jobs.until(lambda: jobs.status().state is JobState.SUCCEEDED)
    assert (tmp_path / "job-1" / "output.txt").read_text() == "hello\n"
    assert [stored.status.state for stored in kept][-1] is JobState.SUCCEEDED


@in_loop
async def test_crashing_job_is_tried_again_as_often_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit("print('broken'); sys.exit(4)", retries=2)
        await jobs.until(lambda: jobs.status().state is JobState.FAILED)
        assert jobs.status().attempt == 3
        assert jobs.status().reason == "it exited with status 4: broken (the last of 3 attempts)"
    output = (tmp_path / "job-1" / "output.txt").read_text()
    assert output == "broken\n--- attempt 2 ---\nbroken\n--- attempt 3 ---\nbroken\n"


@in_loop
async def test_silent_job_has_no_last_line_in_a_later_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit("sys.exit(4)", retries=1)
        await jobs.until(lambda: jobs.status().state is JobState.FAILED)
        assert jobs.status().reason == "it exited with status 4 (the last of 2 attempts)"
    assert (tmp_path / "job-1" / "output.txt").read_text() == "--- attempt 2 ---\n"


@in_loop
async def test_program_that_is_not_there_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        work = Command(argv=("/no/such/program",))
        jobs.driver.feed(JobSubmitted(Job(id="job-1", name="job", work=work)))
        await jobs.until(lambda: jobs.status().state is JobState.FAILED)
        assert jobs.status().attempt == 1 and "/no/such/program" in jobs.status().reason


@in_loop
async def test_training_that_nobody_knows_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.driver.feed(JobSubmitted(Job(id="job-1", name="job", work=Training(source="x"))))
        await jobs.until(lambda: jobs.status().state is JobState.FAILED)
        assert jobs.status().reason.startswith("source: the zoo trains no 'x'")


@in_loop
async def test_inference_waits_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.server.loaded = frozenset()
        work = BatchInference(model="digits", input="in.npy", output="out.npy")
        jobs.driver.feed(JobSubmitted(Job(id="job-1", name="job", work=work)))
        await jobs.until(lambda: "digits" in jobs.status().reason)
        assert jobs.status().state is JobState.QUEUED


@in_loop
async def test_inference_whose_model_is_unloaded_waits_and_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "in.npy", np.ones((150, 2), np.float32))
    async with world(tmp_path / "jobs", monkeypatch) as jobs:
        work = BatchInference(model="digits", input=str(tmp_path / "in.npy"), output=str(tmp_path / "out.npy"))
        jobs.driver.feed(JobSubmitted(Job(id="job-1", name="job", work=work)))
        await jobs.until(lambda: jobs.status().progress.steps > 2)
        jobs.server.loaded = frozenset()
        await jobs.until(lambda: jobs.status().state is JobState.QUEUED and not jobs.status().granted)
        assert "digits" in jobs.status().reason
        assert not (tmp_path / "out.npy").exists()
        before = jobs.status().progress.steps
        jobs.server.loaded = frozenset({"digits"})
        await jobs.until(lambda: jobs.status().state is JobState.SUCCEEDED)
        assert jobs.status().attempt == 2 and jobs.status().progress.steps == 150 > before
    assert np.load(tmp_path / "out.npy").shape == (150, 2)


@in_loop
async def test_inference_whose_inputs_are_gone_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path / "jobs", monkeypatch) as jobs:
        work = BatchInference(model="digits", input=str(tmp_path / "in.npy"), output=str(tmp_path / "out.npy"))
        jobs.driver.feed(JobSubmitted(Job(id="job-1", name="job", work=work)))
        await jobs.until(lambda: jobs.status().state is JobState.FAILED)
        assert jobs.status().attempt == 1
        assert jobs.status().reason == f"{tmp_path / 'in.npy'}: there is no such file of inputs"


TRAINING = """
import os, signal
import cotenant

def train(job):
    path = job.directory / "done"
    done = int(path.read_text()) if path.exists() else 0
    while done < 20:
        done += 1
        path.write_text(str(done))
        if done == 12 and not (job.directory / "crashed").exists():
            (job.directory / "crashed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield cotenant.step(done, 20, loss=1 / done)
"""


@in_loop
async def test_training_that_crashes_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    async with world(tmp_path / "jobs", monkeypatch) as jobs:
        work = Training(source=f"{tmp_path / 'train.py'}:train")
        jobs.driver.feed(JobSubmitted(Job(id="job-1", name="job", work=work)))
        await jobs.until(lambda: jobs.status().state.ended)
        status = jobs.status()
        assert (status.state, status.attempt) == (JobState.SUCCEEDED, 2)
        assert (status.progress.steps, status.progress.total) == (20, 20)
        assert status.progress.metrics == {"loss": 0.05}


BUSY = "say('pid', os.getpid())\nwhile True: time.sleep(0.001)"


@in_loop
async def test_growing_queue_stops_the_job_and_calm_lets_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.said("pid"))
        pid = int(jobs.said("pid"))
        jobs.server.seen = ServingCounts(arrived=0, ended=0, missed=0, waiting={"digits": (50, 9.0)})
        await jobs.until(lambda: state_of(pid) == "T")
        assert jobs.status().granted == 0 and "50 requests wait for digits" in jobs.status().reason
        jobs.server.seen = ServingCounts(arrived=0, ended=0, missed=0)
        await jobs.until(lambda: state_of(pid) != "T")
        assert jobs.status().granted > 0


@in_loop
async def test_slowdown_of_what_is_served_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.status().granted and jobs.said("pid"))
        for _ in range(3):  # an observation that began before the job counts as one without it
            jobs.server.took = {"digits": (jobs.server.took["digits"][0] + 12.0, jobs.server.took["digits"][1] + 10.0)}
            await asyncio.sleep(0.1)
        await jobs.until(lambda: (jobs.status().interference.serving_observed or 0.0) > 1.05)


@in_loop
async def test_paused_job_keeps_its_process_and_uses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.said("pid"))
        pid = int(jobs.said("pid"))
        jobs.driver.feed(JobPauseAsked("job-1"))
        await jobs.until(lambda: state_of(pid) == "T")
        jobs.driver.feed(JobResumeAsked("job-1"))
        await jobs.until(lambda: state_of(pid) != "T")
        assert jobs.status().attempt == 1


@in_loop
async def test_cancelled_job_that_ignores_it_is_killed_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + BUSY, grace=0.05)
        await jobs.until(lambda: jobs.said("pid"))
        jobs.driver.feed(JobCancelAsked("job-1"))
        await jobs.until(lambda: jobs.status().state is JobState.CANCELLED)
        assert not is_alive(int(jobs.said("pid")))


@in_loop
async def test_stop_that_was_asked_for_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.said("pid"))
        jobs.driver.feed(JobCancelAsked("job-1"))
        await jobs.until(lambda: jobs.status().state is JobState.CANCELLED)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@in_loop
async def test_shim_that_hangs_does_not_keep_the_server_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KILLED", 2.0)
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.said("pid"))
        pid = int(jobs.said("pid"))
        os.kill(parent_of(pid), signal.SIGSTOP)
        await jobs.driver.stop(0.0)
    await until(lambda: not is_alive(pid))


@in_loop
async def test_end_of_the_server_lets_jobs_save_and_keeps_them_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "def save(*_):\n say('saved'); sys.exit(0)\nsignal.signal(signal.SIGTERM, save)\n" + BUSY
    kept: list[StoredJob] = []
    async with world(tmp_path, monkeypatch, keep=kept.append) as jobs:
        jobs.submit(program)
        await jobs.until(lambda: jobs.said("pid"))
    assert (tmp_path / "job-1" / "work" / "saved").exists()
    assert kept[-1].status.state is JobState.QUEUED and not kept[-1].failures


@in_loop
async def test_jobs_of_the_last_run_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[StoredJob] = []
    async with world(tmp_path, monkeypatch, keep=kept.append) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.said("pid"))
    async with world(tmp_path, monkeypatch, kept[-1:]) as jobs:
        await jobs.until(lambda: jobs.status().state is JobState.RUNNING)
        assert jobs.status().attempt == 2


@in_loop
async def test_placement_that_fails_lets_the_job_wait_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def place(command: PlaceJob) -> JobPlaced:
        raise ConfigError("no prediction")

    async with world(tmp_path, monkeypatch, place=place) as jobs:
        jobs.submit("pass")
        await jobs.until(lambda: "no prediction" in jobs.status().reason)
        assert jobs.status().state is JobState.QUEUED


@in_loop
async def test_without_jobs_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        looked: list[str] = []
        for name in ("counts", "devices", "idle_of", "models"):
            monkeypatch.setattr(jobs.server, name, lambda *_, name=name: looked.append(name))
        await asyncio.sleep(0.1)
        assert not looked


@in_loop
async def test_batches_of_a_time_without_jobs_count_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        reads = 0

        def batch_seconds() -> dict[str, tuple[float, float]]:
            nonlocal reads
            reads += 1
            return jobs.server.took

        monkeypatch.setattr(jobs.server, "batch_seconds", batch_seconds)
        await jobs.until(lambda: reads)
        jobs.server.took = {"digits": (1010.0, 1010.0)}
        seen = reads
        await jobs.until(lambda: reads > seen)
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.status().granted and jobs.said("pid"))
        seen = reads  # an observation that began before the job counts as one without it
        await jobs.until(lambda: reads > seen + 1)
        jobs.server.took = {"digits": (1030.0, 1020.0)}
        await jobs.until(lambda: jobs.status().interference.serving_observed is not None)
        assert jobs.status().interference.serving_observed == pytest.approx(2.0)


@in_loop
async def test_slowdowns_of_jobs_that_ended_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.driver._slowdowns._beside)
        jobs.driver.feed(JobCancelAsked("job-1"))
        await jobs.until(lambda: not jobs.driver._slowdowns._beside)
        assert jobs.status().state is JobState.CANCELLED


@in_loop
async def test_idle_share_of_before_a_quiet_time_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[PlaceJob] = []

    def place(command: PlaceJob) -> JobPlaced:
        placed.append(command)
        return first_device(command)

    async with world(tmp_path, monkeypatch, place=place) as jobs:
        jobs.submit("pass")
        await jobs.until(lambda: jobs.status().state is JobState.SUCCEEDED)
        await jobs.until(lambda: jobs.driver._resting)
        jobs.server.idle = 0  # since then
        jobs.submit("pass", id="job-2")
        await jobs.until(lambda: "idle share" in jobs.status("job-2").reason)
        assert [command.job.id for command in placed] == ["job-1"]


@in_loop
async def test_jobs_still_yield_after_a_look_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit(BUSY)
        await jobs.until(lambda: jobs.said("pid"))
        with monkeypatch.context() as broken:
            broken.setattr(jobs.server, "counts", lambda: dict[str, int]()["no such model"])
            await jobs.until(lambda: "what serving needs could not be seen" in caplog.text)
        jobs.server.seen = ServingCounts(arrived=0, ended=0, missed=0, waiting={"digits": (50, 9.0)})
        await jobs.until(lambda: state_of(int(jobs.said("pid"))) == "T")


@in_loop
async def test_folder_that_cannot_be_made_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job-1").write_text("a file in its place")
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit("pass", retries=0)
        await jobs.until(lambda: jobs.status().state is JobState.FAILED)
        assert "File exists" in jobs.status().reason


@in_loop
async def test_job_gets_none_of_the_secrets_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COTENANT_TOKEN", "secret")
    async with world(tmp_path, monkeypatch) as jobs:
        jobs.submit("say('environ', dict(os.environ))")
        await jobs.until(lambda: jobs.said("environ"))
        assert "secret" not in jobs.said("environ") and "COTENANT_JOB_DIRECTORY" in jobs.said("environ")
