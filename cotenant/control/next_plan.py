"""Say why to plan anew, and how far the plan that comes next has come."""

from __future__ import annotations

from typing import NamedTuple

from cotenant.control.adaptation import Cause, Solve, Solved, SolveStep


class Need(NamedTuple):
    """A reason to plan anew, the least that may do, and whether it is certain."""

    cause: Cause
    reason: str
    step: SolveStep = SolveStep.KEEP
    certain: bool = True


class Solving(NamedTuple):
    """A plan is asked for. since: when it was; certain: whether it surely has a reason."""

    asked: Solve
    since: float
    certain: bool


class Ready(NamedTuple):
    """A plan waits until it is certain that rates have risen. since: when it was asked for."""

    asked: Solve
    solved: Solved
    since: float


class Rolling(NamedTuple):
    """A plan is rolled out. since: when it was asked for."""

    asked: Solve
    solved: Solved
    since: float
