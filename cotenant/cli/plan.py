"""Show a plan, what it would change, and why it was chosen: `cotenant plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.compare import compare_planners, comparison_view, parse_planners, report_comparison
from cotenant.cli.loading import load_planned, load_problem, read_bytes, with_planning_options, write_file
from cotenant.cli.options import (
    ArrivalsOption,
    Json,
    ModelRepository,
    PlannerName,
    PlotFile,
    ProblemFile,
    ServerSettings,
    TimeLimit,
)
from cotenant.cli.output import aside, console, print_labelled, print_written, progress_bars, show_json
from cotenant.cli.report_file import ReportFile, check_files
from cotenant.core.plan import Plan
from cotenant.core.plan_diff import diff_plans, renumber_devices
from cotenant.core.units import show_count, show_rate, show_seconds, show_share
from cotenant.errors import ConfigError
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.check import check
from cotenant.planners.explain import Explanation, explain, gain, probes
from cotenant.planners.forecast import Forecast, forecast
from cotenant.planning import plan as plan_problem
from cotenant.predictors import Load
from cotenant.predictors.fitting import extrapolated_models
from cotenant.render.background_jobs import planned_jobs
from cotenant.render.forecast_table import forecast_table
from cotenant.render.plan_diff import plan_diff_table
from cotenant.render.plan_figure import save_plan
from cotenant.render.plan_table import plan_bars, plan_table
from cotenant.render.provenance import provenance_view
from cotenant.render.table import table

MEMORY_SHOWN = 0.5  # fraction of a device's memory in use from which on it is shown


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a plan and what to show of it. current, file: the current plan, and where it was read. lent: the forecast
    with lending."""

    problem: Problem
    plan: Plan
    current: Plan | None
    file: str
    reasons: Explanation | None
    lent: Forecast | None


def plan(
    problem: ProblemFile = None,
    settings: ServerSettings = None,
    model_repository: ModelRepository = None,
    planner: PlannerName = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all planners except the papers' baselines.")
    ] = False,
    planners: Annotated[
        str | None, typer.Option("--planners", metavar="A,B,...", help="Planners for --compare.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show why this plan was chosen, each model's bottleneck, and what relaxing it would gain."
        ),
    ] = False,
    no_portfolio: Annotated[
        bool, typer.Option("--no-portfolio", help="Use geometry's own search only; try no other planners.")
    ] = False,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="CURRENT", help="Show the changes from this plan (JSON file).")
    ] = None,
    time_limit: TimeLimit = None,
    arrivals: ArrivalsOption = None,
    lend: Annotated[bool, typer.Option("--lend", help="Also predict latencies with idle CPU share lent.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan into this JSON file.")] = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    json: Json = False,
) -> None:
    """Plan shares, batch sizes and placement of models, and predict SLO attainment."""
    check_files(plot, report)
    if compare:
        given: dict[str, object] = {
            "--planner": planner,
            "--explain": explain,
            "--diff": diff,
            "--output": output,
            "--plot": plot,
        }
        given["--lend"] = lend
        if wrong := [flag for flag, value in given.items() if value]:
            raise ConfigError(f"{wrong[0]} is for a single plan; leave it out, or leave out --compare")
        compare_plans(
            problem,
            settings,
            model_repository,
            planners,
            time_limit,
            report,
            arrivals=arrivals,
            portfolio=not no_portfolio,
            json=json,
        )
        return
    if planners is not None:
        raise ConfigError("--planners is for --compare; --planner selects the planner of one plan")
    current = None if diff is None else Plan.from_json(read_bytes(diff), str(diff))
    portfolio = not no_portfolio
    asked, answer = load_planned(
        problem, settings, model_repository, planner, current, time_limit, arrivals=arrivals, portfolio=portfolio
    )
    lent = forecast(answer, asked, lend=True) if lend else None
    if output is not None:
        write_file(output, answer.to_json().decode())
    if plot is not None:
        save_plan(answer, plot)
        print_written(plot)
    reasons = explain_with_gains(asked, answer, portfolio=portfolio) if explain else None
    found = PlanAnswer(problem=asked, plan=answer, current=current, file=str(diff), reasons=reasons, lent=lent)
    if report is not None:
        report_plan(report, found, problem, settings, diff)
    show_plan(found, json=json)


def compare_plans(
    problem: Path | None,
    settings: Path | None,
    model_repository: Path | None,
    planners: str | None,
    time_limit: float | None,
    report: Path | None,
    *,
    arrivals: str | None,
    portfolio: bool,
    json: bool,
) -> None:
    """Plan with every planner and compare the results: `plan --compare`."""
    names = parse_planners(planners)
    parsed = with_planning_options(load_problem(problem, settings, model_repository), time_limit, arrivals)
    found = compare_planners(parsed, names, portfolio=portfolio)
    if report is not None:
        report_comparison(report, found, parsed, problem, settings)
    if json:
        show_json(found)
    else:
        console.print(comparison_view(found), Text(found.summary), sep="\n")


