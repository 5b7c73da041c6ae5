"""Decide which deployment to serve: the first, another after a reload, one model more, one model less."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from cotenant.control.revision import RolloutOutcome
from cotenant.errors import CotenantError, FailedError, ModelError, RolloutError, UnsupportedError
from cotenant.live.deployment import Deployment, Prepare, serves, with_models_of, without_model
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState


class DeploymentManager:
    """Request deployments; rollouts put them into force. prepare: plans a deployment for models to be loaded."""

    def __init__(
        self, state: ServingState, rollouts: RolloutDriver, observer: ServingObserver, prepare: Prepare
    ) -> None:
        self._state = state
        self._rollouts = rollouts
        self._observer = observer
        self._prepare = prepare
        self._changing = asyncio.Lock()  # loads and unloads take turns

    async def start(self, deployment: Deployment) -> None:
        """Start the workers of the first deployment. Raises WorkerError or RolloutError, with nothing left behind, if
        that fails."""
        try:
            await self._rollouts.apply(deployment, "start of the server")
        except CotenantError:
            await self._rollouts.shutdown(grace=0.0)
            raise

    async def stop(self, grace: float) -> None:
        """Stop all workers, each after its batch in flight, within `grace` seconds."""
        await self._rollouts.shutdown(grace)

    async def apply(self, deployment: Deployment, reason: str = "reload") -> None:
        """Switch to another deployment, as `RolloutDriver.apply` does."""
        await self._rollouts.apply(deployment, reason)

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Serve one more model: plan again with it, and switch to that plan. A permanently failed lane of one that is
        served already is revived. Raises FailedError, with nothing changed,
        where it cannot be served or would displace a served model."""
        if "config" in parameters or any(key.startswith("file:") for key in parameters):
            raise UnsupportedError(
                f"model '{name}': load takes no configuration or files; put them into the repository"
            )

        async def with_model(current: Deployment) -> Deployment:
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
            # Models that were unloaded or cannot be served stay in the index; `prepare` considered only the others.
            return with_models_of(current, deployment)

        async with self._transition("load", name):
            await self._change(with_model, f"load of {name}")
            await self._rollouts.revive(name)

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Take a model out of its partitions; the others stay where they are. Harmless where it is not served."""
        _, desired = self._rollouts.desired
        if name not in desired.offered:
            return

        async def without(current: Deployment) -> Deployment:
            return without_model(current, name)

        async with self._transition("unload", name):
            await self._change(without, f"unload of {name}")

    async def _change(self, changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> None:
        """Apply one change to the deployment; again, if another deployment came into force meanwhile."""
        while True:
            await self._rollouts.idle()
            base, current = self._rollouts.desired
            deployment = await changed(current)
            try:
                await self._rollouts.apply(deployment, reason, base=base)
            except RolloutError as error:
                if error.outcome not in (RolloutOutcome.SUPERSEDED, RolloutOutcome.OUTDATED):
                    raise
            else:
                return

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
