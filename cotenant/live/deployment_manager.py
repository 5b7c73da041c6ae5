"""Decide which deployment to serve: the first, another after a reload, one model more, one model less."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

from cotenant.control.revision import RolloutOutcome
from cotenant.errors import (
    CotenantError,
    FailedError,
    InvalidError,
    ModelError,
    NotFoundError,
    RolloutError,
    UnsupportedError,
)
from cotenant.live.deployment import (
    Deployment,
    Prepare,
    dependents,
    kept_models,
    loaded_models,
    placed_models,
    serves,
    with_models_of,
    without_model,
)
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.worker.repository import parse_json_config

logger = logging.getLogger(__name__)


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
        """Serve one more model, or one again from its files: plan again with it, and switch to that plan. The others
        stay as they are, whatever has become of their files. A permanently failed lane of the model is revived.

        parameters: `config` is a ModelConfig as JSON, in place of the repository's until the model is loaded again.
        Raises FailedError, with nothing changed, where it cannot be served or would displace a served model.
        """
        given = _config_parameter(name, parameters)

        async def with_model(current: Deployment) -> Deployment:
            served, loaded = loaded_models(current), loaded_models(current, name) | {name}
            configs = {model: config for model, config in current.configs.items() if model != name}
            configs |= {} if given is None else {name: parse_json_config(given, name)}
            # Its callers do not know that it is loaded again, and go on asking.
            rates = kept_models(current, served).rates
            kept = msgspec.structs.replace(kept_models(current, served - {name}), rates=rates)
            deployment = await self._prepare(loaded, self._observer.samples(), configs, kept)
            for wanted in (name, *sorted(loaded & placed_models(current))):
                if wanted in deployment.broken:
                    raise ModelError(deployment.broken[wanted])
                if not serves(deployment, wanted):
                    raise ModelError(
                        f"no share of the devices is free that serves '{wanted}' within its target; "
                        "unload another model, or raise its target"
                    )
            # Models that were unloaded or cannot be served stay in the index; `prepare` considered only the others.
            return with_models_of(current, deployment)

        async with self._changing, self._transition("load", name):
            await self._change(with_model, f"load of {name}")
        async with self._transition("load", name):  # other loads do not wait for a worker that hangs as it starts
            await self._rollouts.revive(name)

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Take a model out of its partitions; the others stay where they are. Harmless where it is not served.

        parameters: `unload_dependents` takes out the models of an ensemble, too, that no other ensemble needs.
        """
        _unload_parameters(name, parameters)

        async def without(current: Deployment) -> Deployment:
            leaving = [name, *(dependents(current, name) if parameters.get("unload_dependents") else ())]
            for model in leaving:
                current = without_model(current, model)
            return current

        async with self._changing, self._transition("unload", name):
            if name in self._rollouts.desired[1].offered:  # it may only now have been loaded
                await self._change(without, f"unload of {name}")

    async def change(self, changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> None:
        """Apply a change to the deployment in force, in turn with loads and unloads. Raises CotenantError, with nothing
        changed."""
        async with self._changing:
            await self._change(changed, reason)

    async def _change(self, changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> None:
        """Apply one change to the deployment; again, if another deployment came into force meanwhile. The first time
        takes long where a model has to be profiled, so it holds up no plan; what is done again does."""
        try:
            while not await self._applied(changed, reason):
                self._state.repeated_change = reason
        finally:
            self._state.repeated_change = ""

    async def _applied(self, changed: Callable[[Deployment], Awaitable[Deployment]], reason: str) -> bool:
        """Apply a change to the deployment that is wanted now; return whether no other one came first."""
        await self._rollouts.idle()
        base, current = self._rollouts.desired
        deployment = await changed(current)
        try:
            await self._rollouts.apply(deployment, reason, base=base)
        except RolloutError as error:
            if error.outcome not in (RolloutOutcome.SUPERSEDED, RolloutOutcome.OUTDATED):
                raise
            return False
        return True

    @asynccontextmanager
    async def _transition(self, verb: Literal["load", "unload"], name: str) -> AsyncIterator[None]:
        self._state.transitions = {**self._state.transitions, name: f"{verb.upper()}ING"}
        failure = ""
        try:
            yield
            self._state.gone -= {name}
        except CotenantError as error:
            failure = "" if isinstance(error, NotFoundError) else str(error)
            raise FailedError(f"failed to {verb} '{name}': {error}") from None
        except Exception as error:  # such as a planner's fault, which is shown where other failures are
            logger.exception("failed to %s %s", verb, name)
            failure = f"{type(error).__name__}: {error}"
            raise FailedError(f"failed to {verb} '{name}': {failure}") from error
        finally:
            others = {model: reason for model, reason in self._state.failures.items() if model != name}
            self._state.failures = {**others, name: failure} if failure and verb == "load" else others
            self._state.transitions = {
                model: state for model, state in self._state.transitions.items() if model != name
            }


def _config_parameter(name: str, parameters: Mapping[str, Any]) -> str | None:
    """Return the configuration that a request to load brings, if any. Raises UnsupportedError for files, InvalidError
    for what else it brings."""
    for key, value in parameters.items():
        if key.startswith("file:"):
            raise UnsupportedError(
                f"model '{name}': {key!r}: load takes no files; models come from the repository alone, put them there"
            )
        if key != "config":
            raise InvalidError(f"model '{name}': unknown parameter {key!r} of load; available: 'config'")
        if not isinstance(value, str):
            raise InvalidError(f"model '{name}': config is a {type(value).__name__}; send ModelConfig as JSON text")
    return parameters.get("config")


def _unload_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    for key, value in parameters.items():
        if key != "unload_dependents":
            raise InvalidError(f"model '{name}': unknown parameter {key!r} of unload; available: 'unload_dependents'")
        if not isinstance(value, bool):
            raise InvalidError(f"model '{name}': unload_dependents is {value!r}; it is true or false")
