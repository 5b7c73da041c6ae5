"""Notice that an SLO is missed by more than chance explains.

Requests are not late independently: a queue that is long for a moment makes all in it late. So what chance may account
for is judged twice: as if they were, and by how misses are distributed over the intervals in which they were seen.
"""

from __future__ import annotations

import math

MEMORY = 2000.0  # requests that are remembered, about: older ones are forgotten exponentially
INTERVALS = 40.0  # that are remembered at least: by a few, misses that come together are not told from chance
LEAST = 100.0  # requests that tell anything
DEVIATIONS = 4.0  # standard deviations of a binomial count that chance may account for
CLUSTER_DEVIATIONS = 2.5  # the same of a count of misses that come together, interval by interval


class AttainmentMonitor:
    """Count the requests of one model that ended and that met their target."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all requests: they were served by another plan."""
        self._stayed = self._within = self._squares = 0.0

    def observe(self, stayed: int, within_target: int) -> None:
        """Take the requests of the last interval."""
        kept = math.exp(-min(stayed / MEMORY, 1.0 / INTERVALS))
        self._stayed = self._stayed * kept + stayed
        self._within = self._within * kept + within_target
        self._squares = self._squares * kept + (stayed - within_target) ** 2

    @property
    def value(self) -> float | None:
        """The fraction that met their target; None where no request ended."""
        return self._within / self._stayed if self._stayed else None

    def falls_short(self, target: float) -> bool:
        """Tell whether attainment is below a target, be it by chance."""
        return self._stayed >= LEAST and self._within < target * self._stayed

    def missed(self, target: float) -> bool:
        """Tell whether attainment is below a target by more than chance explains."""
        if not self.falls_short(target):
            return False
        chance = DEVIATIONS * (math.sqrt(target * (1.0 - target) * self._stayed) + 1.0)
        clusters = CLUSTER_DEVIATIONS * math.sqrt(self._squares)
        return self._within < target * self._stayed - max(chance, clusters)
