"""Define planners: functions from a `Problem` to a `Plan`. To add one: a file here and a line in PLANNERS, or an entry
point of your own package (see registry.py)."""

from __future__ import annotations

from cotenant.planners.problem import Arrivals, Objective, Problem
from cotenant.planners.registry import BASELINES, PLANNERS, Planner, load_planner, planner_names

__all__ = ["BASELINES", "PLANNERS", "Arrivals", "Objective", "Planner", "Problem", "load_planner", "planner_names"]
