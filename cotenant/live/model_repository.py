"""Present the models of the repository to front ends: metadata, configuration, versions, readiness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotenant.core.tensor import ModelInfo
from cotenant.errors import NotFoundError, UnavailableError
from cotenant.live.control_driver import WorkerStatus
from cotenant.live.deployment import serves
from cotenant.live.oip import IndexEntry
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_state import ServingState
from cotenant.live.triton import model_config
from cotenant.worker.ensemble import Ensemble


class ModelRepository:
    """Answer questions about models from the serving state and the state of their workers."""

    def __init__(self, state: ServingState, rollouts: RolloutDriver) -> None:
        self._state = state
        self._rollouts = rollouts

    def model(self, name: str, version: str = "") -> ModelInfo:
        """Return the metadata of a model. Raises NotFoundError for an unknown name or version, and, with the reason,
        for a model that cannot be served; UnavailableError where the server starts and does not know it yet."""
        deployment = self._state.deployment
        offered = deployment.offered.get(name)
        if offered is None:
            if name in deployment.broken:
                raise NotFoundError(f"model '{name}' cannot be served: {deployment.broken[name]}")
            if self._state.startup:
                raise UnavailableError(f"the server is starting: {self._state.startup}", retry_after=1.0)
            known = ", ".join(sorted(deployment.offered)) or "none"
            raise NotFoundError(f"unknown model '{name}'; available: {known}")
        info = offered.info
        if version not in ("", info.version):
            raise NotFoundError(
                f"version '{version}' of model '{name}' is not served; one version is at a time, now {info.version}"
            )
        return info

    def ready(self, name: str, version: str = "") -> bool:
        """Return whether a model can take requests; False for an unknown one."""
        offered = self._state.deployment.offered.get(name)
        if offered is None or version not in ("", offered.info.version):
            return False
        return self._readiness(name, self._rollouts.workers())[0] == "READY"

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        """Return Triton's ModelConfig in its JSON shape. Raises NotFoundError."""
        info = self.model(name, version)
        return model_config(info, self._state.deployment.offered[name], self._state.lanes_of(name))

    def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """List the models with their states; only those that are READY where `ready` is set. While the server starts,
        those that it has found so far."""
        deployment, workers = self._state.deployment, self._rollouts.workers()
        entries = []
        for name, offered in deployment.offered.items():
            state, reason = self._readiness(name, workers)
            if state == "READY" or not (ready or name in self._state.gone):
                entries.append(IndexEntry(name=name, version=offered.info.version, state=state, reason=reason))
        if ready:
            return entries
        broken = self._state.found.broken | deployment.broken if self._state.startup else deployment.broken
        failed = {name: why for name, why in self._state.failures.items() if name not in deployment.offered}
        moving = {name: state for name, state in self._state.transitions.items() if name not in deployment.offered}
        entries += [IndexEntry(name=name, state=state, reason="") for name, state in moving.items()]
        hidden = self._state.gone | moving.keys()
        broken = {name: why for name, why in (broken | failed).items() if name not in hidden}
        entries += [IndexEntry(name=name, state="UNAVAILABLE", reason=reason) for name, reason in broken.items()]
        listed = {entry.name for entry in entries}
        entries += [
            IndexEntry(name=name, state="LOADING", reason=self._state.startup)
            for name in (self._state.found.models if self._state.startup else ())
            if name not in listed
        ]
        return entries

    def _readiness(self, name: str, workers: Sequence[WorkerStatus]) -> tuple[str, str]:
        """Return a model's state as the repository index calls it, and the reason where it is not READY. One that is
        loaded again is served meanwhile."""
        transition = self._state.transitions.get(name)
        if transition == "UNLOADING":
            return transition, ""
        if self._state.startup and serves(self._state.deployment, name):
            return "LOADING", self._state.startup
        state, reason = self._placed_readiness(name, workers)
        return (state, reason) if transition is None or state == "READY" else (transition, "")

    def _placed_readiness(self, name: str, workers: Sequence[WorkerStatus]) -> tuple[str, str]:
        offered = self._state.deployment.offered.get(name)
        if offered is not None and offered.ensemble is not None:
            return self._ensemble_readiness(name, offered.ensemble, workers)
        lanes = self._state.lanes_of(name)
        if not lanes:
            return "UNAVAILABLE", self._why_not_placed(name)
        own = {worker.lane: worker for worker in workers if worker.lane in lanes}
        if self._state.accepting and any(worker.state == "ready" for worker in own.values()):
            return "READY", self._why_not_again(name)
        return "UNAVAILABLE", next((own[lane].reason for lane in lanes if lane in own), "")

    def _ensemble_readiness(self, name: str, ensemble: Ensemble, workers: Sequence[WorkerStatus]) -> tuple[str, str]:
        if name not in self._state.deployment.plan.split:
            return "UNAVAILABLE", "unloaded"
        states = {model: self._readiness(model, workers) for model in sorted(ensemble.models)}
        reasons = [f"{model}: {reason or state}" for model, (state, reason) in states.items() if state != "READY"]
        return ("UNAVAILABLE", reasons[0]) if reasons else ("READY", self._why_not_again(name))

    def _why_not_again(self, name: str) -> str:
        """Return why a model that is served could not be loaded again; empty where it could, or was not to be."""
        failure = self._state.failures.get(name)
        return f"served as before, since it could not be loaded again: {failure}" if failure else ""

    def _why_not_placed(self, name: str) -> str:
        deployment = self._state.deployment
        if name in deployment.plan.unserved:
            return (
                "no share of the devices that serves it within its target is left; unload another model, give it more"
                " time, or plan for less"
            )
        if name in deployment.problem.rates:
            return "nobody asks for it, and no share of the devices is left for it"
        return self._state.failures.get(name, "unloaded")
