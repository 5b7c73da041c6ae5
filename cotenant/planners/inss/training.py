"""Train InSS' policy for a cluster: Algorithm 2, with the parameters of table 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cotenant.errors import PlanError
from cotenant.planners.inss.cluster import Cluster, Floats
from cotenant.planners.inss.environment import PENALTY, STEPS, Environment, Outcome
from cotenant.planners.inss.replay import Replay
from cotenant.planners.inss.sac import Sac, SacOptions, one_thread
from cotenant.planners.policy import Policy

EPISODES, REPLAY, BATCH = 1500, 10_000, 100  # table 1
REWARD_SCALE = 10.0 / PENALTY  # of the reward that the learner sees, which section 5.4 normalises without saying how


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure a training.

    steps: of an episode, each with one update of the networks once there are transitions for a batch.
    """

    episodes: int = EPISODES
    steps: int = STEPS
    batch: int = BATCH
    replay: int = REPLAY
    seed: int = 0
    learner: SacOptions = SacOptions()


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """Report an episode.

    Of `inss`, means over its steps: reward of equation 3; throughput: requests/s that all batches sustain; violated:
    fraction of requests late or dropped, on average over models. Of `inss-plus`: the sum of rewards; the requests/s
    that are served at best, and the part that is not.
    """

    number: int
    reward: float
    throughput: float
    violated: float
    temperature: float
    critic_loss: float


def train(
    cluster: Cluster,
    low: Sequence[float],
    high: Sequence[float],
    options: TrainingOptions,
    on_episode: Callable[[Episode], None] = lambda episode: None,
) -> Policy:
    """Train a policy for rates between `low` and `high`, requests/s of each model.

    on_episode: called after each. Equal seeds give equal policies. Raises PlanError where there is nothing to decide,
    and where the networks diverge.
    """
    environment = Environment(cluster, low, high)
    learning = _Learning(environment, options)
    with one_thread():
        for number in range(options.episodes):
            state = environment.reset(learning.rng)
            steps = []
            learning.losses = []
            for _ in range(options.steps):
                state, _, reward, outcome = learning.step(state)
                steps.append((reward, sum(outcome.throughput), float(np.mean(outcome.violated))))
            loss = float(np.mean(learning.losses)) if learning.losses else 0.0
            if not np.isfinite(loss):
                raise PlanError(
                    f"training diverged in episode {number}: the critics' loss is {loss}; lower the learning rate of"
                    f" {options.learner.learning_rate:g}"
                )
            reward, throughput, violated = (float(mean) for mean in np.mean(steps, axis=0))
            on_episode(
                Episode(
                    number=number,
                    reward=reward,
                    throughput=throughput,
                    violated=violated,
                    temperature=learning.learner.temperature,
                    critic_loss=loss,
                )
            )
    return learning.policy()


class _Learning:
    """Hold what a training needs from step to step."""

    def __init__(self, environment: Environment, options: TrainingOptions) -> None:
        self.environment, self.options = environment, options
        self.rng = np.random.default_rng(options.seed)
        self.losses: list[float] = []
        self.updates = 0
        self._heads = environment.cluster.heads
        self._every = np.ones(sum(self._heads), dtype=bool)
        self.learner = Sac(environment.state_size, self._heads, options.learner, options.seed)
        self._replay = Replay(options.replay, environment.state_size, len(self._heads), sum(self._heads))

    def step(self, state: Floats) -> tuple[Floats, NDArray[np.int64], float, Outcome]:
        """Act, keep the transition, and update the networks; return the next state, the action and what it led to."""
        action = self.learner.act(state, self._every, self.rng)
        following, reward, outcome = self.environment.step(action.reshape(-1, 2))
        self._replay.add(state, action, reward * REWARD_SCALE, following, self._every, self._every)
        if len(self._replay) >= min(self.options.batch, self.options.replay):
            self.losses.append(self.learner.update(self._replay.sample(self.options.batch, self.rng)))
            self.updates += 1
        return following, action, reward, outcome

    def policy(self) -> Policy:
        cluster = self.environment.cluster
        return Policy(
            planner="inss",
            fleet=cluster.fleet_hash,
            devices=tuple(kind.name for kind in cluster.devices),
            models=cluster.models,
            models_hash=cluster.models_hash,
            low=tuple(self.environment.low.tolist()),
            high=tuple(self.environment.high.tolist()),
            heads=self._heads,
            updates=self.updates,
            seed=self.options.seed,
            layers=self.learner.layers(),
        )


def train_at(cluster: Cluster, rates: Sequence[float], options: TrainingOptions) -> list[NDArray[np.int64]]:
    """Train at given rates; return the action with the highest reward that training met, and the likeliest one at its
    end: each by model, a device and a share."""
    environment = Environment(cluster, rates, rates)
    learning = _Learning(environment, options)
    best, most = np.zeros((len(cluster.models), 2), dtype=np.int64), -np.inf
    with one_thread():
        for _ in range(options.episodes):
            state = environment.reset(learning.rng)
            for _ in range(options.steps):
                state, action, reward, _ = learning.step(state)
                if reward > most:
                    best, most = action.reshape(-1, 2), reward
    last = learning.policy().choices(environment.at(rates))
    return [best, np.array(last, dtype=np.int64).reshape(-1, 2)]
