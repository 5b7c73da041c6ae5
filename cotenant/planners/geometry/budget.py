"""Count the work of a search against its time limit.

Work is counted in units that take about a second on a slow core, so that a search stops at the same point in every run
and on every machine. A clock only ends searches that the machine is too slow for; decisions read none of their own.
"""

from __future__ import annotations

import math

from cotenant.planners.problem import Problem

COUNTED = 0.6  # part of the time limit that counted work may amount to: the count is rough, and often too low


class WorkBudget:
    """Hold what is left of a time limit, or of a part of one. times: as much work as usual for that limit, where the
    count is known to be too high."""

    def __init__(self, problem: Problem, *, times: float = 1.0) -> None:
        self._clock = problem.clock
        begun = 0.0 if problem.clock is None else problem.clock()
        self._limit, self._deadline = times * COUNTED * problem.time_limit, begun + problem.time_limit
        self._whole: WorkBudget | None = None
        self.used = 0.0

    def part(self, share: float) -> WorkBudget:
        """Return a budget of a share of what is left; what it spends counts for the whole as well."""
        part = WorkBudget.__new__(WorkBudget)
        now = 0.0 if self._clock is None else self._clock()
        part._clock, part._whole, part.used = self._clock, self, 0.0
        part._limit = share * self.left()
        part._deadline = now + share * max(0.0, self._deadline - now)
        return part

    def spend(self, seconds: float) -> None:
        """Count work that takes about so long."""
        self.used += seconds
        if self._whole is not None:
            self._whole.spend(seconds)

    def left(self) -> float:
        """Return the seconds of work left; 0 where the clock has run out as well."""
        return max(0.0, self._limit - self.used) if self.seconds_left() > 0 else 0.0

    def seconds_left(self) -> float:
        """Return the seconds left by the clock; inf without one."""
        return math.inf if self._clock is None else self._deadline - self._clock()
