"""Refine the profiles of a server that adapts, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np

from cotenant.app.backend import worker_confinement
from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.profile_refiner import Measure, ProfileRefiner, until_done
from cotenant.backends import Backend
from cotenant.backends.cpu import Cpu
from cotenant.config import Settings
from cotenant.control.refinement_gate import MachineUse, RefinementGate
from cotenant.core.identity import DeviceId
from cotenant.core.profile import Point, Profile
from cotenant.live.deployment import ServableModel
from cotenant.live.foreign_load import ForeignLoad, available_cores
from cotenant.live.server import Server
from cotenant.profiling.grid import Candidate, Grid, grid_of, measure_profiles
from cotenant.profiling.machine_load import BUSY
from cotenant.worker.repository import sample_inputs, worker_model

T = TypeVar("T")

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two looks at what else runs
QUIET = 30.0  # seconds without load until a measurement begins
OWN = 0.1  # batches under way on average, or part of a processor for the event loop: above it, the server is at work


def refining(
    settings: Settings, backend: Backend, server: Server, builder: DeploymentBuilder
) -> AbstractAsyncContextManager[None]:
    """Refine profiles within the block, where the settings ask for it and a worker can be kept from harming those that
    serve: on processors whose shares workers hold themselves to."""
    wanted = settings.adapt and settings.refine_profiles and settings.enforcement == "throttle"
    kinds = server.deployment.problem.fleet
    if not wanted or not isinstance(backend, Cpu) or [kind.name for kind in kinds] != ["cpu"]:
        return nullcontext()
    grid, spent = grid_of(kinds[0]), _Spent()

    async def refined(servable: ServableModel, profile: Profile) -> None:
        for entry, kept in await builder.keep_profile(servable.entry, profile):
            served = server.deployment.offered.get(entry.name)
            if served is not None and served.entry == entry:
                server.replace_profile(kept)

    return _looking(
        ProfileRefiner(
            RefinementGate(foreign=BUSY, own=OWN, seconds=QUIET),
            grid,
            deployment=lambda: server.deployment,
            profiles=builder.measured_profiles,
            use=_MachineUse(server, spent),
            measure=_measuring(settings, backend, grid, spent),
            refined=refined,
            tell=server.refining,
        )
    )


@asynccontextmanager
async def _looking(refiner: ProfileRefiner) -> AsyncIterator[None]:
    async def watch() -> None:
        told = ""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await refiner.look()
                told = ""
            except Exception as error:
                if told != repr(error):  # it may fail again with every look
                    logger.exception("profiles were not checked; trying again every %g s", PERIOD)
                told = repr(error)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        try:
            await until_done(task)
        finally:
            await refiner.stop()


class _Spent:
    """Count the seconds that some work uses of the event loop's processor."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @types.coroutine
    def count(self, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Await some work, and count each of its steps; what others do between two of them is theirs."""
        steps = work.__await__()
        result: object = None
        error: BaseException | None = None
        while True:
            begun = time.thread_time()
            try:
                awaited = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                return cast(T, end.value)
            finally:
                self.seconds += time.thread_time() - begun
            result = error = None
            try:
                result = yield awaited
            except BaseException as raised:  # noqa: BLE001  # that it is cancelled, too, is for the work to see
                error = raised


class _MachineUse:
    """Read what else runs. spent: by the refinement itself, which is no load that it yields to."""

    def __init__(self, server: Server, spent: _Spent) -> None:
        self._server = server
        self._spent = spent
        self._foreign = ForeignLoad(available_cores())
        self._read_at = time.monotonic()
        self._foreign.read(self._read_at)  # the first tells nothing
        self._used = self._seconds()

    async def __call__(self) -> MachineUse:
        foreign = await asyncio.to_thread(self._foreign.read, time.monotonic())
        now, used = time.monotonic(), self._seconds()
        passed = max(now - self._read_at, 1e-9)
        own = max((after - before) / passed for after, before in zip(used, self._used, strict=True))
        self._read_at, self._used = now, used
        return MachineUse(foreign, own, self._server.is_changing, self._server.runs_jobs)

    def _seconds(self) -> tuple[float, float]:
        """Return the seconds in batches so far, and those that the event loop has used of a processor for others: what
        is answered from the response cache, or rejected, runs no batch."""
        return self._server.busy_seconds(), time.thread_time() - self._spent.seconds


def _measuring(settings: Settings, backend: Cpu, grid: Grid, spent: _Spent) -> Measure:
    """Return what measures a model beside the workers that serve, which come first, and counts what that uses of the
    event loop's processor."""
    confinement = worker_confinement(settings, background=True)
    apart = backend.beside()

    async def measure(servable: ServableModel, known: Sequence[Point]) -> AsyncGenerator[Point | str]:
        entry, info, rng = servable.entry, servable.info, np.random.default_rng(0)
        candidate = Candidate(worker_model(entry, info), lambda rows: sample_inputs(entry, info, rows, rng))
        results = measure_profiles(
            apart,
            {entry.name: candidate},
            device=DeviceId("cpu"),
            grid=grid,
            known={entry.name: known},
            confinement=confinement,
            grace=0.0,
        )
        async with aclosing(results):
            while (result := await spent.count(anext(results, None))) is not None:
                yield result[1]

    return measure
