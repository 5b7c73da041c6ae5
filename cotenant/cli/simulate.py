"""Simulate a plan under random arrivals in virtual time, and compare scenarios: `cotenant simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cotenant.cli.loading import load_plan, load_settings
from cotenant.cli.options import (
    Duration,
    Jobs,
    Json,
    Lend,
    ModelRepository,
    PlannerName,
    PlotFile,
    ProblemFile,
    Rates,
    Scale,
    Seed,
    ServerSettings,
    WorkloadFile,
)
from cotenant.cli.output import aside, console, print_written, progress_bars, show_json
from cotenant.cli.report_file import ReportFile, check_files, write_report
from cotenant.config import read_failures, read_workload
from cotenant.core.plan import Plan
from cotenant.core.units import show_count, show_seconds
from cotenant.errors import ConfigError
from cotenant.measure.report import Report
from cotenant.planners.job_placement import without_jobs
from cotenant.render.background_jobs import reported_jobs
from cotenant.render.report import report_table

if TYPE_CHECKING:
    from cotenant.render.page import Section


def simulate(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    model_repository: ModelRepository = None,
    planner: PlannerName = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Plan to simulate (JSON file). Default: a new plan.")
    ] = None,
    rate: Rates = None,
    scale: Scale = 1.0,
    workload_file: WorkloadFile = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGE",
            help="Compare with a scenario: rate=2, devices=-1, kind=v100:t4, slo=resnet50:50ms, planner=elastic. "
            "Repeat for several scenarios; commas join the changes of one.",
        ),
    ] = None,
    duration: Duration = 60.0,
    seed: Seed = 0,
    jobs: Jobs = 2,
    lend: Lend = False,
    standby_workers: Annotated[
        int,
        typer.Option(
            "--standby-workers", min=0, help="Standby workers per device, as with `standby_workers` of a server."
        ),
    ] = 0,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Replan during the run, with the controller of `cotenant serve`.")
    ] = False,
    event_log: Annotated[
        Path | None, typer.Option("--event-log", help="Write the events and commands of the controller of --adapt.")
    ] = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    json: Json = False,
) -> None:
    """Simulate a plan under random arrivals or a workload: the server's dispatcher in virtual time."""
    from cotenant.cli.what_if import report_what_ifs, run_what_ifs
    from cotenant.planning.what_if import Scenario, read_change
    from cotenant.render.timeline_figure import save_timeline

    changes = [read_change(text) for text in what_if or ()]
    if changes and plot is not None:
        raise ConfigError("--plot draws one run; leave it out, or leave out --what-if")
    if changes and standby_workers:
        raise ConfigError("--standby-workers is for one run; leave it out, or leave out --what-if")
    if workload_file is not None and rate:
        raise ConfigError("--workload sets the rates; leave it out, or leave out --rate")
    if adapt and (changes or plot is not None):
        raise ConfigError(f"{'--what-if' if changes else '--plot'} is for one plan; leave it out, or leave out --adapt")
    if event_log is not None and not adapt:
        raise ConfigError("--event-log is for the controller; add --adapt")
    check_files(plot, report)
    asked, answer = load_plan(plan_file, problem, settings, model_repository, planner)
    workload = workload_for_plan(asked, answer, rate, scale, workload_file)
    if changes:
        without_failures(workload_file)
        question = Scenario(planner=planner or answer.planner, problem=asked, workload=workload, lend=lend)
        outcomes = run_what_ifs(question, answer, changes, seconds=duration, seed=seed, jobs=jobs, json=json)
        if report is not None:
            report_what_ifs(report, outcomes, asked, [problem, settings, plan_file, workload_file])
        return
    failures = () if workload_file is None else read_failures(workload_file)
    if adapt:
        from cotenant.app.settings import controller_options
        from cotenant.cli.adaptive_simulation import adaptive_view, decision_table, simulate_adaptive
        from cotenant.render.page import Section

        run = simulate_adaptive(
            asked,
            answer,
            workload,
            failures,
            seconds=duration,
            seed=seed,
            lend=lend,
            standbys=standby_workers,
            options=controller_options(load_settings(settings)),
            log=event_log,
        )
        if json:
            show_json(run.to_json())
        else:
            console.print(adaptive_view(run))
        if report is not None:
            decisions = Section(heading="Decisions", parts=(decision_table(run),))
            files = [problem, settings, plan_file, workload_file]
            report_simulation(report, asked, answer, run.report, files, decisions, lend=lend)
        return
    result = simulate_recorded(
        asked, answer, workload, failures, seconds=duration, seed=seed, lend=lend, standbys=standby_workers
    )
    if plot is not None:
        save_timeline(result, plot, {model.name: model.slo for model in asked.models})
        print_written(plot)
    if report is not None:
        report_simulation(report, asked, answer, result, [problem, settings, plan_file, workload_file], lend=lend)
    if json:
        show_json(result.to_json())
    else:
        console.print(report_table(result), *reported_jobs(result), sep="\n")


