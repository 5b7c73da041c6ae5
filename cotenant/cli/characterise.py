"""Characterise models by MLPerf's scenarios over shares, for the collaborative filter: `cotenant characterise`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.markup import escape

from cotenant.cli.loading import load_settings, load_unplanned, read_bytes, write_file
from cotenant.cli.options import Json, ModelRepository, SettingsFile, duration_of_at_least
from cotenant.cli.output import StepProgress, aside, console, print_labelled, progress_bars, show_json
from cotenant.errors import ConfigError

BATCH = 8  # samples; as many as a query of multi-stream has
SECONDS = 2.0
RUNS, PAIRS, PROFILES = "runs.csv", "pairs.csv", "profiles.csv"


def characterise(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the results; runs that it has are not run again.")
    ] = Path("characterisation"),
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario", help="single-stream, multi-stream, server or offline; repeat for several. Default: all."
        ),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            "--share", metavar="PERCENT", help="Share of the device; repeat for several. Default: 100, 50 and 25."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Most samples that a model takes at once.")] = BATCH,
    duration: Annotated[
        float, typer.Option("--duration", parser=duration_of_at_least(0.01), help="Of each run, such as 2s or 10min.")
    ] = SECONDS,
    pairs: Annotated[
        int | None,
        typer.Option(
            "--pairs",
            min=0,
            help="Pairs of models to co-locate, most informative first. Default: all; none without offline.",
        ),
    ] = None,
    loadgen: Annotated[
        bool, typer.Option("--loadgen", help="Have MLPerf's own LoadGen send the queries; needs cotenant[loadgen].")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run everything again.")] = False,
    json: Json = False,
) -> None:
    """Run MLPerf's scenarios on models alone and co-located over shares of a device; write the matrices that the
    collaborative filter learns from."""
    from cotenant.app.backend import create_backend
    from cotenant.predictors.samples import write_samples
    from cotenant.profiling.characterisation import configurations, interference, profiles_of, write_runs
    from cotenant.profiling.scenarios import OFFLINE, SCENARIOS

    scenarios = list(dict.fromkeys(scenario or SCENARIOS))
    for name in scenarios:
        if name not in SCENARIOS:
            raise ConfigError(f"--scenario {name}: there are {', '.join(SCENARIOS)}")
    if OFFLINE not in scenarios and pairs:
        raise ConfigError("--pairs co-locates models in the offline scenario; add --scenario offline")
    pairs = pairs if OFFLINE in scenarios else 0
    generator = None
    if loadgen:
        from cotenant.profiling.loadgen import LoadGen

        generator = LoadGen()
    measured = Measured(output, force=force)
    wanted = Wanted(scenarios=scenarios, shares=share, batch=batch, seconds=duration, pairs=pairs, generator=generator)
    server_settings = load_settings(settings, model_repository)
    if server_settings.backend == "fake":
        raise ConfigError("the backend fake runs no models, so there is nothing to characterise; use another")
    deployment = load_unplanned(server_settings)
    for name, reason in deployment.broken.items():
        print_labelled("left out:", f"{name}: {reason}")
    backend = create_backend(server_settings)
    try:
        with progress_bars("running") as progress:
            asyncio.run(_run_all(measured, deployment, backend, StepProgress(progress), wanted))
    finally:
        backend.stop()
    if not measured.runs:
        raise ConfigError("no model ran; there is nothing to write")
    kinds = [kind.name for kind in deployment.problem.fleet]
    table, lost = configurations(measured.runs), {kind: interference(measured.samples, kind) for kind in kinds}
    write_file(output / RUNS, write_runs(measured.runs))
    write_file(output / PROFILES, _profiles_text(profiles_of(measured.runs)))
    write_file(output / "configurations.csv", table.to_csv("model"))
    for kind, matrix in lost.items():
        if matrix.rows:
            write_file(output / f"interference-{kind}.csv", matrix.to_csv("model"))
    if measured.samples:
        write_file(output / PAIRS, write_samples(measured.samples))
    if json:
        show_json({"runs": measured.runs, "failed": measured.failed})
        return
    for name in scenarios:
        _show(configurations([run for run in measured.runs if run.result.scenario == name]), "samples/s alone")
    for kind, matrix in lost.items():
        if matrix.rows:
            _show(matrix, f"samples/s lost beside another model on {kind}, offline")
    if measured.samples:
        _say(
            f"cotenant fit {output / PAIRS} --profiles {output / PROFILES} --model svd -o svd.json"
            "  fits the filter; `cotenant plan --planner score` plans with it"
        )


class Measured:
    """Hold what a folder has, and what comes to it. Raises ConfigError for files of another kind."""

    def __init__(self, folder: Path, *, force: bool) -> None:
        from cotenant.cli.pairs import existing_samples
        from cotenant.profiling.characterisation import Run, read_runs

        self.folder = folder
        self.runs: list[Run] = []
        self.samples = [] if force else existing_samples(folder / PAIRS)
        self.failed: list[str] = []
        path = folder / RUNS
        if path.exists() and not force:
            self.runs = read_runs(read_bytes(path).decode("utf-8", "replace").splitlines(), str(path))

    def leave_out(self, what: str) -> None:
        """Say what could not be measured, and why."""
        self.failed.append(what)
        print_labelled("left out:", what)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Say what to run. shares: percent; None for the default. pairs: None for all."""

    scenarios: Sequence[str]
    shares: Sequence[float] | None
    batch: int
    seconds: float
    pairs: int | None
    generator: Any


