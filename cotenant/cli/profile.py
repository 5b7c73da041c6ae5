"""Profile the models of a repository: `cotenant profile`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cotenant.cli.loading import load_settings, load_unplanned, write_file
from cotenant.cli.options import Json, ModelRepository, PlotFile, SettingsFile
from cotenant.cli.output import console, print_labelled, print_written, show_json
from cotenant.cli.report_file import ReportFile, check_files, write_report
from cotenant.core.profile import Profile
from cotenant.core.units import show_count
from cotenant.errors import ConfigError
from cotenant.planners import Problem


def profile(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profiles into this CSV file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Profile again even if cached.")] = False,
    pairs: Annotated[
        Path | None,
        typer.Option("--pairs", help="Also measure co-located models; write the samples into this CSV file."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            help="Number of co-located runs for --pairs. Default: a fifth of all pairs, and larger sets.",
        ),
    ] = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    json: Json = False,
) -> None:
    """Profile the models of a repository over batch size and share of a device. Results are cached."""
    from cotenant.core.profile import write_profiles
    from cotenant.render.profiles import profile_table, save_profiles

    check_files(plot, report)
    if count is not None and pairs is None:
        raise ConfigError("--count is the number of co-located runs; add --pairs")
    if pairs is not None:
        from cotenant.cli.pairs import existing_samples

        if pairs == output:
            raise ConfigError(f"--output and --pairs are both {str(pairs)!r}; profiles and samples need a file each")
        existing_samples(pairs)  # an error now, not after minutes
    server_settings = load_settings(settings, model_repository)
    deployment = load_unplanned(server_settings, force=force, full=True)
    profiles = list(deployment.problem.profiles.values())
    for name, reason in deployment.broken.items():
        print_labelled("not profiled:", f"{name}: {reason}")
    disturbed = disturbances(profiles)
    for each in disturbed:
        print_labelled("busy machine:", each)
    text = write_profiles(profiles)
    if output is not None:
        write_file(output, text)
    if plot is not None:
        save_profiles(profiles, plot)
        print_written(plot)
    if pairs is not None:
        from cotenant.app.backend import create_backend
        from cotenant.cli.pairs import record_pairs

        record_pairs(deployment, create_backend(server_settings), pairs, count)
    if report is not None:
        report_profiles(report, deployment.problem, profiles, disturbed, settings)
    if json:
        show_json(msgspec.json.encode([{"model": p.model, "kind": p.kind, "points": p.points} for p in profiles]))
    elif output is None and pairs is None and report is None:
        for each in profiles:
            console.print(profile_table(each))


def disturbances(profiles: Sequence[Profile]) -> list[str]:
    """Say of which models other programs disturbed the measurement."""
    from cotenant.profiling.machine_load import foreign_load, is_busy

    return [
        f"other programs used {100 * foreign_load(each):.0f} % of the processors while {each.model} was profiled"
        for each in profiles
        if is_busy(each)
    ]


def report_profiles(
    path: Path, problem: Problem, profiles: Sequence[Profile], disturbed: Sequence[str], settings: Path | None
) -> None:
    """Write the report of profiles: which configuration of each model serves most within its SLO, and all latencies.
    disturbed: what to say of a busy machine."""
    from cotenant.cli.reports import (
        asked_section,
        configuration_sections,
        describe_configuration,
        input_files,
    )
    from cotenant.core.profile import write_profiles
    from cotenant.render.page import Listing, Section, drawn
    from cotenant.render.profiles import profile_table, save_profiles

    best, ranked = configuration_sections(problem, profiles)
    shows = "Latency over batch, for each model and share."
    picture = [drawn(lambda file: save_profiles(profiles, file), shows)] if profiles else []
    measured = Section(heading="What was measured", parts=(*picture, *map(profile_table, profiles)))
    listing = Listing(name="profiles.csv", text=write_profiles(profiles))
    write_report(
        path,
        title=f"Profiles of {show_count(len({profile.model for profile in profiles}), 'model')}",
        question="How long does a batch take on each share, and which share and batch serve most within the SLO?",
        answer=[
            *([describe_configuration(one, problem.model(one.model)) for one in best] or ["Nothing was profiled."]),
            *(f"Measure again on a quiet machine: {each}." for each in disturbed),
        ],
        good=False if disturbed else None,
        sections=[
            ranked,
            measured,
            asked_section(problem),
            Section(heading="The profiles as a file", parts=(listing,)),
        ],
        files=input_files(settings),
    )
