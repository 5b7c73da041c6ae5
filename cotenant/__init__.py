"""Serve many models on few shared accelerators, each within its latency SLO.

The operations of the command line, as functions on the same values:

    problem = cotenant.read_problem(Path("problem.toml"))
    plan = cotenant.plan(problem)                        # validated by simulation
    cotenant.check(plan, problem)                        # its violations: []
    cotenant.forecast(plan, problem)                     # predicted under Poisson arrivals
    cotenant.simulate(plan, problem, seconds=60)         # with the server's own dispatcher

Names are imported on first use: a worker process, which imports this package too, needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cotenant.app.running_server import Addresses, RunningServer
    from cotenant.app.serving import BackgroundServer, serve, serving
    from cotenant.app.sklearn_conversion import convert_sklearn
    from cotenant.config import (
        read_failures,
        read_problem,
        read_profiles_file,
        read_samples_file,
        read_settings,
        read_workload,
    )
    from cotenant.control.event_log import replay
    from cotenant.core.application import Application, Choice, Fixed, Poisson, Stage
    from cotenant.core.job import BatchInference, Command, JobState, JobStatus, Training
    from cotenant.core.model import Kind, Model
    from cotenant.core.plan import Device, Partition, Placement, Plan
    from cotenant.core.plan_diff import diff_plans
    from cotenant.core.profile import Point, Profile, write_profiles
    from cotenant.errors import (
        ConfigError,
        CotenantError,
        DeviceError,
        ModelError,
        PlanError,
        RequestError,
        WorkerError,
    )
    from cotenant.measure.report import Report
    from cotenant.planners import Problem
    from cotenant.planners.check import check
    from cotenant.planners.compare import compare
    from cotenant.planners.explain import explain
    from cotenant.planners.forecast import forecast
    from cotenant.planning import plan
    from cotenant.predictors import ConstantMargin, Load, NoInterference
    from cotenant.predictors.fitting import fit
    from cotenant.predictors.samples import Sample
    from cotenant.render.plan_figure import save_plan
    from cotenant.render.profiles import save_profiles
    from cotenant.sim.run import simulate
    from cotenant.worker.jobs.context import JobContext, step
    from cotenant.worker.python_model import model
    from cotenant.workload import Workload

_HOMES = {
    "Addresses": "app.running_server",
    "Application": "core.application",
    "BackgroundServer": "app.serving",
    "BatchInference": "core.job",
    "Choice": "core.application",
    "Command": "core.job",
    "ConfigError": "errors",
    "ConstantMargin": "predictors",
    "CotenantError": "errors",
    "Device": "core.plan",
    "DeviceError": "errors",
    "Fixed": "core.application",
    "JobContext": "worker.jobs.context",
    "JobState": "core.job",
    "JobStatus": "core.job",
    "Kind": "core.model",
    "Load": "predictors",
    "Model": "core.model",
    "ModelError": "errors",
    "NoInterference": "predictors",
    "Partition": "core.plan",
    "Placement": "core.plan",
    "Plan": "core.plan",
    "PlanError": "errors",
    "Point": "core.profile",
    "Poisson": "core.application",
    "Problem": "planners",
    "Profile": "core.profile",
    "Report": "measure.report",
    "RequestError": "errors",
    "RunningServer": "app.running_server",
    "Sample": "predictors.samples",
    "Stage": "core.application",
    "Training": "core.job",
    "WorkerError": "errors",
    "Workload": "workload",
    "check": "planners.check",
    "compare": "planners.compare",
    "convert_sklearn": "app.sklearn_conversion",
    "diff_plans": "core.plan_diff",
    "explain": "planners.explain",
    "fit": "predictors.fitting",
    "forecast": "planners.forecast",
    "model": "worker.python_model",
    "plan": "planning",
    "read_failures": "config",
    "read_problem": "config",
    "read_profiles_file": "config",
    "read_samples_file": "config",
    "read_settings": "config",
    "read_workload": "config",
    "replay": "control.event_log",
    "save_plan": "render.plan_figure",
    "save_profiles": "render.profiles",
    "serve": "app.serving",
    "serving": "app.serving",
    "simulate": "sim.run",
    "step": "worker.jobs.context",
    "write_profiles": "core.profile",
}

__all__ = [
    "Addresses",
    "Application",
    "BackgroundServer",
    "BatchInference",
    "Choice",
    "Command",
    "ConfigError",
    "ConstantMargin",
    "CotenantError",
    "Device",
    "DeviceError",
    "Fixed",
    "JobContext",
    "JobState",
    "JobStatus",
    "Kind",
    "Load",
    "Model",
    "ModelError",
    "NoInterference",
    "Partition",
    "Placement",
    "Plan",
    "PlanError",
    "Point",
    "Poisson",
    "Problem",
    "Profile",
    "Report",
    "RequestError",
    "RunningServer",
    "Sample",
    "Stage",
    "Training",
    "WorkerError",
    "Workload",
    "check",
    "compare",
    "convert_sklearn",
    "diff_plans",
    "explain",
    "fit",
    "forecast",
    "model",
    "plan",
    "read_failures",
    "read_problem",
    "read_profiles_file",
    "read_samples_file",
    "read_settings",
    "read_workload",
    "replay",
    "save_plan",
    "save_profiles",
    "serve",
    "serving",
    "simulate",
    "step",
    "write_profiles",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cotenant' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cotenant.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List names that were not imported yet as well, for help() and completion."""
    return sorted({*globals(), *__all__})
