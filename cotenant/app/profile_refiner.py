"""Refine first profiles while a server has nothing else to do: measure what they left out, one point after the other.

It measures on the processors that serve, in a worker of its own that gets what nobody else wants of them, and ends that
worker as soon as somebody does. `control.refinement_gate` decides when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from cotenant.control.refinement_gate import MachineUse, RefinementGate
from cotenant.core.profile import Point, Profile, Profiles
from cotenant.core.units import show_count
from cotenant.errors import CotenantError
from cotenant.live.deployment import Deployment, ServableModel
from cotenant.profiling.grid import Grid, count_missing
from cotenant.profiling.machine_load import BUSY, FOREIGN
from cotenant.worker.repository import worker_model

logger = logging.getLogger(__name__)

ROOM = 2.0  # the memory that has to be available, as a multiple of what a worker of the model was seen to need

# Measures the points of a model that are not known; yields them, or why there will be no more.
Measure = Callable[[ServableModel, Sequence[Point]], AsyncGenerator[Point | str]]


class _Work:
    """A model under measurement. points: measured so far; the first `confirmed` of them on a quiet machine."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.points: list[Point] = []
        self.confirmed = 0
        self.failure = ""
        self.task: asyncio.Task[None] | None = None

    def known(self) -> list[Point]:
        """Return the points that need not be measured, one for each share and batch."""
        quiet = [point for point in self.profile.points if point.features.get(FOREIGN, 0.0) <= 100 * BUSY]
        return list({(point.share, point.batch): point for point in [*quiet, *self.points]}.values())

    def refined(self) -> Profile:
        """Return the profile with what was measured, in place of what a busy machine made of it."""
        points = {(point.share, point.batch): point for point in [*self.profile.points, *self.points]}
        return Profile(self.profile.model, self.profile.kind, points.values())


class ProfileRefiner:
    """Refine the profiles of a deployment, one model after the other.

    deployment: returns the one in force. profiles: returns those of its profiles that were measured. use: what else
    runs. measure: see `Measure`. refined: takes a profile with more points; may raise CotenantError. tell: hears how
    far it is, in words. Call `look` now and then, and `stop` at the end.
    """

    def __init__(
        self,
        gate: RefinementGate,
        grid: Grid,
        *,
        deployment: Callable[[], Deployment],
        profiles: Callable[[Deployment], Profiles],
        use: Callable[[], Awaitable[MachineUse]],
        measure: Measure,
        refined: Callable[[ServableModel, Profile], Awaitable[None]],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._grid = grid
        self._deployment = deployment
        self._profiles = profiles
        self._use = use
        self._measure = measure
        self._refined = refined
        self._tell = tell
        self._clock = clock
        self._works: dict[str, _Work] = {}  # by model
        # By model, whether that profile lacks points. It is looked at once: the event loop serves requests.
        self._lacks: dict[str, tuple[Profile, bool]] = {}
        self._at_work: str | None = None

    async def look(self) -> None:
        """Begin, go on or stop, as what else runs allows."""
        quiet = self._gate.observe(await self._use(), self._clock())
        work = None if self._at_work is None else self._works[self._at_work]
        if work is not None and (not quiet or self._loaded().get(work.profile.model) is not work.profile):
            await self.stop()
        elif work is not None:
            work.confirmed = len(work.points)
            if work.task is not None and work.task.done():
                await self._finish(work)
        if quiet and self._at_work is None:
            self._begin()
        self._tell(self._how_far())

    async def stop(self) -> None:
        """Measure nothing any more. What was measured since the last look may have been beside other load."""
        if self._at_work is None:
            return
        work, self._at_work = self._works[self._at_work], None
        try:
            if work.task is not None:
                work.task.cancel()
                await until_done(work.task)
        finally:
            del work.points[work.confirmed :]

    def _loaded(self) -> dict[str, Profile]:
        """Return the profiles of the models that are loaded, by model: a deployment has those of others too."""
        deployment = self._deployment()
        loaded = {model.name for model in deployment.problem.models} & deployment.offered.keys()
        return {name: profile for (name, _), profile in self._profiles(deployment).items() if name in loaded}

    def _wanted(self) -> dict[str, Profile]:
        """Return the profiles that lack points, by model."""
        offered = self._deployment().offered
        return {name: profile for name, profile in self._loaded().items() if self._is_lacking(offered[name], profile)}

    def _is_lacking(self, servable: ServableModel, profile: Profile) -> bool:
        seen = self._lacks.get(profile.model)
        if seen is None or seen[0] is not profile:
            seen = self._lacks[profile.model] = profile, bool(self._missing(servable, _Work(profile).known()))
        return seen[1]

    def _missing(self, servable: ServableModel, points: Sequence[Point]) -> int:
        return count_missing(worker_model(servable.entry, servable.info), points, self._grid)

    def _begin(self) -> None:
        for name, profile in self._wanted().items():
            work = self._works.get(name)
            if work is None or work.profile is not profile:
                work = self._works[name] = _Work(profile)
            if _has_room(profile):
                self._at_work, work.failure = name, ""
                work.task = asyncio.create_task(self._run(work, self._deployment().offered[name]))
                return

    async def _run(self, work: _Work, servable: ServableModel) -> None:
        try:
            async with aclosing(self._measure(servable, work.known())) as points:
                async for point in points:
                    if isinstance(point, str):
                        work.failure = point
                        return
                    work.points.append(point)
        except CotenantError as error:
            work.failure = str(error)
        except Exception as error:
            logger.exception("the profile of %s could not be refined", work.profile.model)
            work.failure = f"{type(error).__name__}: {error}"

    async def _finish(self, work: _Work) -> None:
        """Put a refined profile into force; keep one of which no further point can be measured."""
        assert self._at_work is not None
        name, self._at_work = self._at_work, None
        del self._works[name]
        if work.points and not work.failure:
            refined = work.refined()
            try:
                await self._refined(self._deployment().offered[name], refined)
            except CotenantError as error:
                work.failure = str(error)
            else:
                points = show_count(len(refined.points), "point")
                logger.info("the profile of %s was refined: %s, %d before", name, points, len(work.profile.points))
        if work.failure:
            logger.warning("the profile of %s stays as it is: %s", name, work.failure)
        if (profile := self._loaded().get(name)) is not None:
            self._lacks[name] = profile, False  # what it lacks now cannot be measured, or is of no use to any plan

    def _how_far(self) -> str:
        """Say what is measured, or why nothing is; empty where nothing is left to be."""
        wanted = self._wanted()
        if self._at_work is not None:
            work = self._works[self._at_work]
            left = self._missing(self._deployment().offered[self._at_work], work.known())
            return f"profile of {self._at_work} is being refined, {show_count(left, 'point')} left"
        if not wanted:
            return ""
        waits = self._gate.reason or "too little memory is available"
        return f"{show_count(len(wanted), 'profile')} to refine, waiting: {waits}"


async def until_done(task: asyncio.Task[None]) -> None:
    """Wait for a task that ends soon, also where the caller is cancelled meanwhile, once and again: it leaves nothing
    behind. Its error, if any, is not raised."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _has_room(profile: Profile) -> bool:
    """Return whether the machine has memory for one more worker of a model."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return available >= ROOM * profile.memory(profile.max_batch)
