"""Let one of several front ends serve at a time: whoever holds a lease, a row of an SQLite file that all can write.

The holder counts the row up; the others watch the count by their own clocks, and one of them takes the lease once that
has stood still. So no clock is compared with another's. A front end that was frozen, or does not reach the file any
more, may believe for a moment that it holds the lease; it then gives it up. Nothing runs twice even in that moment: a
node serves one front end at a time (`live.nodes.agent`), and so fences the others off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar, TypeVarTuple

import msgspec

from cotenant.errors import ConfigError, LeaseError

logger = logging.getLogger(__name__)

RENEW = 0.2  # seconds between two counts of the holder
POLL = 0.1  # seconds between two looks of another
EXPIRES = 1.0  # seconds without a count after which another takes the lease
ATTEMPT = 0.4  # seconds for one count
ATTEMPTS = 2  # that fail in a row, after which the holder lets go: about when another takes the lease
LOCKED = 0.3  # seconds to wait for another that writes

_TABLE = (
    "CREATE TABLE IF NOT EXISTS lease"
    " (one INTEGER PRIMARY KEY CHECK (one = 1), holder TEXT NOT NULL, host TEXT NOT NULL, count INTEGER NOT NULL)"
)


_Args = TypeVarTuple("_Args")
_T = TypeVar("_T")


class Holder(msgspec.Struct, frozen=True):
    """Say who holds a lease, and how far it has counted. holder: random, of one process; empty: nobody does."""

    holder: str
    host: str
    count: int


class LeaseFile:
    """Take, renew and release a lease, each in one transaction. Raises sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._holder = secrets.token_hex(16)
        self._host = socket.gethostname()

    def claim(self, expired: Holder | None) -> Holder:
        """Take the lease if nobody holds it, or if its row still is the one that has `expired`; return its row."""
        with contextlib.closing(self._connect()) as database:
            database.execute(_TABLE)
            if (known := _row(database)).holder and known != expired:
                return known  # who only looks does not keep the holder from writing
            database.execute("BEGIN IMMEDIATE")
            if (known := _row(database)).holder and known != expired:
                return known
            mine = Holder(self._holder, self._host, known.count + 1)
            database.execute("REPLACE INTO lease VALUES (1, ?, ?, ?)", (mine.holder, mine.host, mine.count))
            database.execute("COMMIT")
            return mine

    def holds(self, row: Holder) -> bool:
        return row.holder == self._holder

    def renew(self) -> bool:
        """Count up; return False where another holds the lease."""
        return self._update("UPDATE lease SET count = count + 1 WHERE holder = ?")

    def release(self) -> bool:
        """Let another take the lease at once."""
        return self._update("UPDATE lease SET count = count + 1, holder = '' WHERE holder = ?")

    def _update(self, statement: str) -> bool:
        with contextlib.closing(self._connect()) as database:
            return database.execute(statement, (self._holder,)).rowcount == 1

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=LOCKED, isolation_level=None)
        # What a machine that loses power forgets is no loss: its lease expires.
        database.execute("PRAGMA synchronous = OFF")
        return database


def _row(database: sqlite3.Connection) -> Holder:
    row = database.execute("SELECT holder, host, count FROM lease").fetchone()
    return Holder("", "", 0) if row is None else Holder(*row)


class FrontEndLease:
    """Take a lease in `held`, renew it, also while the server drains, and release it at the end of the outer block:
    once nodes are free. path: of its file; None: there is no other front end, and nothing to hold. Its file is made in
    its folder, which has to be there."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = None if path is None else LeaseFile(path)
        self._thread = ThreadPoolExecutor(1, "cotenant-lease")  # no planning or profiling keeps it waiting
        self._taken = False
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FrontEndLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        if self._file is not None and self._taken:
            with contextlib.suppress(sqlite3.Error):  # then it expires
                await self._in_thread(self._file.release)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[*_Args], _T], *args: *_Args) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    @asynccontextmanager
    async def held(self, say: Callable[[str], None], fence: Callable[[str], None]) -> AsyncIterator[None]:
        """Wait until the lease is held, and hold it from then on.

        say: hears, in words, who holds it meanwhile. fence: called with the reason when it is lost, to let go of what
        another is to have; then the block is cancelled, if it has not ended. Raises LeaseError where it was lost,
        ConfigError for a file that is none.
        """
        if self._file is None:
            yield
            return
        await self._acquire(self._file, say)
        owner = asyncio.current_task()
        assert owner is not None
        lost, within = "", True

        async def keep(file: LeaseFile) -> None:
            nonlocal lost
            lost = await self._kept(file)
            self._taken = False
            logger.error("%s", lost)
            fence(lost)
            if within:
                owner.cancel()

        self._keeping = asyncio.get_running_loop().create_task(keep(self._file))
        try:
            yield
        except asyncio.CancelledError:
            if not lost:
                raise
            owner.uncancel()
            raise LeaseError(f"{lost}; restart it to stand by") from None
        finally:
            within = False

    async def _acquire(self, file: LeaseFile, say: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        seen: Holder | None = None
        since, said = 0.0, ""
        while True:
            expired = seen if seen is not None and loop.time() - since > EXPIRES else None
            began = loop.time()
            try:
                row = await self._in_thread(file.claim, expired)
            except sqlite3.OperationalError as error:
                words = f"standing by: {self._path} cannot be written: {error}"
            except sqlite3.DatabaseError as error:
                raise ConfigError(
                    f"{self._path}: it is not a lease, but {error}; remove it, or set cluster.lease"
                ) from None
            else:
                if file.holds(row):
                    self._taken = True
                    if said:
                        logger.warning("this front end takes over")
                    return
                if row != seen:
                    seen, since = row, began
                words = f"standing by: the front end on {row.host} serves"
            if words != said:
                said = words
                logger.warning("%s", words)
            say(words)
            await asyncio.sleep(POLL)

    async def _kept(self, file: LeaseFile) -> str:
        """Renew a lease until it is lost; return why. A front end that was slow goes on if nobody has taken it."""
        failed = 0
        while True:
            await asyncio.sleep(RENEW)
            try:
                async with asyncio.timeout(ATTEMPT):
                    if not await self._in_thread(file.renew):
                        return "another front end has taken over"
                failed, trouble = 0, ""
            except TimeoutError:
                failed, trouble = failed + 1, "its file does not answer"
            except sqlite3.Error as error:
                failed, trouble = failed + 1, str(error)
            if failed == ATTEMPTS:
                return f"the lease of this front end could not be renewed {ATTEMPTS} times in a row ({trouble})"
