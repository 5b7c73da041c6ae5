"""Learn by soft actor-critic with discrete actions (Christodoulou, 2019), as InSS does: section 5.4, equations 6 to 9.

An action consists of several choices, one of each *head*: in InSS a device and a share for each model. Every head has a
distribution of its own, and the critics give a value to each choice of each head; a head's target is
r + discount · Σ π (min Q' - τ log π), and losses are summed over heads, as in the published program. The minimum of two
critics and targets that follow slowly keep values from growing by their own errors.

Two options go beyond the paper. Masks rule choices out, so that their probability is 0. `decoupled` keeps the entropy
out of the critics' targets and gives the actor alone a temperature: with discrete actions the entropy's bonus otherwise
changes which choice the critics think best.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cotenant.planners.policy import Layer, layer

HIDDEN = (512, 256)
IMPOSSIBLE = -1e9  # logit of a choice that is masked


class SacOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the learner; defaults are table 1's.

    target_entropy: of a head, in nats; None: -log(1 + number of the actor's outputs). soft_update: κ. choice_features:
    where a state is a row of so many features for each choice, with one head: networks then value each choice by its
    own row, whichever place it has; None: a state is seen as a whole.
    """

    hidden: tuple[int, ...] = HIDDEN
    learning_rate: float = 1e-4
    discount: float = 0.99
    temperature: float = 1.0
    target_entropy: float | None = None
    soft_update: float = 0.01
    decoupled: bool = False
    choice_features: int | None = None


