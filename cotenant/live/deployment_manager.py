"""From one deployment to the next: start the workers of new lanes, switch the dispatcher over, stop the old ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

from cotenant.core.identity import LaneId
from cotenant.errors import CotenantError, FailedError, ModelError, UnsupportedError, WorkerError
from cotenant.live.deployment import (
    Deployment,
    Prepare,
    applications_of,
    serves,
    with_planned_batches,
    without_model,
    worker_models,
)
from cotenant.live.driver import Driver
from cotenant.live.pool import Pool
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.runtime.lane_assignment import LaneAssignment, LaneMatcher
from cotenant.runtime.lane_specs import lane_specs

DRAINED_GRACE = 1.0  # seconds that the worker of a drained lane has to exit


class DeploymentManager:
    """Put deployments into force, one change at a time, each made from what the one before it left.

    prepare: plans a deployment for models to be loaded.
    """

    def __init__(
        self, state: ServingState, driver: Driver, pool: Pool, observer: ServingObserver, prepare: Prepare
    ) -> None:
        self._state = state
        self._driver = driver
        self._pool = pool
        self._observer = observer
        self._prepare = prepare
        self._matcher = LaneMatcher()
        self._changing = asyncio.Lock()
        self._stopping: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the workers of the first deployment. Raises WorkerError, with nothing left behind, where one does not
        become ready."""
        try:
            await self.apply(self._state.deployment)
        except WorkerError:
            await self._pool.close(grace=0.0)
            raise

    async def stop(self, grace: float) -> None:
        """Stop all workers, each after the batch that it is at work on, within `grace` seconds."""
        await self._pool.close(grace)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    async def apply(self, deployment: Deployment) -> None:
        """Switch to another deployment: new lanes start and warm up, take over, and only then the old ones stop.

        A lane whose partition both plans have keeps its worker. Raises WorkerError where a new worker does not become
        ready; then nothing has changed.
        """
        async with self._changing:
            await self._apply(deployment)

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Serve one more model: plan again with it, and switch to that plan. Raises FailedError, with nothing changed,
        where it cannot be served, or where one that is served would have to leave."""
        if "config" in parameters or any(key.startswith("file:") for key in parameters):
            raise UnsupportedError(
                f"model '{name}': load takes no configuration or files; put them into the repository"
            )
        async with self._transition("load", name):
            current = self._state.deployment
            placed = {*current.plan.rates(), *current.plan.split}
            deployment = await self._prepare(placed | {name}, self._observer.samples())
            for wanted in (name, *sorted(placed)):
                if wanted in deployment.broken:
                    raise ModelError(deployment.broken[wanted])
                if not serves(deployment, wanted):
                    raise ModelError(
                        f"no share of the devices is free that serves '{wanted}' within its target; "
                        "unload another model, or give it more time"
                    )
            # What was unloaded before stays in the index, and can be loaded again.
            await self._apply(msgspec.structs.replace(deployment, offered=current.offered | deployment.offered))

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Take a model out of its partitions; the others stay where they are. Harmless where it is not served."""
        if name not in self._state.deployment.offered:
            return
        async with self._transition("unload", name):
            await self._apply(without_model(self._state.deployment, name))

    def release(self, lane: LaneId) -> None:
        """Stop the worker of a lane that the dispatcher has drained."""
        task = asyncio.get_running_loop().create_task(self._pool.stop(lane, grace=DRAINED_GRACE))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    @asynccontextmanager
    async def _transition(self, verb: Literal["load", "unload"], name: str) -> AsyncIterator[None]:
        async with self._changing:
            self._state.transitions = {**self._state.transitions, name: f"{verb.upper()}ING"}
            try:
                yield
            except CotenantError as error:
                raise FailedError(f"failed to {verb} '{name}': {error}") from None
            finally:
                self._state.transitions = {
                    model: state for model, state in self._state.transitions.items() if model != name
                }

    async def _apply(self, deployment: Deployment) -> None:
        deployment = with_planned_batches(deployment)
        models = {name: offered.model for name, offered in deployment.offered.items()}
        specs = lane_specs(deployment.plan, models, deployment.problem.profiles)
        wanted = self._matcher.match(deployment.plan, specs, lambda model: self._unchanged(model, deployment))
        fresh = {name: lane for name, lane in wanted.items() if name not in self._state.lanes}
        leaving = [worker.lane for worker in self._pool.status() if worker.lane not in wanted]
        await self._start(fresh, deployment, leaving)
        self._observer.track(deployment.offered.values())
        applications = applications_of(deployment)
        # Both plans' lanes first, so that no request finds none; then the new ones alone, which drains the others.
        both = {**self._state.lanes, **fresh}
        self._state.deployment = deployment
        self._driver.apply(tuple(lane.spec for lane in both.values()), applications)
        for name in fresh:
            if self._pool.is_ready(name):  # it may have died while the others started
                self._driver.ready(name)
        self._driver.apply(tuple(lane.spec for lane in wanted.values()), applications)
        self._matcher.lanes = wanted
        self._state.lanes = wanted

    def _unchanged(self, model: str, deployment: Deployment) -> bool:
        """Tell whether a model's file is the one that is being served."""
        current = self._state.deployment.offered
        return model in current and current[model].entry == deployment.offered[model].entry

    async def _start(
        self, lanes: Mapping[LaneId, LaneAssignment], deployment: Deployment, leaving: Collection[LaneId]
    ) -> None:
        # The largest first, so that the backend can give them cores of their own.
        order = sorted(lanes, key=lambda name: -lanes[name].partition.share)
        starting = [
            self._pool.start(
                name,
                share=lanes[name].partition.share,
                models=worker_models(deployment, lanes[name].spec),
                leaving=leaving,
            )
            for name in order
        ]
        results = await asyncio.gather(*starting, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(self._pool.stop(name, grace=0.0) for name in order))
            raise failures[0]
