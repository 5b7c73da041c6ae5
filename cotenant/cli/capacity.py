"""`cotenant capacity`: the load that a plan sustains, and the fleet that more load needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli.capacity_report import Output, report_capacity
from cotenant.cli.fleet_sizing import report_growth
from cotenant.cli.loading import load_plan, load_problem
from cotenant.cli.options import (
    Duration,
    Jobs,
    Json,
    Lend,
    ModelRepository,
    PlannerName,
    PlotFile,
    ProblemFile,
    Seed,
    Seeds,
    ServerSettings,
    WorkloadFile,
)
from cotenant.cli.report_file import ReportFile, check_files
from cotenant.cli.simulate import without_failures
from cotenant.errors import ConfigError


def capacity(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    model_repository: ModelRepository = None,
    planner: PlannerName = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Plan to simulate (JSON file). Default: a new plan.")
    ] = None,
    growth: Annotated[
        float | None,
        typer.Option(
            "--growth", min=0.01, help="Size the fleet for this multiple of the rates, with each kind of device."
        ),
    ] = None,
    workload: WorkloadFile = None,
    lend: Lend = False,
    duration: Duration = 60.0,
    seeds: Seeds = 5,
    seed: Seed = 0,
    jobs: Jobs = 2,
    plot: PlotFile = None,
    report: ReportFile = None,
    json: Json = False,
) -> None:
    """Find the largest multiple of the rates that a plan sustains in the simulator, or size the fleet for growth."""

    check_files(plot, report)
    output = Output(plot=plot, report=report, files=(problem, settings, plan_file, workload), json=json)
    without_failures(workload)
    runs = tuple(range(seed, seed + seeds))
    if growth is None:
        asked, answer = load_plan(plan_file, problem, settings, model_repository, planner)
        report_capacity(asked, answer, workload, duration, runs, jobs, output, lend=lend)
        return
    if lend:
        raise ConfigError("--growth sizes fleets without lending; leave out --lend")
    if plan_file is not None:
        raise ConfigError("--growth makes its own plans; leave out --plan")
    asked = load_problem(problem, settings, model_repository)
    report_growth(asked, workload, planner, growth, duration, runs, jobs, output)
