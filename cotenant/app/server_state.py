"""What a server keeps over a restart: the plan in force with the rates and slowdowns that it was made for, and by how
much profiles turned out wrong.

Rows of an SQLite file. The plan's has a key that says what it depends on: with other models, profiles or settings there
is nothing to restore. Corrections name the profile that they are of. A file that is broken, or cannot be written, costs
no more than what it would have held. A server that writes one holds a lock beside it, and another keeps none there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from cotenant.config import Settings
from cotenant.core.identity import decode_identity, own_kind
from cotenant.core.profile import Point, Profile, slowed_profiles
from cotenant.errors import ConfigError
from cotenant.live.adaptation import Learnt
from cotenant.live.deployment import Deployment
from cotenant.live.profile_corrections import ProfileCorrection, ProfileCorrections
from cotenant.planners.applications import overlong_paths, without_applications
from cotenant.planners.candidates import without_proof
from cotenant.planners.check import Rule, check, retimed
from cotenant.planners.rates import at_rates, rescaled_plan
from cotenant.profiling import cache

logger = logging.getLogger(__name__)

PERIOD = 5.0  # seconds between two looks at whether something has to be written
# Rules that a plan violates where the network to a node takes another time than when it was made, and where rates are
# lower than those that it was made for.
RESTORABLE: frozenset[Rule] = frozenset({"latency", "duty", "worst case", "keeps up", "served", "scale"})
LOCKED = 1.0  # seconds to wait for another server that writes


def state_path(settings: Settings) -> Path:
    """Return the file of the settings, or beside the lease that front ends share, or else `local_path`."""
    lease = settings.cluster.lease
    if settings.state is None and lease is not None:
        return lease.with_name(f"{lease.name}.state")
    return local_path(settings)


def local_path(settings: Settings) -> Path:
    """Return the file of the settings, by default one for each repository and backend beside the profile cache."""
    if settings.state is not None:
        return settings.state
    served = f"{settings.model_repository.resolve()}\0{settings.backend}"
    return cache.cache_folder().parent / "state" / f"{hashlib.sha256(served.encode()).hexdigest()[:32]}.sqlite"


def state_key(deployment: Deployment, settings: Settings) -> str:
    """Hash all that a plan depends on, but for the rates that were learnt."""
    problem = deployment.problem
    profiles = [(name, kind, _points(profile)) for (name, kind), profile in sorted(problem.profiles.items())]
    interference = msgspec.structs.replace(settings.interference, place="")  # front ends have files of their own
    asked = (settings.planner, settings.objective, settings.models, interference)
    depends = (asked, problem.models, problem.applications, problem.fleet, profiles)
    return hashlib.sha256(msgspec.json.encode(depends, enc_hook=repr)).hexdigest()


def _points(profile: Profile) -> list[Point]:
    """Return what was measured, without what the network to a node takes more: that is never twice the same."""
    if own_kind(profile.kind) == profile.kind:
        return list(profile.points)
    least = min(point.latency for point in profile.points)
    return [msgspec.structs.replace(point, latency=round(point.latency - least, 9)) for point in profile.points]


def restored(deployment: Deployment, learnt: Learnt) -> Deployment | None:
    """Return a deployment with the plan that was in force before; None where that is not valid any more."""
    problem = deployment.problem
    rates = {name: learnt.rates.get(name, 0.0) for name in problem.rates}
    asked = at_rates(problem, rates)
    slowed = msgspec.structs.replace(asked, profiles=slowed_profiles(problem.profiles, learnt.slowdowns))
    plan = learnt.plan
    violations = check(plan, slowed)
    if violations and RESTORABLE.issuperset(violation.rule for violation in violations):
        plan = without_proof(retimed(plan, slowed))
        violations = check(plan, slowed)
    if violations and not overlong_paths(plan, slowed):
        # A plan that was kept for higher rates still names those that it was made for.
        plan = without_proof(rescaled_plan(plan, without_applications(slowed, plan.split)))
        violations = check(plan, slowed)
    if not violations:
        return msgspec.structs.replace(deployment, plan=plan, problem=asked, slowdowns=learnt.slowdowns)
    logger.info("the plan of the last run is no longer valid: %s", violations[0])
    return None


class StateFile:
    """Load and store, never raising: what goes wrong is logged, once until it works again, and is in `problem`."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        self._path = path
        self._lock: BinaryIO | None = None
        self._claiming = threading.Lock()

    def move(self, path: Path) -> bool:
        """Load and store at this place from now on; return whether it is another one, which is to be claimed anew."""
        if path == self._path:
            return False
        self.release()
        self._path = path
        return True

    def claim(self) -> bool:
        """Take the file for this server until `release`, or its end however that comes; return False, with `problem`,
        while another server has it."""
        with self._claiming:
            if self._lock is not None:
                return True
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.ExitStack() as opened:
                    # Beside the file, which may be put aside. It stays: another may have opened it, to lock it next.
                    lock = opened.enter_context(self._path.with_name(f"{self._path.name}.lock").open("ab"))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    opened.pop_all()
            except BlockingIOError:
                self._trouble(
                    f"another server keeps its state in {self._path}, so this one keeps none; give it a file of its "
                    "own (`state` in the settings, or --state)"
                )
                return False
            except OSError as error:
                self._trouble(f"the state for a restart cannot be kept in {self._path}: {error}")
                return False
            self._lock = lock
            return True

    def release(self) -> None:
        """Let another server have the file."""
        with self._claiming:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def misplaced(self, error: Exception) -> str:
        """Hear why the place of the file is not known; return that in words."""
        self._trouble(f"the state for a restart cannot be kept: {error}")
        return self.problem

    def load(self, key: str) -> Learnt | None:
        """Return what was stored under a key; None where there is nothing. A broken file is put aside."""
        try:
            if not self._path.exists():
                return None
            with contextlib.closing(self._connect()) as database:
                if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'state'").fetchone() is None:
                    return None  # a full disk left the file empty
                row = database.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
            return None if row is None else _decode(row[0])
        except (sqlite3.OperationalError, OSError) as error:  # locked, or not to be opened: it may well be sound
            self._trouble(f"{self._path}: cannot read the state of the last run: {error}")
        except (sqlite3.DatabaseError, msgspec.DecodeError, ConfigError, TypeError) as error:
            broken = self._path.with_name(self._path.name + ".broken")
            with contextlib.suppress(OSError):
                self._path.replace(broken)
            self._trouble(f"{self._path}: the state of the last run is broken, and now {broken.name}: {error}")
        return None

    def corrections(self) -> dict[str, ProfileCorrection]:
        """Return the stored corrections of profiles, whatever the key. Call it after `load`, which puts a broken file
        aside."""
        with contextlib.suppress(sqlite3.Error, msgspec.DecodeError, OSError):
            if self._path.exists():
                with contextlib.closing(self._connect()) as database:
                    row = database.execute("SELECT value FROM corrections").fetchone()
                return {} if row is None else msgspec.json.decode(row[0], type=dict[str, ProfileCorrection])
        return {}

    def store(self, key: str, learnt: Learnt, corrections: Mapping[str, ProfileCorrection] | None = None) -> None:
        """Replace what is stored."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(self._connect()) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
                database.execute("DELETE FROM state")
                database.execute("INSERT INTO state VALUES (?, ?)", (key, _encode(learnt)))
                database.execute("CREATE TABLE IF NOT EXISTS corrections (value TEXT NOT NULL)")
                database.execute("DELETE FROM corrections")
                database.execute(
                    "INSERT INTO corrections VALUES (?)", (msgspec.json.encode(corrections or {}).decode(),)
                )
        except (sqlite3.Error, OSError) as error:
            self._trouble(f"the state for a restart cannot be kept in {self._path}: {error}")
        else:
            self.problem = ""

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=LOCKED)

    def _trouble(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("%s", problem)
        self.problem = problem


@asynccontextmanager
async def kept(
    file: StateFile,
    key: Callable[[], str],
    current: Callable[[], Learnt | None],
    corrections: ProfileCorrections | None = None,
    told: Callable[[str], None] = lambda problem: None,
    path: Callable[[], Path] | None = None,
    shared: bool = False,
) -> AsyncIterator[None]:
    """Within the block, store what has changed at its beginning, now and then, and at its end.

    key: returns that of `state_key`; called in a thread. current: returns what is to be kept; None where there is
    nothing. told: after each attempt, why it failed; empty where it did not. path: returns the place of the file, which
    a reload may change; called in a thread. shared: something else sees to it that one server at a time uses the file.
    """
    stored: tuple[str, Learnt, dict[str, ProfileCorrection]] | None = None

    async def store() -> None:
        nonlocal stored
        learnt = current()
        if learnt is None:
            return
        try:
            if path is not None and file.move(await asyncio.to_thread(path)):
                stored = None
            if not shared and not await asyncio.to_thread(file.claim):
                told(file.problem)
                return
            # Profiles that are refined change the key alone.
            now = await asyncio.to_thread(key), learnt, {} if corrections is None else dict(corrections.known)
        except (OSError, RuntimeError) as error:  # such as a working directory that is gone, or links in a circle
            stored = None
            told(file.misplaced(error))
            return
        if now != stored:
            await asyncio.to_thread(file.store, *now)
            told(file.problem)
            stored = None if file.problem else now  # what could not be stored is tried again

    async def watch() -> None:
        while True:
            await store()  # at once: a standby may have to go on with this plan any moment
            await asyncio.sleep(PERIOD)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await store()
        finally:
            file.release()


def _encode(learnt: Learnt) -> str:
    return msgspec.json.encode(learnt, enc_hook=str).decode()


def _decode(text: str) -> Learnt:
    return msgspec.json.decode(text, type=Learnt, dec_hook=decode_identity)
