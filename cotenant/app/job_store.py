"""Keep best-effort jobs over a restart: a row of an SQLite file and a folder each, in one folder of the server's.

    FOLDER/jobs.sqlite   what is known of each job
    FOLDER/key           who can read it is the user that the server runs as (`live.job_proof`)
    FOLDER/lock          held by the server that uses the folder
    FOLDER/digits-7/     output and checkpoints of that job

Rows are written by a thread: a disk that is slow keeps no request waiting. What cannot be written is tried again with
the next change, and at the end; a row that is broken costs its job, and a file that is broken is put aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from cotenant.app.server_state import local_path
from cotenant.config import Settings
from cotenant.control.jobs.events import StoredJob
from cotenant.core.identity import decode_identity
from cotenant.core.job import JobId
from cotenant.errors import ConfigError, UnavailableError
from cotenant.live.job_proof import JobKey
from cotenant.live.job_service import JobService

logger = logging.getLogger(__name__)

LOCKED = 5.0  # seconds to wait for whoever reads the file, such as a backup
CLOSING = 10.0  # seconds that the last writes may take at the end
RETRY = 5.0  # seconds until what could not be written is tried again


def jobs_folder(settings: Settings) -> Path:
    """Return the folder of the settings, by default one for each state of a server, beside that."""
    if settings.jobs.folder is not None:
        return settings.jobs.folder
    state = local_path(settings)  # jobs run on this machine
    return state.with_name(f"{state.stem}.jobs")


class OpenJobs(NamedTuple):
    """Hold where a server keeps its jobs, and what answers for them. store: None: it takes none, as `service` says."""

    store: JobStore | None
    service: JobService

    def reloaded(self, settings: Settings) -> None:
        """Hear which settings are in force, and so where the next start looks for jobs."""
        if self.store is not None:
            self.store.expect_start_in(jobs_folder(settings))


@asynccontextmanager
async def open_jobs(settings: Settings) -> AsyncIterator[OpenJobs]:
    """Keep the folder of a server's jobs for it within the block. The service has to be given a driver."""
    if not settings.jobs.enabled:
        yield OpenJobs(None, JobService(off="jobs.enabled = false in the settings"))
        return
    store = JobStore(jobs_folder(settings))
    if reason := await asyncio.to_thread(store.open):
        logger.warning("best-effort jobs are off: %s", reason)
        yield OpenJobs(None, JobService(off=reason))
        return
    service = JobService(
        store,
        key=store.key,
        commands=settings.jobs.commands,
        memory=settings.jobs.memory,
        problem=lambda: store.problem or store.left_behind,
    )
    try:
        yield OpenJobs(store, service)
    finally:
        await asyncio.to_thread(store.close)


