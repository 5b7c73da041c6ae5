"""Train a policy of `inss-plus`: soft actor-critic on moves, with masked choices and decoupled entropies.

In an episode a fleet serves some rates, other rates are asked for, and moves follow until these are served or there are
none left. Rates are drawn around the largest that moves by their gain alone serve, where it matters which move is made.
A policy knows no model by its name, so that it may be trained on some problems and used for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cotenant.errors import PlanError
from cotenant.planners.inss.device_options import Floats, Options, options_of
from cotenant.planners.inss.moves import CHOICES, FEATURES, MOST_MOVES, DeviceStates, Moves, moved_by_gain
from cotenant.planners.inss.replay import Replay
from cotenant.planners.inss.sac import Sac, SacOptions, one_thread
from cotenant.planners.inss.training import Episode
from cotenant.planners.policy import Policy
from cotenant.planners.problem import Problem

DIRECTIONS = 30  # proportions of rates, for each problem
MIXING = 2.0  # of the Dirichlet distribution of the work of models
LEAST, MOST = 0.9, 1.15  # of the largest rates that moves by their gain alone serve
HALVINGS = 7  # of the search for these
NEARLY_SERVED = 1e-3  # of the requests/s, unserved where rates count as served there
MANY = 8  # devices of a kind without a count
LEARNER = SacOptions(hidden=(64, 64), learning_rate=1e-3, discount=0.97, temperature=0.1, target_entropy=0.5)


class PlusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure a training."""

    episodes: int = 500
    batch: int = 64
    replay: int = 10_000
    seed: int = 0
    learner: SacOptions = LEARNER


class Fleet(msgspec.Struct, frozen=True, eq=False):
    """Hold a problem to train on. kinds: by device. rates: directions, each the largest that moves by their gain alone
    serve; capacities: of the devices then."""

    options: Options
    kinds: tuple[int, ...]
    rates: tuple[Floats, ...]
    capacities: tuple[Floats, ...]

    @classmethod
    def of(cls, problem: Problem, rng: np.random.Generator) -> Fleet:
        """Prepare a problem. Raises PlanError where no device serves any model."""
        options = options_of(problem)
        counts = [MANY if kind.count is None else kind.count for kind in problem.fleet]
        kinds = tuple(index for index, count in enumerate(counts) for _ in range(count))
        if not kinds or not len(options.partitions):
            raise PlanError("a training needs at least one device that serves a model within its target; there is none")
        rates, states = [], []
        for _ in range(DIRECTIONS):
            rate, state = _largest(options, kinds, rng.dirichlet([MIXING] * len(options.sizes)) * options.sizes)
            rates.append(rate)
            states.append(state)
        return cls(options, kinds, tuple(rates), tuple(state.capacities for state in states))

    def episode(self, rng: np.random.Generator) -> DeviceStates:
        """Draw rates, and devices as they are for others."""
        before, after = rng.integers(len(self.rates), size=2)
        factor = rng.uniform(LEAST, MOST)
        return DeviceStates(self.options, factor * self.rates[after], self.kinds, self.capacities[before])


def train(
    problems: Sequence[Problem], options: PlusOptions, on_episode: Callable[[Episode], None] = lambda episode: None
) -> Policy:
    """Train a policy on problems; an episode is on one of them, drawn at random. Rates of the problems do not matter.

    on_episode: called after each. Equal seeds give equal policies. Raises PlanError where there is nothing to decide,
    and where the networks diverge.
    """
    rng = np.random.default_rng(options.seed)
    fleets = [Fleet.of(problem, rng) for problem in problems]
    learner = Sac(
        CHOICES * len(FEATURES),
        (CHOICES,),
        msgspec.structs.replace(options.learner, decoupled=True, choice_features=len(FEATURES)),
        options.seed,
    )
    replay = Replay(options.replay, CHOICES * len(FEATURES), 1, CHOICES)
    updates = 0
    with one_thread():
        for number in range(options.episodes):
            states = fleets[rng.integers(len(fleets))].episode(rng)
            moves = states.moves()
            total, losses, least = 0.0, [], states.unserved
            for step in range(MOST_MOVES):
                if states.served or not len(moves.device):
                    break
                state, mask = observed(states, moves)
                (choice,) = learner.act(state, mask, rng)
                reward = states.make(int(moves.device[choice]), int(moves.option[choice]))
                total, least = total + reward, min(least, states.unserved)
                moves = states.moves()
                done = states.served or not len(moves.device) or step == MOST_MOVES - 1
                following, next_mask = observed(states, moves)
                replay.add(state, np.array([choice]), reward, following, mask, next_mask, done=done)
                if len(replay) >= min(options.batch, options.replay):
                    losses.append(learner.update(replay.sample(options.batch, rng)))
                    updates += 1
            loss = float(np.mean(losses)) if losses else 0.0
            if not np.isfinite(loss):
                raise PlanError(
                    f"training diverged in episode {number}: the critics' loss is {loss}; lower the learning rate of"
                    f" {options.learner.learning_rate:g}"
                )
            asked = float(states.rates.sum())
            on_episode(
                Episode(
                    number=number,
                    reward=total,
                    throughput=(1 - least) * asked,
                    violated=least,
                    temperature=learner.temperature,
                    critic_loss=loss,
                )
            )
    return Policy(planner="inss-plus", features=FEATURES, updates=updates, seed=options.seed, layers=learner.layers())


def observed(states: DeviceStates, moves: Moves) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return the features of all choices as one row, zeros where there are fewer, and which there are."""
    rows = np.zeros((CHOICES, len(FEATURES)))
    rows[: len(moves.device)] = states.features(moves)
    mask = np.arange(CHOICES) < len(moves.device)
    if not mask.any():
        mask[0] = True  # a distribution needs a choice; the episode is over
    return rows.ravel(), mask


def _largest(options: Options, kinds: Sequence[int], direction: Floats) -> tuple[Floats, DeviceStates]:
    """Return the largest multiple of rates that moves by their gain alone serve, and the devices then."""
    empty = np.zeros((len(kinds), len(direction)))
    low, high = 0.0, 2.0 * len(kinds)
    best = DeviceStates(options, 0.0 * direction, kinds, empty)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        states = moved_by_gain(DeviceStates(options, middle * direction, kinds, empty), MOST_MOVES)
        if states.unserved <= NEARLY_SERVED:
            low, best = middle, states
        else:
            high = middle
    return low * direction, best
