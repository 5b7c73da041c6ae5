from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import cotenant
from cotenant.errors import ConfigError
from cotenant.worker.jobs.context import as_step, step
from cotenant.worker.jobs.messages import SHARE_SIZE, Failed, FromJob, Lines, Stepped, write_share
from cotenant.worker.jobs.steps import Progress, StepWork, run


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Jobs of files change the working directory and where modules are found."""
    before, path, handler = Path.cwd(), list(sys.path), signal.getsignal(signal.SIGTERM)
    yield
    os.chdir(before)
    sys.path[:] = path
    sys.modules.pop("job", None)
    signal.signal(signal.SIGTERM, handler)


def job(folder: Path, text: str, *, name: str = "work", **options: object) -> tuple[int, list[FromJob]]:
    """Run a job of a file; return the exit status and what it told."""
    path = folder / "job.py"
    path.write_text("import os, signal\nimport cotenant\n" + text)
    work = StepWork(function=f"{path}:{name}", directory=str(folder / "checkpoint"), **options)  # type: ignore[arg-type]
    return told(work)


def told(work: StepWork) -> tuple[int, list[FromJob]]:
    reads, writes = os.pipe()
    share = mmap.mmap(-1, SHARE_SIZE)
    write_share(share, 1000.0)
    try:
        status = run(work, Progress(writes), share)
    finally:
        os.close(writes)
    lines: Lines[FromJob] = Lines(msgspec.json.Decoder(FromJob))
    with os.fdopen(reads, "rb") as file:
        return status, list(lines.feed(file.read()))


def test_steps_are_counted_and_metrics_told(tmp_path: Path) -> None:
    status, heard = job(tmp_path, "def work(job):\n for _ in range(3): yield {'loss': 0.5}")
    assert status == 0
    assert heard[-1] == Stepped(steps=3, metrics={"loss": 0.5})


def test_job_may_count_for_itself_from_its_checkpoint(tmp_path: Path) -> None:
    _, heard = job(tmp_path, "def work(job):\n for done in (8, 9): yield cotenant.step(done, 9, accuracy=0.9)")
    assert heard[-1] == Stepped(steps=9, total=9, metrics={"accuracy": 0.9})


def test_job_ends_after_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    text = """
def work(job):
    try:
        while True: yield
    finally:
        (job.directory / 'saved').touch()
"""
    status, heard = job(tmp_path, text, steps=5)
    assert status == 0 and heard[-1] == Stepped(steps=5, total=5)
    assert (tmp_path / "checkpoint" / "saved").exists()


def test_job_that_is_told_to_stop_saves_at_its_next_step(tmp_path: Path) -> None:
    text = """
def work(job):
    try:
        for step in range(100):
            if step == 2: os.kill(os.getpid(), signal.SIGTERM)
            yield
    finally:
        (job.directory / 'saved').write_text(str(step))
"""
    status, heard = job(tmp_path, text)
    assert status == 1 and heard[-1] == Failed(reason="it was asked to stop")
    assert (tmp_path / "checkpoint" / "saved").read_text() == "2"


def test_job_that_goes_on_when_told_to_stop_ends_all_the_same(tmp_path: Path) -> None:
    text = """
def work(job):
    os.kill(os.getpid(), signal.SIGTERM)
    try: yield
    except GeneratorExit: yield
"""
    assert job(tmp_path, text)[1][-1] == Failed(reason="it was asked to stop")


def test_exception_is_the_reason_and_may_be_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, heard = job(tmp_path, "def work(job):\n yield\n raise ValueError('no\\nway')")
    assert status == 1 and heard[-1] == Failed(reason="ValueError: no way")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def other(job):\n yield", "job.py: no function 'work'; its generator functions are other"),
        ("work = 3", "job.py: no function 'work'"),
        ("def work(job): return 3", "job.py:work: is not a generator function; let it `yield` at the end of each step"),
        ("def work(job):\n yield 'x'", "yield 'x': a job yields cotenant.step(done, total, **metrics), a mapping of"),
        ("def work(job):\n yield {'loss': 'x'}", "step(loss='x'): a metric is a number"),
        ("def work(job:\n yield", "job.py, line 3: '(' was never closed"),
        ("import nothing_like_it\ndef work(job):\n yield", "No module named 'nothing_like_it'; install it where"),
    ],
)
def test_job_that_cannot_work_is_hopeless(tmp_path: Path, text: str, reason: str) -> None:
    status, heard = job(tmp_path, text)
    assert status == 1
    assert isinstance(heard[-1], Failed) and heard[-1].hopeless
    assert reason in heard[-1].reason


def test_file_that_is_gone_is_hopeless(tmp_path: Path) -> None:
    status, heard = told(StepWork(function=f"{tmp_path}/gone.py:work", directory=str(tmp_path)))
    assert (status, heard) == (1, [Failed(reason=f"{tmp_path}/gone.py: there is no such file", hopeless=True)])


def test_job_sees_what_it_was_asked_for(tmp_path: Path) -> None:
    text = "def work(job):\n yield {'b': job.batch, 't': job.threads, 'share': job.share}"
    assert job(tmp_path, text, batch=7, threads=2)[1] == [Stepped(steps=1, metrics={"b": 7, "t": 2, "share": 1.0})]


def test_metrics_that_are_not_finite_are_left_out() -> None:
    assert as_step({"loss": float("nan"), "accuracy": 1.0}, 4) == cotenant.step(5, accuracy=1.0)


@pytest.mark.parametrize("count", [-1, 1.5, "3"])
def test_wrong_count_names_itself(count: object) -> None:
    with pytest.raises(ConfigError, match=r"^step\(done=.*\): a number of steps is a whole number, 0 or more$"):
        step(count)  # type: ignore[arg-type]
