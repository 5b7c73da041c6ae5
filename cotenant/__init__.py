"""Serve many models on few shared accelerators, each within its latency target.

The operations of the command line, as functions on the same values:

    problem = cotenant.read_problem(Path("problem.toml"))
    plan = cotenant.solve("elastic", problem)
    cotenant.check(plan, problem)                        # what it violates: nothing
    cotenant.forecast(plan, problem)                     # what it will do under Poisson arrivals
    cotenant.simulate(problem, plan, seconds=60)         # and what the server's own dispatcher makes of it

Names are imported on first use: a worker process, which imports this package too, needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cotenant.config import (
        read_failures,
        read_problem,
        read_profiles_file,
        read_samples_file,
        read_settings,
        read_workload,
    )
    from cotenant.core.application import Application, Choice, Fixed, Poisson, Stage
    from cotenant.core.model import Kind, Model
    from cotenant.core.plan import Device, Partition, Placement, Plan
    from cotenant.core.profile import Point, Profile
    from cotenant.errors import CotenantError
    from cotenant.planners import Problem
    from cotenant.planners.check import check
    from cotenant.planners.forecast import forecast
    from cotenant.planners.solve import solve
    from cotenant.predictors import Load
    from cotenant.predictors.fitting import fit
    from cotenant.sim.run import simulate
    from cotenant.workload import Workload

_HOMES = {
    "Application": "core.application",
    "Choice": "core.application",
    "CotenantError": "errors",
    "Device": "core.plan",
    "Fixed": "core.application",
    "Kind": "core.model",
    "Load": "predictors",
    "Model": "core.model",
    "Partition": "core.plan",
    "Placement": "core.plan",
    "Plan": "core.plan",
    "Point": "core.profile",
    "Poisson": "core.application",
    "Problem": "planners",
    "Profile": "core.profile",
    "Stage": "core.application",
    "Workload": "workload",
    "check": "planners.check",
    "fit": "predictors.fitting",
    "forecast": "planners.forecast",
    "read_failures": "config",
    "read_problem": "config",
    "read_profiles_file": "config",
    "read_samples_file": "config",
    "read_settings": "config",
    "read_workload": "config",
    "simulate": "sim.run",
    "solve": "planners.solve",
}

__all__ = [
    "Application",
    "Choice",
    "CotenantError",
    "Device",
    "Fixed",
    "Kind",
    "Load",
    "Model",
    "Partition",
    "Placement",
    "Plan",
    "Point",
    "Poisson",
    "Problem",
    "Profile",
    "Stage",
    "Workload",
    "check",
    "fit",
    "forecast",
    "read_failures",
    "read_problem",
    "read_profiles_file",
    "read_samples_file",
    "read_settings",
    "read_workload",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cotenant' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cotenant.{_HOMES[name]}"), name)
