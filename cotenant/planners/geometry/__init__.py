"""Geometry: an integer program over ways to cut devices and modes of partitions, with a proven bound.

How many devices get each cutting, and how many partitions of each share run each mode (docs/concepts.md), so that no
more partitions are used than cut and the rates are met: with the fewest devices, at the least price, or for the largest
common multiple of the rates. The program's size depends on models, shares and kinds, not on how many devices there are.

1. Modes of one model give the linear relaxation, and with it a bound (see modes.py). Where models are few it is
   tightened by what partitions can really hold of what is asked, and by their being whole (see bounding.py).
2. Up to sixteen devices or so, modes are put on partitions by ruin and recreate (small.py), at the prices of the
   relaxation: the program would be hundreds of columns for a few partitions. Beyond, most is as the relaxation has it,
   and the integer program settles the rest (large.py), with the modes of several models that its prices pick.
3. The plan in force is where the search begins: it may stand as it is, or change by a few partitions. The best plan is
   taken, of equal ones the one that moves least. A portfolio may have plans of other planners compete.
4. Devices are composed, neighbours paired so that they slow each other least, and every promise is checked.

Neighbours slow each other, which neither search sees: latencies are multiplied by what neighbours do at worst, usually
or at least, and what results is checked with the neighbours that are really there; what comes short is asked for more.
The bound counts no slowdown; whether the rates can be served at all is asked with the least slowdown there can be.
"""

from __future__ import annotations

from cotenant.core.plan import Plan
from cotenant.planners.geometry import search
from cotenant.planners.geometry.competitors import ALONE, Competitors
from cotenant.planners.geometry.context import PlanningContext
from cotenant.planners.problem import Problem


def plan(problem: Problem, competitors: Competitors = ALONE) -> Plan:
    """Return the best plan found within the problem's time limit, with the bound.

    competitors: planners of a portfolio, whose plans are given where they are better.
    """
    return search.search_plan(problem, competitors)


def bound(problem: Problem) -> float | None:
    """What no sound plan can beat: the least devices or cost, or the largest multiple of the rates.

    Where there are too few devices, how many it would take. None where there is no limit, or nothing can be served.
    """
    return PlanningContext(problem).bound()


def feasible(problem: Problem, competitors: Competitors = ALONE) -> Plan | None:
    """Return a sound plan that serves the rates, on however many of the devices; None where none was found."""
    return search.find_feasible(problem, competitors)
