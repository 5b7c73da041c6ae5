"""Plan with a proven bound: an integer program over cutting patterns of devices and modes of partitions.

It chooses how many devices get each cutting pattern and how many partitions of each share run each mode
(docs/concepts.md), so that no more partitions are used than cut and the rates are met: with the fewest devices, at the
least price, or for the largest common multiple of the rates. The size of the program depends on models, shares and
kinds, not on the number of devices.

1. Single-model modes give the linear relaxation, and with it a bound (modes.py). With few models it is tightened by
   limiting each partition to the demand, and by integrality cuts (bounding.py).
2. Up to sixteen devices, modes are placed on partitions by ruin and recreate (small_fleet.py), at the relaxation's
   prices: the program would have hundreds of columns for a few partitions. Beyond, the relaxation is rounded down and
   the integer program places the rest (large_fleet.py), with modes of several models found by pricing.
3. The search starts from the current plan, which may be kept or change by a few partitions. The best plan is
   returned, among equal ones the one that moves least. A portfolio may have plans of other planners compete.
4. Devices are assembled so that co-located partitions slow each other least, and every SLO is checked.

Neither search sees the actual interference: latencies are multiplied by the worst, the median or the least slowdown,
the result is checked with the actual ones, and demand is raised for models that come short. The bound assumes no
slowdown; feasibility is decided with the least possible ones.
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
    """Return a proven bound: on devices or cost from below, or on the multiple of the rates from above.

    With too few devices, it is the number needed. None where there is no limit, or nothing can be served.
    """
    return PlanningContext(problem).bound()


def may_serve(problem: Problem) -> bool:
    """Return whether the linear relaxation serves all rates with the devices, at the least slowdowns: where it does
    not, hardly any plan does, and without interference none."""
    return PlanningContext(problem).may_serve()


def feasible(problem: Problem, competitors: Competitors = ALONE) -> Plan | None:
    """Return a sound plan that serves the rates, on however many of the devices; None where none was found."""
    return search.find_feasible(problem, competitors)
