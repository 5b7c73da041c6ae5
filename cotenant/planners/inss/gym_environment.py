"""Offer InSS' decision process as an environment of gymnasium, so that other learners can be tried on it.

from cotenant.planners.inss.gym_environment import ProvisioningEnv

environment = ProvisioningEnv(problem, low=[50.0, 100.0], high=[200.0, 400.0])
state, info = environment.reset(seed=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from cotenant.planners.inss.cluster import Cluster
from cotenant.planners.inss.environment import STEPS, Environment
from cotenant.planners.problem import Problem

States = NDArray[np.float32]
Actions = NDArray[np.int64]


class ProvisioningEnv(gymnasium.Env[States, Actions]):
    """Step through InSS' decisions for a problem.

    Observations are those of `Environment.state`; an action is a device and a share for each model in turn. `info` has,
    by model, the requests/s that batches sustain (`throughput`) and the part that missed its target (`violated`).
    Episodes are truncated after `steps`, and never end by themselves.
    """

    def __init__(self, problem: Problem, low: Sequence[float], high: Sequence[float], *, steps: int = STEPS) -> None:
        """Raise PlanError for a problem without devices or models, and for rates that are no range."""
        cluster = Cluster.of(problem)
        self._environment = Environment(cluster, low, high)
        self._steps, self._step = steps, 0
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (self._environment.state_size,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([len(cluster.devices), cluster.shares] * len(cluster.models))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[States, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._environment.reset(self.np_random).astype(np.float32), {}

    def step(self, action: Actions) -> tuple[States, float, bool, bool, dict[str, Any]]:
        state, reward, outcome = self._environment.step(np.asarray(action).reshape(-1, 2))
        self._step += 1
        models = self._environment.cluster.models
        info = {
            "throughput": dict(zip(models, outcome.throughput, strict=True)),
            "violated": dict(zip(models, outcome.violated, strict=True)),
        }
        return state.astype(np.float32), reward, False, self._step >= self._steps, info
