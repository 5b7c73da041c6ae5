"""Portfolios: planners that are tried together, so that the plan given is never behind that of a simpler planner.

A planner of a paper answers alone. `geometry` is a search within a time limit: the heuristics of the papers cost it
next to nothing and are sometimes ahead of it, for the largest rate above all. Which planners are tried beside which
stands here, and nowhere else.
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
QUICK = ("elastic", "bestfit", "squishy")


class PlannerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A planner as `cotenant.planning.plan` asks it.

    plan: the planner, with its portfolio inside where it has one. quick: planners by name that are asked, too, where
    the largest rate is looked for: how much of a plan's rate random arrivals leave is known only after it was made.
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
