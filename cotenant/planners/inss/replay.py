"""Keep transitions for a learner, and draw batches of them: the newest replaces the oldest."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cotenant.planners.inss.sac import Batch


class Replay:
    """Hold at most `size` transitions, of states, actions by head and masks by output."""

    def __init__(self, size: int, state_size: int, heads: int, outputs: int) -> None:
        self._states = np.zeros((2, size, state_size), dtype=np.float32)
        self._masks = np.zeros((2, size, outputs), dtype=bool)
        self._actions = np.zeros((size, heads), dtype=np.int64)
        self._scalars = np.zeros((2, size), dtype=np.float32)
        self._size, self._next, self._held = size, 0, 0

    def __len__(self) -> int:
        return self._held

    def add(
        self,
        state: NDArray[np.float64],
        action: NDArray[np.int64],
        reward: float,
        following: NDArray[np.float64],
        mask: NDArray[np.bool_],
        next_mask: NDArray[np.bool_],
        *,
        done: bool = False,
    ) -> None:
        n = self._next
        self._states[0, n], self._states[1, n] = state, following
        self._masks[0, n], self._masks[1, n] = mask, next_mask
        self._actions[n] = action
        self._scalars[:, n] = reward, float(done)
        self._next, self._held = (n + 1) % self._size, min(self._held + 1, self._size)

    def sample(self, count: int, rng: np.random.Generator) -> Batch:
        """Return transitions drawn with equal probability."""
        drawn = rng.integers(self._held, size=count)
        states, masks = torch.from_numpy(self._states[:, drawn]), torch.from_numpy(self._masks[:, drawn])
        rewards, done = torch.from_numpy(self._scalars[:, drawn])
        return Batch(states[0], torch.from_numpy(self._actions[drawn]), rewards, states[1], masks[0], masks[1], done)