class JobStore:
    """Load and store jobs: what goes wrong is logged, once until it works again, and is in `problem`.

    `open` comes first, and makes the folder. Only `load` raises.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key: JobKey | None = None
        self.problem = ""
        self.left_behind = ""  # why the next start does not find the jobs; empty where it does
        self._path = folder / "jobs.sqlite"
        self._lock: int | None = None
        self._rows: dict[JobId, StoredJob | None] = {}  # to be written; None: to be removed
        self._number = 0
        self._changed = threading.Condition()
        self._writing = False
        self._failing = False  # what was to be written last could not be
        self._closing = False
        self._writer: threading.Thread | None = None

    def open(self) -> str:
        """Take the folder for this server; return why that cannot be, empty where it could."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = self.folder.stat()
            if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:  # they could add commands to run
                return (
                    f"{self.folder}: other users may write there; make it this user's alone (chmod 700), or name"
                    " another folder (jobs.folder)"
                )
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.key = JobKey.of_file(self.folder / "key")
        except BlockingIOError:
            self._release()
            return f"another server keeps its jobs in {self.folder}; give this one a folder of its own (jobs.folder)"
        except (OSError, ConfigError) as error:
            self._release()
            return f"{self.folder}: {getattr(error, 'strerror', None) or error}; name another folder (jobs.folder)"
        self._writer = threading.Thread(target=self._write_all, name="cotenant-jobs", daemon=True)
        self._writer.start()
        return ""

    def load(self) -> tuple[StoredJob, ...]:
        """Return the jobs that are stored, in the order of their numbers, less rows that are broken; none from a broken
        file, which is put aside. Blocks. Raises UnavailableError for a file that cannot be read now, such as a locked
        one: jobs that were taken without it would get the numbers of those in it."""
        if not self._path.exists():
            return ()
        try:
            rows, number = self._read()
        except sqlite3.OperationalError as error:  # locked, or not to be opened: the file may well be sound
            self._trouble(f"{self._path}: cannot read the jobs of the last run: {error}; start the server again")
            raise UnavailableError(self.problem) from None
        except sqlite3.DatabaseError as error:
            broken = self._path.with_name(self._path.name + ".broken")
            for suffix in ("", "-journal"):  # a journal would be applied to the file that takes this one's place
                with contextlib.suppress(OSError):
                    Path(f"{self._path}{suffix}").replace(f"{broken}{suffix}")
            self._trouble(f"{self._path}: the jobs of the last run are broken, and now {broken.name}: {error}")
            self._number = max([self._number, *self._numbers_of_folders()])
            return ()
        jobs, failures = [], []
        for id, value in rows:  # noqa: A001
            try:
                jobs.append(msgspec.json.decode(value, type=StoredJob, dec_hook=decode_identity))
            except (msgspec.DecodeError, ConfigError, TypeError, UnicodeDecodeError) as error:
                failures.append(f"{id}: {error}")
        if failures:
            self._trouble(f"{self._path}: jobs of the last run are broken, and left out: {'; '.join(failures)}")
        numbers = [_number_of(name) for name, _ in rows]
        self._number = max([self._number, number, *numbers, *(self._numbers_of_folders() if failures else ())])
        return tuple(jobs)

    def _read(self) -> tuple[list[tuple[JobId, bytes]], int]:
        """Return the rows with their ids, and the last number that was given; nothing of tables that are not there."""
        with contextlib.closing(self._connect()) as database:
            database.text_factory = bytes  # so that text which is no UTF-8 costs its row only
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            rows = database.execute("SELECT id, value FROM jobs ORDER BY rowid").fetchall() if b"jobs" in tables else []
            numbers = database.execute("SELECT value FROM numbers").fetchall() if b"numbers" in tables else []
        number = max((value for (value,) in numbers if isinstance(value, int)), default=0)
        return [(name.decode("utf-8", "replace"), value) for name, value in rows if isinstance(name, bytes)], number

    def next_number(self) -> int:
        """Return a number that no job has had."""
        with self._changed:
            self._number += 1
            return self._number

    def keep(self, stored: StoredJob) -> None:
        """Store a job in place of what was stored of it."""
        self._put(stored.status.job.id, stored)

    def forget(self, id: JobId) -> None:
        """Remove a job and its folder."""
        self._put(id, None)

    def expect_start_in(self, folder: Path) -> None:
        """Hear in which folder the next start looks for jobs. They stay in theirs, unlike the state: they write there
        while they run, and may have kept its name."""
        before, self.left_behind = self.left_behind, ""
        if folder != self.folder:
            self.left_behind = (
                f"jobs stay in {self.folder}, where a restart with the present settings does not look for them; name "
                "that folder (jobs.folder) before you restart"
            )
        if self.left_behind not in ("", before) and self._path.exists():
            logger.warning("%s", self.left_behind)

    def folder_of(self, id: JobId) -> Path:
        """Return the folder of a job, which need not exist yet."""
        return self.folder / id

    def flush(self, seconds: float = CLOSING) -> bool:
        """Try at once to write what could not be, and wait until all is written, or something cannot be; return whether
        it is. Blocks."""
        with self._changed:
            self._failing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._rows or self._writing) or self._failing, seconds)
            return not (self._rows or self._writing)

    def close(self) -> None:
        """Write what is left, and give the folder back. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(CLOSING)
        if self._lock is not None and not self._path.exists():  # there was no job: nothing is left behind
            for name in ("key", "lock"):
                (self.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        self._release()

    def _put(self, id: JobId, stored: StoredJob | None) -> None:
        with self._changed:
            self._rows[id] = stored
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closing)
                rows, self._rows = self._rows, {}
                number, closing = self._number, self._closing
                self._writing = bool(rows)
            written = not rows or self._write(rows, number)
            with self._changed:
                self._writing, self._failing = False, not written
                if not written:
                    self._rows = rows | self._rows
                self._changed.notify_all()
                if closing and not (written and self._rows):
                    return
                if not written:
                    self._changed.wait_for(lambda: self._closing or not self._failing, RETRY)

    def _write(self, rows: dict[JobId, StoredJob | None], number: int) -> bool:
        try:
            with contextlib.closing(self._connect()) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, value TEXT NOT NULL)")
                database.execute("CREATE TABLE IF NOT EXISTS numbers (value INTEGER NOT NULL)")
                for id, stored in rows.items():  # noqa: A001
                    if stored is None:
                        database.execute("DELETE FROM jobs WHERE id = ?", (id,))
                    else:
                        value = msgspec.json.encode(stored, enc_hook=str).decode()
                        database.execute(
                            "INSERT INTO jobs VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                            (id, value),
                        )
                database.execute("DELETE FROM numbers")
                database.execute("INSERT INTO numbers VALUES (?)", (number,))
        except (sqlite3.Error, OSError) as error:
            self._trouble(f"{self._path}: cannot keep jobs for a restart: {error}")
            return False
        for id, stored in rows.items():  # noqa: A001
            if stored is None:
                shutil.rmtree(self.folder_of(id), ignore_errors=True)
        self.problem = ""
        return True

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=LOCKED)

    def _numbers_of_folders(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [_number_of(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return []

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _trouble(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("%s", problem)
        self.problem = problem


def _number_of(id: JobId) -> int:
    number = id.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 16 else 0
