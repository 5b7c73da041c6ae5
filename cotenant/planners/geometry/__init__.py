"""Geometry: an integer program over ways to cut devices and modes of partitions, with a proven bound.

DESIGN.md, Planners. How many devices get each cutting, and how many partitions of each share run each mode, so that no
more partitions are used than cut and the rates are met: with the fewest devices, at the least price, or for the largest
common multiple of the rates. The program's size depends on models, shares and kinds, not on how many devices there are.

1. Modes of one model give the linear relaxation, and with it the bound (see modes.py). Where models are few, modes of
   pairs say what time-sharing costs, and whole numbers of partitions tighten it.
2. Sets of models that may share a partition: pairs, those that fill a partition best at the relaxation's prices, and
   those of the plan in force and of the papers' planner. A first program picks sets, any average of whose modes it may
   use; a second picks among single modes of those sets.
3. Devices are composed, neighbours paired so that they slow each other least, and every promise is checked.

Neighbours slow each other, which the program does not see: latencies are multiplied by what the worst neighbour may do,
or a part of that, and what results is checked with the neighbours that are really there. The bound counts no slowdown.
"""

from __future__ import annotations

from cotenant.core.plan import Plan
from cotenant.planners import Problem
from cotenant.planners.geometry.search import Search


def plan(problem: Problem) -> Plan:
    """The best plan that was found within the problem's time limit, with the bound."""
    return Search(problem).plan()


def bound(problem: Problem) -> float | None:
    """What no sound plan can beat: the least devices or cost, or the largest multiple of the rates.

    Where there are too few devices, how many it would take. None where there is no limit, or nothing can be served.
    """
    return Search(problem).bound()


def feasible(problem: Problem) -> Plan | None:
    """A sound plan that serves the rates, on however many of the devices; None where none was found."""
    return Search(problem).feasible()
