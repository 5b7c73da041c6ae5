"""Combine planners into portfolios, so that the returned plan is never behind that of a simpler planner.

A planner of a paper plans alone. `geometry` is a search within a time limit: the heuristics of the papers cost next to
nothing and are sometimes better, above all for the largest rate. Portfolios are defined here, and nowhere else.
"""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Plan
from cotenant.planners import geometry, ideal
from cotenant.planners.geometry.competitors import Competitors
from cotenant.planners.problem import Problem
from cotenant.planners.registry import Planner, load_planner

LEADER = "geometry"
# Planners that answer within milliseconds.
QUICK = ("elastic-plus", "bestfit", "squishy")


class PlannerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a planner as `cotenant.planning.plan` calls it.

    plan: the planner, with its portfolio inside where it has one. quick: further planners by name for the largest rate:
    how much of a plan's rate holds under random arrivals is known only once it is made.
    """

    name: str
    plan: Planner
    quick: dict[str, Planner] = {}


def choose_planner(name: str, *, portfolio: bool = True) -> PlannerChoice:
    """Load a planner by name, with its portfolio unless told otherwise. Raises PlanError where there is none."""
    if name != LEADER or not portfolio:
        return PlannerChoice(name=name, plan=load_planner(name))
    return PlannerChoice(name=name, plan=plan, quick=_quick())


def plan(problem: Problem) -> Plan:
    """Return the best plan of `geometry` and its competitors, with the bound."""
    return geometry.plan(problem, _competitors())


def feasible(problem: Problem) -> Plan | None:
    """Return a sound plan that serves the rates on however many of the devices; None where none was found."""
    return geometry.feasible(problem, _competitors())


def _competitors() -> Competitors:
    return Competitors(quick=_quick(), exhaustive=ideal)


def _quick() -> dict[str, Planner]:
    return {name: load_planner(name) for name in QUICK}
