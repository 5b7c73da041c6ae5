"""Count the work of a search against its time limit.

Work is counted in units that take about a second on a slow core, so that a search stops at the same point in every run
and on every machine. It may amount to a part of the time limit only: a clock, where there is one, stops the search at
the limit itself, which happens on machines that are busy or slow, and nowhere else. No other decision reads it.
"""

from __future__ import annotations

import math

from cotenant.planners.problem import Problem

COUNTED = 0.5  # part of the time limit that counted work may amount to: the rest is for busy and for slower machines


class Deadline:
    """Say how much of a time limit is left by the problem's clock. passed: whether that was found to be over."""

    def __init__(self, problem: Problem) -> None:
        self._clock = problem.clock
        self._end = 0.0 if problem.clock is None else problem.clock() + problem.time_limit
        self.passed = False

    @property
    def is_timed(self) -> bool:
        """Whether there is a clock."""
        return self._clock is not None

    def seconds_left(self) -> float:
        """Return the seconds left; inf without a clock, and 0 once none were left."""
        if self._clock is None:
            return math.inf
        left = 0.0 if self.passed else self._end - self._clock()
        self.passed = left <= 0
        return max(0.0, left)


class WorkBudget:
    """Hold what is left of the work that a time limit allows, or of a part of it.

    deadline: of the search that this one is a part of, where it is; else the problem's time limit from now on.
    """

    def __init__(self, problem: Problem, deadline: Deadline | None = None) -> None:
        self.deadline = deadline or Deadline(problem)
        self._limit = COUNTED * problem.time_limit
        self._whole: WorkBudget | None = None
        self.used = 0.0

    def part(self, share: float) -> WorkBudget:
        """Return a budget of a share of what is left; what it spends counts for the whole as well."""
        part = WorkBudget.__new__(WorkBudget)
        part.deadline, part._limit, part._whole, part.used = self.deadline, share * self._unspent(), self, 0.0
        return part

    def spend(self, seconds: float) -> None:
        """Count work that takes about so long."""
        self.used += seconds
        if self._whole is not None:
            self._whole.spend(seconds)

    def left(self) -> float:
        """Return the seconds of work left; 0 once the deadline has passed."""
        return self._unspent() if self.deadline.seconds_left() > 0 else 0.0

    def _unspent(self) -> float:
        unspent = max(0.0, self._limit - self.used)
        return unspent if self._whole is None else min(unspent, self._whole._unspent())