async def _run_all(measured: Measured, deployment: Any, backend: Any, steps: StepProgress, wanted: Wanted) -> None:
    from cotenant.cli.pairs import candidate

    offered = {name: each for name, each in deployment.offered.items() if each.ensemble is None}
    candidates = {name: candidate(each) for name, each in offered.items()}
    targets = {name: each.model.slo for name, each in offered.items()}
    for kind in deployment.problem.fleet:
        await _run_alone(measured, candidates, targets, kind, backend, steps, wanted)
        await _run_together(measured, candidates, kind, backend, steps, wanted)


async def _run_alone(
    measured: Measured, candidates: Any, targets: Any, kind: Any, backend: Any, steps: StepProgress, wanted: Wanted
) -> None:
    """Run the scenarios that the folder does not have yet."""
    from cotenant.profiling.characterisation import Run, default_shares, run_scenarios, write_runs

    shares = _legal_shares(wanted.shares, kind) if wanted.shares else default_shares(kind)
    done = {run.key for run in measured.runs}
    asked = {(name, kind.name, share, each) for name in candidates for share in shares for each in wanted.scenarios}
    finished = len(asked & done)
    steps(f"alone on {kind.name}", finished, len(asked))
    alone = run_scenarios(
        backend,
        candidates,
        kind,
        shares=shares,
        scenarios=wanted.scenarios,
        batch=wanted.batch,
        seconds=wanted.seconds,
        targets=targets,
        done=done,
        generator=wanted.generator,
    )
    async with contextlib.aclosing(alone):
        async for found in alone:
            if isinstance(found, Run):
                measured.runs.append(found)
                write_file(measured.folder / RUNS, write_runs(measured.runs), quiet=True)
                finished += 1
                steps(f"alone on {kind.name}", finished, len(asked))
            else:
                name, share, reason = found
                measured.leave_out(f"{name} on {share / 10:g} % of {kind.name}: {reason}")


async def _run_together(
    measured: Measured, candidates: Any, kind: Any, backend: Any, steps: StepProgress, wanted: Wanted
) -> None:
    """Co-locate the pairs that the folder does not have yet."""
    from cotenant.predictors.samples import write_samples
    from cotenant.profiling.characterisation import colocated_pairs, profiles_of
    from cotenant.profiling.grid import grid_of
    from cotenant.profiling.pairs import measure_pairs, measured_pairs

    runs = [run for run in measured.runs if run.model in candidates]  # others have left the repository, or are broken
    pairs = colocated_pairs(runs, kind)
    done = measured_pairs(pairs, measured.samples)
    count = len(pairs) if wanted.pairs is None else min(wanted.pairs, len(pairs))
    finished = len(done)
    if finished >= count:
        return
    steps(f"co-located on {kind.name}", finished, count)
    running = measure_pairs(
        backend,
        candidates,
        pairs,
        {(each.model, each.kind): each for each in profiles_of(runs)},
        done=done,
        count=count - finished,
        grid=msgspec.structs.replace(grid_of(kind), pause=0.0),  # offline: the next batch waits already
        seconds=wanted.seconds,
    )
    async with contextlib.aclosing(running):
        async for both in running:
            if isinstance(both, str):
                measured.leave_out(f"on {kind.name}: {both}")
                continue
            measured.samples.extend(both)
            write_file(measured.folder / PAIRS, write_samples(measured.samples), quiet=True)
            finished += 1
            steps(f"co-located on {kind.name}", finished, count)


def _legal_shares(shares: Sequence[float], kind: Any) -> tuple[int, ...]:
    from cotenant.core.units import parse_share

    parsed = [parse_share(share, "--share") for share in shares]
    for share in parsed:
        if share not in kind.cuts:
            legal = ", ".join(f"{cut / 10:g}" for cut in kind.cuts)
            raise ConfigError(f"--share {share / 10:g}: {kind.name} has no such share; there are {legal}")
    return tuple(dict.fromkeys(parsed))


def _profiles_text(profiles: Sequence[Any]) -> str:
    from cotenant.core.profile import write_profiles

    return write_profiles(profiles)


def _show(matrix: Any, title: str) -> None:
    """Print a matrix, with gaps as the collaborative filter fills them, where it can."""
    from cotenant.errors import PlanError
    from cotenant.predictors.svd import complete
    from cotenant.render.table import table

    filled = matrix.values
    if np.isnan(filled).any():
        with contextlib.suppress(PlanError):
            filled = complete(filled)
            title += "; ≈: filled by the collaborative filter"
    shown = table(title, "model", *(f">{escape(column)}" for column in matrix.columns))
    for name, row, whole in zip(matrix.rows, matrix.values, filled, strict=True):
        cells = [
            f"{value:.4g}" if not math.isnan(value) else "-" if math.isnan(guess) else f"≈ {guess:.4g}"
            for value, guess in zip(row, whole, strict=True)
        ]
        shown.add_row(escape(name), *cells)
    console.print(shown)


def _say(text: str) -> None:
    aside.print(text, highlight=False, markup=False, soft_wrap=True)