def plan_from_current(planner: str, problem: Problem, current: Plan, *, portfolio: bool = True) -> tuple[Problem, Plan]:
    """Return the problem and its plan, made from the plan in force without models and kinds that the problem lacks."""
    asked = msgspec.structs.replace(problem, current=_known(current, problem))
    return asked, renumber_devices(plan_problem(asked, planner, portfolio=portfolio), current)


def _known(current: Plan, problem: Problem) -> Plan:
    models, kinds = {model.name for model in problem.models}, {kind.name for kind in problem.fleet}
    devices = []
    for device in current.devices:
        if device.kind in kinds:
            cuts = tuple(
                msgspec.structs.replace(cut, placements=tuple(p for p in cut.placements if p.model in models))
                for cut in device.partitions
            )
            devices.append(msgspec.structs.replace(device, partitions=tuple(cut for cut in cuts if cut.placements)))
    return msgspec.structs.replace(current, devices=tuple(devices))


def explain_with_gains(problem: Problem, plan: Plan, *, portfolio: bool = True) -> Explanation:
    """Explain a plan, with what relaxing constraints would gain: each of these is planned again."""
    problem = without_applications(problem, plan.split)
    explanation = explain(plan, problem)
    gains = []
    with progress_bars("what relaxing constraints would gain:", transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        relaxed = probes(explanation, problem)
        task = progress.add_task("", total=len(relaxed))
        for more, relaxed_problem in relaxed:
            progress.update(task, description=more)
            gains.append(gain(more, plan, plan_problem(relaxed_problem, plan.planner, portfolio=portfolio)))
            progress.advance(task)
    return msgspec.structs.replace(explanation, gains=tuple(gains))


def show_plan(answer: PlanAnswer, *, json: bool) -> None:
    """Print a plan; as JSON the plan alone, or an object with the difference and explanation that were asked for."""
    changes = None if answer.current is None else diff_plans(answer.current, answer.plan)
    if json:
        parts_of = {"difference": changes, "explanation": answer.reasons, "forecast_with_lending": answer.lent}
        asked = {name: value for name, value in parts_of.items() if value is not None}
        text = answer.plan.to_json()
        if asked:
            text = msgspec.json.format(
                msgspec.json.encode({"plan": msgspec.Raw(text), **asked}, enc_hook=str), indent=2
            )
        show_json(text)
        return
    models = without_applications(answer.problem, answer.plan.split).models
    predicted = forecast(answer.plan, answer.problem)
    parts = [
        plan_table(answer.plan, models),
        plan_bars(answer.plan),
        *([split_table(answer.plan, answer.problem)] if answer.plan.split else []),
        forecast_table(predicted, (*answer.problem.applications, *models), lent=answer.lent),
        *planned_jobs(answer.plan, answer.problem, predicted),
    ]
    if answer.reasons is not None:
        parts += [provenance_view(answer.plan), reasons_view(answer.reasons)]
    if answer.current is not None and changes is not None:
        parts.append(plan_diff_table(changes))
        notes = _unknown_parts(answer.current, answer.problem, answer.file)
        parts += [Text.assemble(("note", "red"), f" {note}") for note in notes]
    for i, part in enumerate(parts):
        console.print(*([""] if i else []), part, sep="\n")
    for violation in check(answer.plan, answer.problem):
        print_labelled("violates", str(violation), console)
    warn_estimates(answer.plan, answer.problem)


def warn_estimates(plan: Plan, problem: Problem) -> None:
    """Warn of models whose slowdown under co-location is extrapolated, and of latencies that count as others than
    measured.
    """
    placed = {(placement.model, device.kind) for device, _, placement in plan.placements()}
    for (model, kind), profile in problem.profiles.items():
        if (model, kind) in placed and (smoothed := profile.smoothed()):
            slower = [(point, seconds) for point, seconds in smoothed if seconds > point.latency]
            faster = [(point, seconds) for point, seconds in smoothed if seconds < point.latency]
            counts = [
                f"{show_count(len(points), 'point')} as {how}, most of all a batch of {points[0][0].batch} on"
                f" {points[0][0].share / 10:g} % as {show_seconds(points[0][1])}, measured as"
                f" {show_seconds(points[0][0].latency)}"
                for how, points in (("slower", slower), ("faster", faster))
                if points
            ]
            print_labelled(
                "smoothed",
                f"{model} on {kind} took longer for fewer rows or on a larger share, so its latencies are averaged:"
                f" {'; '.join(counts)}; profile it again",
            )
    loads = [
        Load(placement.model, device.kind, placement.batch, partition.share)
        for device, partition, placement in plan.placements()
        if len(device.partitions) > 1
    ]
    for model, why in extrapolated_models(problem.interference, loads).items():
        print_labelled("extrapolated", f"slowdown of {model}: {why}; measure pairs with `cotenant profile --pairs`")


def split_table(plan: Plan, problem: Problem) -> RenderableType:
    """Return a table of how the targets of applications are split over their stages."""
    rows = table("applications: SLO budgets of their stages", "application", "stage", "after", ">fan-out", ">budget")
    for application in problem.applications:
        head = f"{escape(application.name)}, {show_seconds(application.slo)}"
        for stage in application.stages:
            name = stage.name if stage.name == stage.model else f"{stage.name}: {stage.model}"
            gets = show_seconds(plan.split[application.name][stage.name])
            rows.add_row(head, escape(name), escape(", ".join(stage.after)), f"{stage.fanout.mean:g}", gets)
            head = ""
    return rows


def _unknown_parts(current: Plan, problem: Problem, file: str) -> list[str]:
    """Say which models and kinds of the current plan the problem does not have."""
    placed = {placement.model for _, _, placement in current.placements()}
    models = sorted(placed - {model.name for model in problem.models})
    kinds = sorted({device.kind for device in current.devices} - {kind.name for kind in problem.fleet})
    if placed and len(models) == len(placed):
        return [f"{file} places none of this problem's models; is it the right plan?"]
    notes = []
    if models:
        notes.append(f"{file} places {', '.join(models)}, which this problem does not have; they stop")
    if kinds:
        notes.append(
            f"{file} uses devices of kind {', '.join(kinds)}, which this problem does not have; they are released"
        )
    return notes


def reasons_view(explanation: Explanation) -> RenderableType:
    """Return the bottlenecks, why models are unserved, and what relaxing constraints would gain."""
    memory = any((placement.memory_used or 0.0) >= MEMORY_SHOWN for placement in explanation.placements)
    used = (">target used", ">rate used", *((">memory used",) if memory else ()))
    title = "bottlenecks, and why not the next smaller share"
    rows = table(title, "partition", "model", *used, "bottleneck", "smaller share")
    last = ""
    for one in explanation.placements:
        head = "" if one.partition == last else f"{one.partition} {show_share(one.share)}"
        last = one.partition
        fractions = [one.target_used, one.rate_used, *([one.memory_used or 0.0] if memory else [])]
        percentages = (f"{fraction * 100:.0f} %" for fraction in fractions)
        rows.add_row(head, escape(one.model), *percentages, one.bottleneck, escape(one.why))
    rows.columns[0].no_wrap = True
    parts: list[RenderableType] = [rows]
    if explanation.unserved:
        parts.append("")
    parts += [
        Text.assemble((f"{model.model} is unserved", "red"), f" at {show_rate(model.rate)} requests/s: {model.why}.")
        for model in explanation.unserved
    ]
    if explanation.gains:
        gains = table("what relaxing a constraint would gain", "relaxed", "gain")
        for each in explanation.gains:
            gains.add_row(escape(each.more), escape(each.buys))
        parts += ["", gains]
    return Group(*parts)


def report_plan(path: Path, answer: PlanAnswer, *files: Path | None) -> None:
    """Write the report of a plan. files: the problem's or settings' and the plan's in force, where there are any."""
    from cotenant.cli.report_file import write_report
    from cotenant.cli.reports import (
        asked_section,
        configuration_sections,
        input_files,
        listings,
        plan_listing,
        plan_section,
        plan_verdict,
    )
    from cotenant.render.page import Section

    problem, plan = answer.problem, answer.plan
    sentences, good = plan_verdict(plan, problem)
    profiles = [
        profile for profile in problem.profiles.values() if profile.kind in {kind.name for kind in problem.fleet}
    ]
    ranked = configuration_sections(without_applications(problem, plan.split), profiles, plan)[1]
    split = [split_table(plan, problem)] if plan.split else []
    sections = [plan_section(plan, problem, answer.lent), ranked, asked_section(problem, *split)]
    if answer.reasons is not None:
        reasons = (provenance_view(plan), reasons_view(answer.reasons))
        sections.insert(1, Section(heading="Why this plan", parts=reasons))
    if answer.current is not None:
        changes = plan_diff_table(diff_plans(answer.current, plan))
        notes = _unknown_parts(answer.current, problem, answer.file)
        sections.insert(1, Section(heading="What it changes", parts=(changes, *map(Text, notes))))
    problem_file, *others = files
    write_report(
        path,
        title=f"Plan for {show_count(len(problem.models), 'model')}",
        question=f"Which share of which device does each model get, and in what batches? Planner: {plan.planner}.",
        answer=sentences,
        good=good,
        sections=[*sections, plan_listing(plan), listings(*files)],
        files=input_files(problem_file, *others),
    )
