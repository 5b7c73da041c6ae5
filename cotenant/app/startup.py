"""Make a server's first deployment while its ports are open already, and tell how far that is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

from cotenant.app.deployment_builder import DeploymentBuilder
from cotenant.app.profile_source import Progress
from cotenant.app.server_state import StateFile, restored, state_key, state_path
from cotenant.live.adaptation import Learnt
from cotenant.live.deployment import Deployment
from cotenant.profiling.machine_load import MachineLoad, describe_load, measure_load, slowdowns_under
from cotenant.profiling.pace import ProfilingPace

logger = logging.getLogger(__name__)

MEASURING = "measuring what other programs use"


class Prepared(NamedTuple):
    """Hold what a server starts with. learnt: in an earlier run, by the same plan."""

    deployment: Deployment
    learnt: Learnt | None = None


Prepare = Callable[[DeploymentBuilder], Awaitable[Prepared]]


def preparing(models: Collection[str] | None = None) -> Prepare:
    """Return what prepares the deployment that settings ask for. models: those to serve; None: those of the
    settings."""

    async def prepare(builder: DeploymentBuilder) -> Prepared:
        return await prepare_deployment(builder, models)

    return prepare


async def prepare_deployment(builder: DeploymentBuilder, models: Collection[str] | None = None) -> Prepared:
    """Profile the models where needed, and plan, as an earlier run did or for the machine as it is now.

    models: those to serve; None: those of the settings. Raises CotenantError.
    """
    settings = builder.settings
    wanted = settings.load_models if models is None else models
    described = await builder.describe(wanted)
    if wanted is not None and not wanted:
        return Prepared(described)
    if settings.adapt:
        file = StateFile(state_path(settings))
        learnt = await asyncio.to_thread(file.load, state_key(described, settings))
        builder.corrections.known |= await asyncio.to_thread(file.corrections)
        before = None if learnt is None else restored(described, learnt)
        if before is not None:
            return Prepared(before, learnt)
    load = None
    if settings.backend == "cpu" and builder.measured_profiles(described):  # given ones are taken as they are
        builder.say(MEASURING)
        load = await asyncio.to_thread(measure_load)
    return await _planned(builder, described, load)


async def _planned(builder: DeploymentBuilder, described: Deployment, load: MachineLoad | None) -> Prepared:
    """Plan for batches as slow as other programs make them, unless that leaves more of a model unserved than on a quiet
    machine: its answers may be late, but there are some."""
    slowdowns = slowdowns_under(load, builder.measured_profiles(described))
    planned = await builder.planned(described, slowdowns)
    text = "" if load is None or not load.busy else describe_load(load, slowdowns)
    if slowdowns and (missing := planned.plan.unserved):
        quiet = await builder.planned(described)
        if late := [name for name, rate in missing.items() if quiet.plan.unserved.get(name, 0.0) < rate]:
            planned = quiet
            text += f"; no share left would keep the targets of {', '.join(late)} beside them"
    if text:
        logger.warning("%s", text)
    return Prepared(planned)


def telling(tell: Callable[[str], None], progress: Progress) -> Progress:
    """Return a progress that is told in words too."""
    pace = ProfilingPace()

    def told(model: str, done: int, total: int, number: int, count: int) -> None:
        tell(pace(model, done, total, number, count))
        progress(model, done, total, number, count)

    return told