class Batch(msgspec.Struct, frozen=True):
    """Hold transitions, a row for each.

    actions: a choice by head; masks: possible choices, by output; done: 1 where the episode ended.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    masks: Tensor
    next_masks: Tensor
    done: Tensor


class Network(nn.Module):
    """Several networks of one shape that are evaluated together: outputs are (network, row, output)."""

    def __init__(self, sizes: Sequence[int], count: int) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(sizes):
            limit = inputs**-0.5
            self.weights.append(nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-limit, limit)))
            self.biases.append(nn.Parameter(torch.empty(count, 1, outputs).uniform_(-limit, limit)))

    def forward(self, rows: Tensor) -> Tensor:
        values = rows.expand(len(self.weights[0]), *rows.shape)
        for n, (weights, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(bias, values, weights)
            if n < len(self.weights) - 1:
                values = torch.relu(values)
        return values


class ChoiceNetwork(Network):
    """Networks that see the choices of a state one at a time."""

    def forward(self, rows: Tensor) -> Tensor:
        values = super().forward(rows.reshape(-1, self.weights[0].shape[1]))
        return values.reshape(len(values), len(rows), -1)


class Sac:
    """Hold the networks of a learner, and update them by batches of transitions."""

    def __init__(self, state_size: int, heads: Sequence[int], options: SacOptions, seed: int) -> None:
        torch.manual_seed(seed)
        self.heads = tuple(heads)
        self.options = options
        outputs = sum(heads)
        features = options.choice_features
        if features is None:
            sizes = (state_size, *options.hidden, outputs)
            self.actor, self.critics = Network(sizes, 1), Network(sizes, 2)
        else:
            sizes = (features, *options.hidden, 1)
            self.actor, self.critics = ChoiceNetwork(sizes, 1), ChoiceNetwork(sizes, 2)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.tensor(float(np.log(options.temperature)), requires_grad=True)
        entropy = options.target_entropy
        self.target_entropy = float(-np.log(1 + outputs)) if entropy is None else entropy
        self._optimizers = {
            "critics": torch.optim.Adam(self.critics.parameters(), lr=options.learning_rate, fused=True),
            "actor": torch.optim.Adam(self.actor.parameters(), lr=options.learning_rate, fused=True),
            "temperature": torch.optim.Adam([self.log_temperature], lr=options.learning_rate),
        }
        widest = max(heads)
        edges = np.cumsum((0, *heads))
        # Outputs by head and choice; heads with fewer choices than the widest repeat an output, which is masked.
        columns = np.minimum(np.arange(widest)[None, :], np.array(heads)[:, None] - 1) + edges[:-1, None]
        self._columns = torch.tensor(columns.ravel())
        self._first = torch.tensor(edges[:-1])
        self._exists = torch.tensor(np.arange(widest)[None, :] < np.array(heads)[:, None])

    @property
    def temperature(self) -> float:
        return float(self.log_temperature.detach().exp())

    @torch.no_grad()
    def act(self, state: NDArray[np.float64], mask: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw a choice of each head by its probability."""
        rows = torch.as_tensor(state[None], dtype=torch.float32)
        probabilities = self.distribution(rows, torch.as_tensor(mask[None]))[0][0].double().numpy()
        edges = probabilities.cumsum(axis=1)
        drawn = rng.random(len(edges)) * edges[:, -1]
        return np.array((edges < drawn[:, None]).sum(axis=1), dtype=np.int64)

    def distribution(self, states: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of choices and their logarithms, by row, head and choice."""
        logits = self.by_head(self.actor(states)[0])
        possible = self.by_head(masks) & self._exists
        logs = torch.log_softmax(torch.where(possible, logits, IMPOSSIBLE), dim=-1)
        probabilities = logs.exp()
        return probabilities, torch.where(possible, logs, 0.0)

    def by_head(self, outputs: Tensor) -> Tensor:
        """Return outputs by head and choice, as the last two dimensions."""
        return outputs.index_select(-1, self._columns).reshape(*outputs.shape[:-1], *self._exists.shape)

    def critic_loss(self, batch: Batch) -> Tensor:
        """Return equation 6: half of the mean squared error of both critics, summed over heads."""
        with torch.no_grad():
            probabilities, logs = self.distribution(batch.next_states, batch.next_masks)
            values = self.by_head(self.targets(batch.next_states).min(dim=0).values)
            if not self.options.decoupled:
                values = values - self.log_temperature.exp() * logs
            following = (probabilities * values).sum(dim=-1)
            target = batch.rewards[:, None] + self.options.discount * (1 - batch.done)[:, None] * following
        columns = self._first + batch.actions
        error: Tensor = self.critics(batch.states).gather(-1, columns.expand(2, *columns.shape)) - target
        return 0.5 * error.square().mean(dim=1).sum()

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return equation 8, summed over heads, and the entropy of each row and head."""
        probabilities, logs = self.distribution(batch.states, batch.masks)
        with torch.no_grad():
            values = self.by_head(self.critics(batch.states).min(dim=0).values)
        temperature = self.log_temperature.detach().exp()
        loss = (probabilities * (temperature * logs - values)).sum(dim=-1)
        return loss.sum(dim=-1).mean(), -(probabilities * logs).sum(dim=-1).detach()

    def temperature_loss(self, entropies: Tensor) -> Tensor:
        """Return equation 9: the mean of -τ (log π + Ĥ), which is τ (entropy - Ĥ)."""
        return self.log_temperature.exp() * (entropies - self.target_entropy).mean()

    def update(self, batch: Batch) -> float:
        """Update critics, actor, temperature and targets by one batch; return the critics' loss."""
        critic_loss = self.critic_loss(batch)
        self._apply("critics", critic_loss)
        actor_loss, entropies = self.actor_loss(batch)
        self._apply("actor", actor_loss)
        self._apply("temperature", self.temperature_loss(entropies))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.targets.parameters()), list(self.critics.parameters()), self.options.soft_update
            )
        return float(critic_loss.detach())

    def layers(self) -> tuple[Layer, ...]:
        """Return the actor as plain arrays."""
        return tuple(
            layer(weights[0].detach().double().numpy(), bias[0, 0].detach().double().numpy())
            for weights, bias in zip(self.actor.weights, self.actor.biases, strict=True)
        )

    def _apply(self, which: str, loss: Tensor) -> None:
        optimizer = self._optimizers[which]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread within a block: networks this small gain nothing by more, and sums stay the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
