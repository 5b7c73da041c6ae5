"""Jobs outlive the server, and no trouble with their file does more than lose what it held."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cotenant.app import job_store
from cotenant.app.job_store import JobStore, jobs_folder, open_jobs
from cotenant.app.jobs import taking_jobs
from cotenant.app.lifecycle import running
from cotenant.app.server_state import state_path
from cotenant.backends.cpu import Cpu
from cotenant.config import Settings, read_settings
from cotenant.config.jobs import JobSettings
from cotenant.control.jobs.events import StoredJob
from cotenant.core.identity import DeviceId
from cotenant.core.job import Command, Job, JobState, JobStatus, Progress
from cotenant.errors import UnavailableError


def stored(number: int, *, failures: int = 0) -> StoredJob:
    job = Job(id=f"job-{number}", name="job", work=Command(argv=("true",)))
    status = JobStatus(
        job=job,
        state=JobState.RUNNING,
        device=DeviceId("cpu"),
        progress=Progress(steps=3, metrics={"accuracy": 1 / 3}),
        submitted_at=float(number),
    )
    return StoredJob(status, failures)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path / "new" / "jobs")
    assert store.open() == ""
    yield store
    store.close()


def reopened(store: JobStore) -> JobStore:
    store.close()
    again = JobStore(store.folder)
    assert again.open() == ""
    return again


def test_jobs_are_what_was_kept_in_the_order_of_their_first_time(store: JobStore) -> None:
    assert store.load() == ()
    for number in (2, 10, 1):
        store.keep(stored(number))
    store.keep(stored(10, failures=1))
    assert store.flush()
    again = reopened(store)
    assert again.load() == (stored(2), stored(10, failures=1), stored(1))
    again.close()


def test_number_is_never_given_twice(store: JobStore) -> None:
    numbers = [store.next_number() for _ in range(3)]
    assert numbers == [1, 2, 3]
    for number in numbers:
        store.keep(stored(number))
    store.forget("job-3")
    again = reopened(store)
    again.load()
    assert again.next_number() == 4
    again.close()


def test_job_that_is_forgotten_takes_its_folder_with_it(store: JobStore) -> None:
    store.keep(stored(1))
    (store.folder_of("job-1") / "checkpoint").mkdir(parents=True)
    store.forget("job-1")
    assert store.flush()
    assert store.load() == ()
    assert not store.folder_of("job-1").exists()


def test_folder_is_its_users_alone(store: JobStore) -> None:
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_folder_without_jobs_is_removed_at_the_end(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs")
    assert store.open() == ""
    store.close()
    assert not (tmp_path / "jobs").exists()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine.txt").write_text("x")
    assert store.open() == ""
    store.close()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["mine.txt"]


def test_second_server_is_told_that_the_folder_is_in_use(store: JobStore) -> None:
    second = JobStore(store.folder)
    assert second.open() == (
        f"another server keeps its jobs in {store.folder}; give this one a folder of its own (jobs.folder)"
    )
    second.close()
    store.keep(stored(1))
    assert store.flush()  # the first was not disturbed
    assert store.key is not None


def test_folder_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert JobStore(tmp_path / "file" / "jobs").open() == (
        f"{tmp_path}/file/jobs: Not a directory; name another folder (jobs.folder)"
    )


def test_broken_file_is_put_aside_and_numbers_go_on_after_the_folders(
    store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    (store.folder / "jobs.sqlite").write_bytes(b"no database" * 100)
    (store.folder / "digits-41").mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.load() == ()
    assert "are broken, and now jobs.sqlite.broken" in caplog.text
    assert (store.folder / "jobs.sqlite.broken").exists()
    assert store.next_number() == 42
    store.keep(stored(42))
    assert store.flush()
    assert store.load() == (stored(42),)


@pytest.mark.parametrize("value", ["{", "[]", '{"status":{"job":1}}', '{"status":null}'])
def test_row_that_cannot_be_read_costs_its_job_alone(store: JobStore, value: str) -> None:
    for number in (1, 2, 7):
        store.keep(stored(number))
    assert store.flush()
    with sqlite3.connect(store.folder / "jobs.sqlite") as database:
        database.execute("UPDATE jobs SET value = ? WHERE id = 'job-7'", (value,))
    database.close()
    again = reopened(store)
    assert again.load() == (stored(1), stored(2))
    assert "jobs of the last run are broken, and left out: job-7: " in again.problem
    assert again.next_number() == 8
    again.close()


def test_journal_of_a_broken_file_is_put_aside_with_it(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def malformed(self: JobStore) -> sqlite3.Connection:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(JobStore, "_connect", malformed)
    (store.folder / "jobs.sqlite").write_bytes(b"malformed")
    (store.folder / "jobs.sqlite-journal").write_bytes(b"of that")
    assert store.load() == ()
    assert (store.folder / "jobs.sqlite.broken-journal").read_bytes() == b"of that"


def test_file_without_tables_has_no_jobs(store: JobStore) -> None:
    (store.folder / "jobs.sqlite").touch()
    assert store.load() == ()
    store.keep(stored(1))
    assert store.flush()
    assert store.load() == (stored(1),)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_may_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    folder.chmod(mode)
    assert "other users may write there" in JobStore(folder).open()
    assert list(folder.iterdir()) == []


def test_values_out_of_range_cost_their_job(store: JobStore) -> None:
    text = msgspec.json.encode(stored(1), enc_hook=str).decode().replace('"priority":1', '"priority":0')
    store.keep(stored(1))
    assert store.flush()
    with sqlite3.connect(store.folder / "jobs.sqlite") as database:
        database.execute("UPDATE jobs SET value = ?", (text,))
    database.close()
    assert store.load() == ()
    assert "priority: 0 must be between 1 and 100" in store.problem


def test_what_cannot_be_written_is_tried_again_after_a_while(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "RETRY", 0.01)
    connect, attempts = JobStore._connect, iter(range(3))

    def full_at_first(self: JobStore) -> sqlite3.Connection:
        if next(attempts, None) is not None:
            raise sqlite3.OperationalError("database or disk is full")
        return connect(self)

    monkeypatch.setattr(JobStore, "_connect", full_at_first)
    store.keep(stored(1))
    with store._changed:
        assert store._changed.wait_for(lambda: not (store._rows or store._writing), 60.0)
    assert store.load() == (stored(1),)


def test_what_cannot_be_written_is_tried_again_with_the_next_job(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_store, "RETRY", 3600.0)
    connect = JobStore._connect

    def full(self: JobStore) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(JobStore, "_connect", full)
    with caplog.at_level(logging.WARNING):
        store.keep(stored(1))
        assert not store.flush()
        store.keep(stored(2))
    assert store.problem == f"{store.folder}/jobs.sqlite: cannot keep jobs for a restart: database or disk is full"
    monkeypatch.setattr(JobStore, "_connect", connect)
    assert store.flush(60.0)  # at once: the next job is not rejected for a disk that was full
    assert store.problem == ""
    assert store.load() == (stored(1), stored(2))
    assert len(caplog.records) == 1  # said once


def test_end_waits_for_no_disk_that_is_full(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: JobStore) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(JobStore, "_connect", full)
    store.keep(stored(1))
    store.close()
    assert store._writer is not None
    assert not store._writer.is_alive()


def test_file_that_is_locked_is_said_and_not_taken_for_empty(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "LOCKED", 0.01)
    store.keep(stored(1))
    assert store.flush()
    with sqlite3.connect(store.folder / "jobs.sqlite", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UnavailableError, match="locked"):
            store.load()
        other.execute("ROLLBACK")
    other.close()
    assert store.load() == (stored(1),)


def test_server_whose_file_is_locked_takes_no_jobs_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "LOCKED", 0.01)
    settings = settings_of(tmp_path)

    async def problem() -> str:
        async with open_jobs(settings) as jobs:
            assert jobs.store is not None
            jobs.store.keep(stored(1))
            assert jobs.store.flush()
            with sqlite3.connect(jobs.store.folder / "jobs.sqlite", isolation_level=None) as other:
                other.execute("BEGIN EXCLUSIVE")
                server: Any = None
                async with taking_jobs(settings, server, server, jobs):
                    said = jobs.service.jobs().problem
                other.execute("ROLLBACK")
            other.close()
            assert jobs.store.load() == (stored(1),)
            return said

    assert "database is locked" in asyncio.run(problem())


# The settings of a server


def settings_of(tmp_path: Path, text: str = "") -> Settings:
    (tmp_path / "serve.toml").write_text(f'state = "state.sqlite"\n{text}')
    return read_settings(tmp_path / "serve.toml")


def test_jobs_lie_beside_the_state_or_where_the_settings_say(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert jobs_folder(settings) == tmp_path / "state.jobs"
    assert jobs_folder(settings).parent == state_path(settings).parent
    assert jobs_folder(settings_of(tmp_path, '[jobs]\nfolder = "batch"')) == tmp_path / "batch"


def test_server_without_jobs_says_why(tmp_path: Path) -> None:
    async def problem(settings: Settings) -> str:
        async with open_jobs(settings) as jobs:
            assert jobs.store is None
            return jobs.service.jobs().problem

    settings = settings_of(tmp_path)
    off = msgspec.structs.replace(settings, jobs=JobSettings(enabled=False))
    assert asyncio.run(problem(off)) == "jobs.enabled = false in the settings"
    assert not (tmp_path / "state.jobs").exists()
    (tmp_path / "state.jobs").write_text("")
    assert asyncio.run(problem(settings)) == f"{tmp_path}/state.jobs: File exists; name another folder (jobs.folder)"


def test_jobs_that_the_next_start_does_not_find_are_said_after_a_reload(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    usual = read_settings("serve.toml")
    shutil.copytree(usual.model_repository, folder / "other")
    other = msgspec.structs.replace(usual, model_repository=folder / "other")
    left = (
        f"jobs stay in {jobs_folder(usual)}, where a restart with the present settings does not look for them; name "
        "that folder (jobs.folder) before you restart"
    )

    async def main() -> None:
        async with running(usual, Cpu()) as server:
            job = await server.jobs.submit(Command(argv=("sleep", "600")))
            assert server.jobs._service.jobs().problem == ""
            await server.reload(other)
            assert server.jobs._service.jobs().problem == left
            await server.reload(other)
            assert caplog.text.count(left) == 1
        named = msgspec.structs.replace(other, jobs=JobSettings(folder=jobs_folder(usual)))
        async with running(named, Cpu()) as server:  # as the message says
            assert [status.job.id for status in await server.jobs.list()] == [job.job.id]
            await server.jobs.cancel(job.job.id)
            await server.reload(msgspec.structs.replace(named, model_repository=usual.model_repository))
            assert server.jobs._service.jobs().problem == ""

    asyncio.run(main())