def report_simulation(
    path: Path,
    problem: Any,
    plan: Plan,
    report: Report,
    files: Sequence[Path | None],
    *more: Section,
    lend: bool = False,
) -> None:
    """Write the report of a simulated run. files: the problem's or settings', the plan's, the workload's. lend: idle
    share of processors was."""
    from cotenant.cli.reports import (
        asked_section,
        input_files,
        listings,
        plan_listing,
        plan_section,
        run_section,
        run_verdict,
    )

    answer, good = run_verdict(report)
    write_report(
        path,
        title=f"Simulation of {show_count(len(report.models), 'model')} for {show_seconds(report.seconds)}",
        question="Does the plan keep its SLOs under random arrivals? The server's dispatcher, in virtual time"
        + (", with idle share of processors lent." if lend else "."),
        answer=answer,
        good=good,
        sections=[
            run_section(report, problem.models),
            *more,
            plan_section(plan, problem),
            asked_section(problem),
            plan_listing(plan),
            listings(*files),
        ],
        files=input_files(*files),
    )


def workload_for_plan(problem: Any, plan: Plan, rates: list[str] | None, scale: float, file: Path | None = None) -> Any:
    """Return the workload to simulate, its rates times `scale`: that of a file, or the rates that the plan was made
    for, even where it leaves some unserved."""
    from cotenant.cli.rates import chosen_rates
    from cotenant.planning.what_if import planned_rates
    from cotenant.workload import Workload

    if file is not None:
        return workload_of(file, problem).scaled(scale)
    return Workload.poisson(chosen_rates(planned_rates(problem, plan), rates or (), scale))


def workload_of(file: Path, problem: Any) -> Any:
    return read_workload(file, [each.name for each in (*problem.applications, *problem.models)])


def without_failures(file: Path | None) -> None:
    """Raise ConfigError for a workload with failures: other plans have other devices and partitions to fail."""
    if file is not None and read_failures(file):
        raise ConfigError(f"{file}: failures are for one run of `cotenant simulate`; leave them out here")


def simulate_recorded(
    problem: Any,
    plan: Plan,
    workload: Any,
    failures: Any,
    *,
    seconds: float,
    seed: int,
    lend: bool,
    standbys: int = 0,
) -> Any:
    """Simulate with a recorded timeline, showing progress; where the plan has jobs, also without them."""
    from cotenant.runtime.dispatcher import Dispatcher
    from cotenant.sim.recorder import Recorder, lane_places
    from cotenant.sim.run import simulate as run

    with progress_bars("simulating", transient=True) as progress:
        task = progress.add_task("", total=None)

        def passed(done: int, of: int) -> None:
            if aside.is_terminal:
                progress.start()
            progress.update(task, completed=done, total=of)

        slots = lane_places(plan, problem.fleet)
        names = [model.name for model in problem.models]
        recorder = Recorder(Dispatcher().handle, names, slots, seconds=seconds, progress=passed)
        same = partial(run, seconds=seconds, seed=seed, failures=failures, lend=lend, standbys=standbys)
        report = same(plan, problem, workload, handle=recorder)
        report = msgspec.structs.replace(report, timeline=recorder.timeline())
        if plan != (alone := without_jobs(plan)):
            other = same(alone, problem, workload)
            report = msgspec.structs.replace(report, without_jobs=other.models)
    return report
