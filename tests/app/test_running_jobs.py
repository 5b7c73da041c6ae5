"""Jobs of a server that a program runs: with real processes, over a restart, and with what is refused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import cotenant
from cotenant.app import jobs as app_jobs
from cotenant.errors import ConfigError, InvalidError, NotFoundError, UnavailableError
from cotenant.live.jobs.attempts import Preparation
from cotenant.live.jobs.idle_share import IdleMeter
from tests.live.jobs.shims import LIMIT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are held by means of Linux")

# Says that it runs, and goes on until it finds the file `enough` where it was submitted.
WAITS = "import time, pathlib\nprint('begun', flush=True)\nwhile not pathlib.Path('enough').exists(): time.sleep(0.02)"


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run however busy the machine is."""
    monkeypatch.setattr(app_jobs, "Preparation", partial(Preparation, background=False))
    monkeypatch.setattr(IdleMeter, "read", lambda *_: 1000)


@pytest.fixture
def settings(folder: Path) -> Path:
    path = folder / "serve.toml"
    path.write_text(f'state = "state.sqlite"\n{path.read_text()}')
    return path


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_job_is_run_and_followed_from_a_program(folder: Path, settings: Path) -> None:
    with cotenant.serve(settings) as server:
        submitted = server.jobs.submit(
            cotenant.Command(argv=(sys.executable, "-c", WAITS), directory=str(folder)), name="waits", deadline="2h"
        )
        assert submitted.job.id == "waits-1"
        wait(lambda: server.jobs.output("waits-1").text == "begun\n")
        assert server.jobs.pause("waits-1").state == "paused"
        assert server.jobs.resume("waits-1").state == "running"
        assert [status.job.id for status in server.jobs.list()] == ["waits-1"]
        assert [status.job.id for status in server.status().jobs] == ["waits-1"]
        (folder / "enough").touch()
        assert server.jobs.wait("waits-1").state is cotenant.JobState.SUCCEEDED
        (folder / "job.toml").write_text('[command]\nargv = ["sleep", "1000"]\n')
        status = server.jobs.submit(folder / "job.toml")
        assert server.jobs.cancel(status.job.id).job.work == cotenant.Command(
            argv=("sleep", "1000"), directory=str(folder)
        )
        assert server.jobs.wait(status.job.id).state is cotenant.JobState.CANCELLED


def test_job_goes_on_after_a_restart_and_that_counts_as_no_failure(folder: Path, settings: Path) -> None:
    work = cotenant.Command(argv=(sys.executable, "-c", WAITS), directory=str(folder))
    with cotenant.serve(settings) as server:
        first = server.jobs.submit(work, retries=0, grace=0.1)
        wait(lambda: server.jobs.output(first.job.id).text == "begun\n")
    with cotenant.serve(settings) as server:
        (job,) = server.jobs.list()
        assert job.job == first.job
        wait(lambda: server.jobs.output(job.job.id).text.count("begun\n") == 2)
        (folder / "enough").touch()
        done = server.jobs.wait(job.job.id)
        assert (done.state, done.attempt) == (cotenant.JobState.SUCCEEDED, 2)
        again = server.jobs.submit(work)
        assert again.job.id.endswith("-2")  # numbers are not given again
    with cotenant.serve(settings) as server:
        assert server.jobs.status(job.job.id).state is cotenant.JobState.SUCCEEDED


def test_what_cannot_be_submitted_is_refused(folder: Path, settings: Path) -> None:
    with cotenant.serve(settings) as server:
        with pytest.raises(InvalidError, match=r"source: the zoo trains no 'digit'; did you mean 'digits'\?"):
            server.jobs.submit(cotenant.Training(source="digit"))
        with pytest.raises(InvalidError, match=r"input: '.*/none': there is no such file or folder"):
            server.jobs.submit(cotenant.BatchInference(model="identity", input="none", output="out"))
        with pytest.raises(ConfigError, match="deadline: 'soon' is not a time"):
            server.jobs.submit(cotenant.Training(source="digits"), deadline="soon")
        with pytest.raises(NotFoundError, match="no job 'x-1'"):
            server.jobs.cancel("x-1")
        assert server.jobs.list() == ()
        with cotenant.serve(settings) as second, pytest.raises(UnavailableError, match="another server keeps its jobs"):
            second.jobs.submit(cotenant.Training(source="digits"))
