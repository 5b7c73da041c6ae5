"""Job files and the settings of jobs: what people write, and what is refused with its place."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cotenant.config import read_settings
from cotenant.config.jobs import JobSettings, at_place, parse_deadline, read_job
from cotenant.core.job import BatchInference, Command, JobRequest, Training, Work
from cotenant.errors import ConfigError

ZONE = timezone(timedelta(hours=2))
NOW = datetime(2026, 11, 23, 20, 0, tzinfo=ZONE)


def job_of(tmp_path: Path, text: str) -> JobRequest:
    (tmp_path / "job.toml").write_text(text)
    return read_job(tmp_path / "job.toml", NOW)


def test_job_file_says_what_to_do_and_how(tmp_path: Path) -> None:
    assert job_of(
        tmp_path,
        """
        name = "nightly"
        priority = 5
        memory = "2GiB"
        deadline = "06:00"
        retries = 1
        grace = "1.5s"
        threads = 2
        [training]
        source = "train.py:epochs"
        steps = 100
        """,
    ) == JobRequest(
        work=Training(source=f"{tmp_path}/train.py:epochs", steps=100),
        name="nightly",
        priority=5,
        memory=2 << 30,
        deadline=datetime(2026, 11, 24, 6, 0, tzinfo=ZONE).timestamp(),
        retries=1,
        grace=1.5,
        threads=2,
    )


def test_job_file_needs_no_more_than_its_work(tmp_path: Path) -> None:
    assert job_of(tmp_path, '[training]\nsource = "digits"') == JobRequest(work=Training(source="digits"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write one table of [training], [inference] and [command]"),
        ('[training]\nsource = "a"\n[command]\nargv = ["b"]', "write one table of"),
        ('[training]\nsource = "digits"\nstep = 1', "training: unknown key 'step'; did you mean 'steps'?"),
        ('prioritee = 1\n[training]\nsource = "digits"', "unknown key 'prioritee'; did you mean 'priority'?"),
        ('priority = 0\n[training]\nsource = "digits"', "priority: 0 must be between 1 and 100"),
        ('memory = "5"\n[training]\nsource = "digits"', "memory: '5' has no unit of memory"),
        ('deadline = "yesterday"\n[training]\nsource = "digits"', "deadline: 'yesterday' is not a time"),
        ('name = "a b"\n[training]\nsource = "digits"', "name: 'a b' must begin with a letter"),
        ("[command]\nargv = []", "argv: a command needs a program to run"),
        ('[training]\nsource = "x.py:"', "source: 'x.py:' names nothing to train"),
    ],
)
def test_job_file_that_is_wrong_is_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job_of(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path}/job.toml: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("work", "placed"),
    [
        (Training(source="digits"), Training(source="digits")),
        (Training(source="a.py:f"), Training(source="/here/a.py:f")),
        (Training(source="/there/a.py:f"), Training(source="/there/a.py:f")),
        (
            BatchInference(model="m", input="a", output="/b"),
            BatchInference(model="m", input="/here/a", output="/b"),
        ),
        (Command(argv=("a",)), Command(argv=("a",), directory="/here")),
        (Command(argv=("a",), directory="b"), Command(argv=("a",), directory="/here/b")),
    ],
)
def test_paths_are_relative_to_where_they_are_written(work: Work, placed: Work) -> None:
    assert at_place(work, Path("/here")) == placed


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("06:00", datetime(2026, 11, 24, 6, 0, tzinfo=ZONE)),
        ("20:00:01", datetime(2026, 11, 23, 20, 0, 1, tzinfo=ZONE)),
        ("20:00", datetime(2026, 11, 24, 20, 0, tzinfo=ZONE)),
        ("90min", datetime(2026, 11, 23, 21, 30, tzinfo=ZONE)),
        ("2026-12-01T06:00", datetime(2026, 12, 1, 6, 0, tzinfo=ZONE)),
        ("2026-12-01T06:00+00:00", datetime(2026, 12, 1, 8, 0, tzinfo=ZONE)),
    ],
)
def test_deadline_is_the_next_such_time(text: str, time: datetime) -> None:
    assert parse_deadline(text, "deadline", NOW) == time.timestamp()


@pytest.mark.parametrize("text", ["25:00", "6", "soon", "", "2020-01-01T00:00", "1e15h", "0s", "2026-13-01"])
def test_deadline_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^deadline: "):
        parse_deadline(text, "deadline", NOW)


def test_settings_of_jobs(tmp_path: Path) -> None:
    assert read_settings().jobs == JobSettings(enabled=True, folder=None, commands="user", memory=2 << 30)
    file = tmp_path / "serve.toml"
    file.write_text(
        '[jobs]\nenabled = false\nfolder = "batch"\ncommands = "tokens"\nmemory = "1GiB"\n[tokens]\ncontrol = "t"'
    )
    assert read_settings(file).jobs == JobSettings(
        enabled=False, folder=tmp_path / "batch", commands="tokens", memory=1 << 30
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('commands = "all"', "jobs.commands: 'all' is unknown; use 'off' or 'tokens' or 'user'"),
        ('commands = "tokens"', 'jobs.commands: "tokens" needs a file of tokens for control; name it in [tokens]'),
        ('memory = "1KiB"', "jobs.memory: '1KiB' is less than any process needs; write 256MiB or more"),
        ("slots = 3", "jobs: unknown key 'slots'; available: enabled, folder, commands, memory"),
    ],
)
def test_settings_of_jobs_that_are_wrong_are_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"[jobs]\n{text}")
    with pytest.raises(ConfigError) as raised:
        read_settings(file)
    assert str(raised.value) == f"{file}: {message}"
