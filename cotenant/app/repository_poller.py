"""Follow the model repository: load what is new or has changed, unload what is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from cotenant.errors import CotenantError
from cotenant.worker.repository import Entry, scan_repository

logger = logging.getLogger(__name__)

SETTLED = 1.0  # seconds without a further change until a change counts: files are not copied in one moment

Seen = dict[str, list[Entry]]  # the versions to serve, by model


class Follower(Protocol):
    """Puts a change of the repository into force."""

    async def __call__(self, changed: str, *, gone: bool) -> None: ...


class RepositoryPoller:
    """Look at a repository now and then, and have a follower put what has changed into force.

    repository: returns the folder as settings have it now; called in a thread. A change that fails is logged, costs
    nothing that is served, and is tried again once the files change again.
    """

    def __init__(self, repository: Callable[[], Path], follow: Follower, *, settled: float = SETTLED) -> None:
        self._repository = repository
        self._follow = follow
        self._settled = settled
        self._seen: Seen = {}

    async def begin(self) -> None:
        """Take what is in the repository now as known."""
        self._seen = await self._scan()

    async def look(self) -> None:
        """Follow what has changed since the last look, each model once it changes no more."""
        before = await self._scan()
        if before == self._seen:
            return
        await asyncio.sleep(self._settled)
        now = await self._scan()
        # What still changes is followed at a later look; it keeps no other model waiting.
        settled = {name for name in now.keys() | self._seen.keys() if now.get(name) == before.get(name)}
        changed = sorted(name for name in settled & now.keys() if now[name] != self._seen.get(name))
        gone = sorted(settled & self._seen.keys() - now.keys())
        self._seen = {name: entries for name, entries in self._seen.items() if name not in settled}
        self._seen |= {name: now[name] for name in settled & now.keys()}
        # What is gone makes room for what is new; models come before the ensembles of them.
        ordered = sorted(changed, key=lambda name: now[name][-1].config.ensemble_scheduling is not None)
        for name in (*gone, *ordered):
            await self._put_into_force(name, gone=name in gone)

    async def _put_into_force(self, name: str, *, gone: bool) -> None:
        try:
            await self._follow(name, gone=gone)
        except CotenantError as error:
            logger.error("the repository changed: %s", error)
        except Exception:  # the others that have changed are followed all the same
            logger.exception("the repository changed, but model %s could not be followed", name)
        else:
            logger.info("the repository changed: model %s is %s", name, "unloaded" if gone else "loaded")

    async def _scan(self) -> Seen:
        try:
            entries = await asyncio.to_thread(lambda: scan_repository(self._repository()))
        except (CotenantError, OSError) as error:  # such as a file system that is away for a moment
            logger.error("the model repository cannot be read: %s", error)
            return self._seen
        seen: Seen = {}
        for entry in entries:
            seen.setdefault(entry.name, []).append(entry)
        return seen


@asynccontextmanager
async def polling(poller: RepositoryPoller, interval: float) -> AsyncIterator[None]:
    """Look every `interval` seconds within the block; the poller has begun."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                await poller.look()
            except Exception:
                logger.exception("the model repository was not polled; trying again in %g s", interval)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
