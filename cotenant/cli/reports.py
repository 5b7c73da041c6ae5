"""Compose what the reports of several commands share: what was asked, plans, runs, ranked configurations, files."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import RenderableType

from cotenant.core.application import Application
from cotenant.core.model import Model
from cotenant.core.plan import Plan
from cotenant.core.profile import Profile
from cotenant.core.units import show_count, show_rate, show_seconds, show_share
from cotenant.measure.report import ModelReport, Report
from cotenant.planners import Problem
from cotenant.planners.applications import without_applications
from cotenant.planners.check import check
from cotenant.planners.configurations import Configuration, rank_configurations
from cotenant.planners.forecast import Forecast, forecast
from cotenant.render.background_jobs import planned_jobs, reported_jobs
from cotenant.render.configuration_table import configuration_table
from cotenant.render.forecast_table import forecast_table
from cotenant.render.page import Listing, Picture, Section, drawn
from cotenant.render.plan_figure import save_plan
from cotenant.render.plan_layout import plan_summary
from cotenant.render.plan_table import plan_bars, plan_table
from cotenant.render.problem_table import problem_tables
from cotenant.render.report import report_table
from cotenant.render.timeline_figure import save_timeline

Verdict = tuple[list[str], bool]  # sentences, and whether they say what one hopes for


def asked_section(problem: Problem, *more: RenderableType) -> Section:
    """Return the section on models, rates and devices."""
    return Section(heading="What was asked", parts=(*problem_tables(problem), *more))


def plan_section(plan: Plan, problem: Problem, lent: Forecast | None = None) -> Section:
    """Return the section on a plan: its picture, its placements, and what it is predicted to do. lent: the forecast
    with lending."""
    models = without_applications(problem, plan.split).models
    picture = drawn(lambda path: save_plan(plan, path), "The plan: each device, cut into its partitions.")
    predicted = forecast(plan, problem)
    return Section(
        heading="The plan",
        parts=(
            *([picture] if isinstance(picture, Picture) else [picture, plan_bars(plan)]),
            plan_table(plan, models),
            forecast_table(predicted, (*problem.applications, *models), lent),
            *planned_jobs(plan, problem, predicted),
        ),
    )


def plan_verdict(plan: Plan, problem: Problem) -> Verdict:
    """Say what a plan takes, and whether it keeps its SLOs."""
    models = without_applications(problem, plan.split).models
    predicted = forecast(plan, problem)
    attained = predicted.models | predicted.applications
    targets: list[Application | Model] = [*problem.applications, *models]
    lacking = {
        target.name: target.attainment - attained[target.name].attainment
        for target in targets
        if target.name in attained
    }
    missed = [name for name, lack in lacking.items() if lack > 0]
    sentences = [f"{plan_summary(plan)}."]
    if lacking:
        worst = max(targets, key=lambda target: lacking.get(target.name, -math.inf))
        shown = f"{worst.name}, {attained[worst.name].attainment * 100:.2f} % of {worst.attainment * 100:g} %"
        many = show_count(len(missed), "SLO is", "SLOs are")
        sentences.append(
            f"{many} predicted to be missed; furthest: {shown}."
            if missed
            else f"All SLOs are predicted to be kept; closest to a violation: {shown}."
        )
    if plan.unserved:
        unserved = ", ".join(f"{name} {show_rate(rate)}/s" for name, rate in plan.unserved.items())
        sentences.append(f"Not served: {unserved}.")
    violations = check(plan, problem)
    sentences += [f"It violates {violation}." for violation in violations]
    return sentences, not (missed or plan.unserved or violations)


def configuration_sections(
    problem: Problem, profiles: Iterable[Profile], plan: Plan | None = None
) -> tuple[list[Configuration], Section]:
    """Rank what was measured of each model, and what is planned, by the rate that it serves within its SLO.

    Returns the best of each model on each kind of device, and the section with all ranks. plan: whose placements are
    marked.
    """
    models = {model.name: model for model in problem.models}
    best, tables = [], []
    for profile in profiles:
        if (model := models.get(profile.model)) is None:
            continue
        planned = _planned(plan, profile)
        ranked = rank_configurations(model, profile, planned)
        best.append(ranked[0])
        tables.append(configuration_table(model, ranked, planned))
    told = "Each alone on a partition, under Poisson arrivals: the largest rate of which enough is answered in time."
    return best, Section(heading="Configurations, ranked", parts=(told, *tables))


def _planned(plan: Plan | None, profile: Profile) -> set[tuple[int, int, int]]:
    if plan is None:
        return set()
    return {
        (partition.share, placement.batch, placement.procs)
        for device, partition, placement in plan.placements()
        if (placement.model, device.kind) == (profile.model, profile.kind)
    }


def describe_configuration(best: Configuration, model: Model) -> str:
    """Return a sentence on the best configuration of a model."""
    if best.rate == 0:
        return f"{best.model} on {best.kind}: no configuration keeps {show_seconds(model.slo)}."
    return (
        f"{best.model} on {best.kind}: up to {show_rate(best.rate)} requests/s within {show_seconds(model.slo)}, in"
        f" batches of up to {best.batch} on {show_share(best.share)} of a device."
    )


def run_section(report: Report, models: Sequence[Model] = ()) -> Section:
    """Return the section on a run. models: with their targets, for the picture of a recorded one."""
    parts = [report_table(report), *reported_jobs(report)]
    if report.timeline is not None:
        targets = {model.name: model.slo for model in models}
        shows = "The run over time: rates, queue and utilisation, and each model's p99 against its target."
        return Section(
            heading="The run", parts=(*parts, drawn(lambda path: save_timeline(report, path, targets), shows))
        )
    return Section(heading="The run", parts=tuple(parts))


def run_verdict(report: Report) -> Verdict:
    """Say whether a run kept its SLOs."""
    violated = [row for row in report.models if not row.slo_met]
    requests = sum(row.stayed for row in report.models)
    within = requests - sum(row.missed for row in report.models)
    sentences = [f"SLO violated: {describe_attainment(row)}." for row in violated]
    if not violated:
        below = [row for row in report.models if row.attainment is not None and row.attainment < row.required]
        chance = f" ({len(below)} below by no more than chance)" if below else ""
        sentences.append(f"All SLOs met{chance}." if requests else "No request was sent.")
    if requests:
        sentences.append(f"{within:,} of {requests:,} requests were answered within their targets.")
    return sentences, not violated and requests > 0


def describe_attainment(row: ModelReport) -> str:
    """Return what a model attained of what it should."""
    attainment = 0.0 if row.attainment is None else row.attainment
    return f"{row.model} {attainment * 100:.1f} % < {row.required * 100:g} %"


def listings(*files: Path | None) -> Section:
    """Return the section with the texts of small files that a reader needs to make the report again."""
    parts = []
    for path in files:
        with suppress(OSError, UnicodeDecodeError):
            if path is not None and path.is_file():
                parts.append(Listing(name=str(path), text=path.read_text(encoding="utf-8")))
    return Section(heading="Files", parts=tuple(parts))


def plan_listing(plan: Plan) -> Section:
    """Return the section with a plan as its file."""
    text = plan.to_json().decode()
    return Section(heading="The plan as a file", parts=(Listing(name="plan.json", text=text),))


def input_files(problem: Path | None, *others: Path | None) -> list[Path]:
    """Return the files that an answer depends on: those given, and the profiles and samples that a problem names."""
    files = [path for path in (problem, *others) if path is not None and path.is_file()]
    if problem is None or not problem.is_file():
        return files
    with suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        named = tomllib.loads(problem.read_text(encoding="utf-8"))
        fits = named.get("interference")
        names = [*named.get("profiles", []), *([fits.get("fit")] if isinstance(fits, dict) else [])]
        files += [problem.parent / name for name in names if isinstance(name, str)]
    return files
