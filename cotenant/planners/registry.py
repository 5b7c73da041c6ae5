"""Find planners by name: those of this package, and entry points of other installed packages.

A package registers a planner in its pyproject.toml:

    [project.entry-points."cotenant.planners"]
    mine = "my_package.my_module:plan"

Reading the installed packages takes longer than most commands take to start. So entry points are read only for an
unknown name, or to list all names, and an error in one is raised when it is used.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from cotenant.core.plan import Plan
from cotenant.errors import CotenantError, PlanError
from cotenant.planners.problem import Problem

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# A planner that supports the objective "rate" returns it as its plan's objective; any other plans for fixed rates.
Planner = Callable[[Problem], Plan]

# Name → module with a function `plan(problem) -> Plan`, or module:function, loaded on use.
PLANNERS: dict[str, str] = {
    "squishy": "cotenant.planners.squishy",
    "bestfit": "cotenant.planners.bestfit",
    "elastic": "cotenant.planners.elastic",
    "elastic-plus": "cotenant.planners.elastic_plus",
    "ideal": "cotenant.planners.ideal",
    "gslice": "cotenant.planners.gslice",
    "igniter": "cotenant.planners.igniter",
    "hetsev": "cotenant.planners.hetsev",
    "score": "cotenant.planners.score",
    "min": "cotenant.planners.minimum",
    "max": "cotenant.planners.maximum",
    "roundrobin": "cotenant.planners.roundrobin",
    "colocate": "cotenant.planners.pairs",
    "colocate-memcap": "cotenant.planners.pairs:plan_by_memory",
    "colocate-sm": "cotenant.planners.pairs:plan_by_sm",
    "colocate-mem": "cotenant.planners.pairs:plan_by_dram",
    "inss": "cotenant.planners.inss",
    "inss-plus": "cotenant.planners.inss.plus",
    "geometry": "cotenant.planners.geometry",
}
# Of these, the papers' systems that are here to be compared with: `cotenant compare --all` has them, and `cotenant plan
# --compare` where they are named.
BASELINES = frozenset(PLANNERS) - {"squishy", "bestfit", "elastic", "elastic-plus", "ideal", "geometry"}
GROUP = "cotenant.planners"


def load_planner(name: str) -> Planner:
    """Load a planner by name. Raises PlanError for an unknown name, listing the known ones, and for another package's
    planner that cannot be loaded."""
    if name in PLANNERS:
        module, _, function = PLANNERS[name].partition(":")
        planner: Planner = getattr(importlib.import_module(module), function or "plan")
        return planner
    registered = _registered()
    if name not in registered:
        raise PlanError(f"unknown planner {name!r}; available: {', '.join(sorted(planner_names()))}")
    return _loaded(registered[name])


def planner_names() -> list[str]:
    """Return the names of all planners, those of this package first."""
    return [*PLANNERS, *_registered()]


@cache
def _registered() -> dict[str, EntryPoint]:
    """Return planners of other packages, by name. Raises PlanError for a name that two register."""
    from importlib.metadata import entry_points  # takes as long to import as many of our own modules

    planners = {}
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    for name, same in groupby(points, key=lambda point: point.name):
        first, *more = same
        if name in PLANNERS or more:
            whose = "cotenant" if name in PLANNERS else _package(more[0])
            raise PlanError(
                f"planner {name!r} of {_package(first)}: {whose} registers the same name; rename one in the entry"
                f" points of its package, or uninstall it"
            )
        planners[name] = first
    return planners


@cache
def _loaded(point: EntryPoint) -> Planner:
    """Load a planner of another package; its exceptions become PlanErrors that name the package."""
    label = f"planner {point.name!r} of {_package(point)}"
    try:
        function = point.load()
    except Exception as error:
        raise PlanError(f"{label} cannot be loaded: {_describe(error)}") from error
    if not callable(function):
        raise PlanError(f"{label}: {point.value} is {type(function).__name__}, not a function from a Problem to a Plan")

    def planner(problem: Problem) -> Plan:
        try:
            plan = function(problem)
        except CotenantError:
            raise
        except Exception as error:
            raise PlanError(f"{label} failed: {_describe(error)}") from error
        if not isinstance(plan, Plan):
            raise PlanError(f"{label} returned {type(plan).__name__}, not a Plan")
        return msgspec.structs.replace(plan, planner=point.name)

    return planner


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package without a name"


def _describe(error: Exception) -> str:
    """Return the error and its line, for the author of the planner; the line of a failed import is omitted."""
    (*_, last) = traceback.extract_tb(error.__traceback__)
    place = "" if "importlib" in last.filename else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{place}"
