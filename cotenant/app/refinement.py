"""Refine the profiles of a server that adapts, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext

import numpy as np

from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.profile_refiner import Measure, ProfileRefiner, until_done
from cotenant.backends import Backend
from cotenant.backends.cpu import Cpu
from cotenant.config import Settings
from cotenant.control.refinement_gate import MachineUse, RefinementGate
from cotenant.core.identity import DeviceId
from cotenant.core.profile import Point, Profile
from cotenant.live.confinement import Confinement
from cotenant.live.deployment import ServableModel
from cotenant.live.foreign_load import ForeignLoad
from cotenant.live.server import Server
from cotenant.profiling.grid import Candidate, Grid, grid_of, measure_profiles
from cotenant.profiling.machine_load import BUSY, available_cores
from cotenant.worker.repository import sample_inputs, worker_model

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
    grid = grid_of(kinds[0])

    async def refined(servable: ServableModel, profile: Profile) -> None:
        server.replace_profile(await builder.keep_profile(servable.entry, profile))

    return _looking(
        ProfileRefiner(
            RefinementGate(foreign=BUSY, own=OWN, seconds=QUIET),
            grid,
            deployment=lambda: server.deployment,
            profiles=builder.measured_profiles,
            use=_MachineUse(server),
            measure=_measuring(settings, backend, grid),
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
                    logger.exception("profiles were not looked at; they are again every %g s", PERIOD)
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


class _MachineUse:
    """Read what else runs."""

    def __init__(self, server: Server) -> None:
        self._server = server
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
        return MachineUse(foreign, own, self._server.is_changing)

    def _seconds(self) -> tuple[float, float]:
        """Return the seconds in batches so far, and those that the event loop has used of a processor: what is
        answered from the response cache, or rejected, runs no batch."""
        return self._server.busy_seconds(), time.thread_time()


def _measuring(settings: Settings, backend: Cpu, grid: Grid) -> Measure:
    """Return what measures a model beside the workers that serve, which come first."""
    confinement = Confinement(memory=settings.worker_memory, environment=settings.worker_environment, background=True)
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
            async for _, point in results:
                yield point

    return measure
