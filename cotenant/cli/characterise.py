"""Characterise models by MLPerf's scenarios over shares, for the collaborative filter: `cotenant characterise`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer
from rich.markup import escape

from cotenant.cli.loading import load_settings, load_unplanned, read_bytes, write_file
from cotenant.cli.options import Json, ModelRepository, SettingsFile, duration_of_at_least
from cotenant.cli.output import StepProgress, aside, console, print_labelled, progress_bars, show_json
from cotenant.errors import ConfigError

if TYPE_CHECKING:
    from cotenant.predictors.samples import Sample
    from cotenant.profiling.characterisation import Run
    from cotenant.profiling.conditions import Conditions

BATCH = 8  # samples; as many as a query of multi-stream has
SECONDS = 2.0
RUNS, PAIRS, PROFILES, CONDITIONS = "runs.csv", "pairs.csv", "profiles.csv", "conditions.json"
WAYS_OUT = "choose another folder with --output, or run everything again with --force"


def characterise(
    settings: SettingsFile = None,
    model_repository: ModelRepository = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the results; completed runs in it are not repeated.")
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
    batch: Annotated[int, typer.Option("--batch", min=1, help="Largest batch, in samples.")] = BATCH,
    duration: Annotated[
        float,
        typer.Option(
            "--duration", parser=duration_of_at_least(0.01), help="Duration of each run, such as 2s or 10min."
        ),
    ] = SECONDS,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=0,
            help="Number of pairs to co-locate, most informative first. Default: all; none without offline.",
        ),
    ] = None,
    loadgen: Annotated[
        bool, typer.Option("--loadgen", help="Send the queries with MLPerf's LoadGen; needs cotenant\\[loadgen].")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat completed runs.")] = False,
    json: Json = False,
) -> None:
    """Run MLPerf's scenarios on models alone and co-located over shares of a device; write the matrices that the
    collaborative filter learns from."""
    from cotenant.app.backend import create_backend
    from cotenant.predictors.samples import write_samples
    from cotenant.profiling.characterisation import configurations, interference, profiles_of, write_runs
    from cotenant.profiling.conditions import Conditions
    from cotenant.profiling.scenarios import OFFLINE, SCENARIOS

    scenarios = list(dict.fromkeys(scenario or SCENARIOS))
    for name in scenarios:
        if name not in SCENARIOS:
            raise ConfigError(f"--scenario {name}: unknown; available: {', '.join(SCENARIOS)}")
    if OFFLINE not in scenarios and count:
        raise ConfigError("--count needs the offline scenario; add --scenario offline")
    count = count if OFFLINE in scenarios else 0
    generator = None
    if loadgen:
        from cotenant.profiling.loadgen import LoadGen

        generator = LoadGen()
    measured = Measured(output, force=force)
    wanted = Wanted(scenarios=scenarios, shares=share, batch=batch, seconds=duration, pairs=count, generator=generator)
    conditions = Conditions(batch=batch, seconds=duration, loadgen=loadgen)
    measured.go_on(conditions)  # before models are profiled
    server_settings = load_settings(settings, model_repository)
    if server_settings.backend == "fake":
        raise ConfigError("the backend fake runs no models, so there is nothing to characterise; use another backend")
    deployment = load_unplanned(server_settings)
    for name, reason in deployment.broken.items():
        print_labelled("left out:", f"{name}: {reason}")
    backend = create_backend(server_settings)
    stated = {model.name for model in server_settings.models if model.slo is not None}
    conditions = _conditions(conditions, measured.before, deployment, backend, stated)
    measured.go_on(conditions)
    try:
        with progress_bars("running") as progress:
            targets = {name: each.slo for name, each in conditions.models.items()}
            asyncio.run(_run_all(measured, deployment, targets, backend, StepProgress(progress), wanted))
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
            _show(matrix, f"samples/s lost co-located on {kind}, offline")
    if measured.samples:
        _say(
            f"cotenant fit {output / PAIRS} --profiles {output / PROFILES} --model svd -o svd.json"
            "  fits the filter; `cotenant plan --planner score` plans with it"
        )


class Measured:
    """Hold what a folder has, and what comes to it. force: run everything again; what the folder has is replaced with
    the first run. Raises ConfigError for files of another kind."""

    def __init__(self, folder: Path, *, force: bool) -> None:
        from cotenant.cli.pairs import existing_samples
        from cotenant.profiling.characterisation import read_runs
        from cotenant.profiling.conditions import read_conditions

        self.folder = folder
        self.runs: list[Run] = []
        self.samples: list[Sample] = []
        self.failed: list[str] = []
        self.before: Conditions | None = None  # of the runs that the folder has
        self._now: Conditions | None = None
        self._replaces = force
        if force:
            return
        path = folder / RUNS
        if path.exists():
            self.runs = read_runs(read_bytes(path).decode("utf-8", "replace").splitlines(), str(path))
        self.samples = existing_samples(folder / PAIRS)
        if self.runs or self.samples:
            path = folder / CONDITIONS
            if not path.exists():
                raise ConfigError(
                    f"{path}: is missing; it tells under which conditions the runs in {folder} were made; {WAYS_OUT}"
                )
            self.before = read_conditions(read_bytes(path), str(path))

    def go_on(self, conditions: Conditions) -> None:
        """Note under which conditions runs are made from here on. Raises ConfigError where those of the folder were
        made under others."""
        from cotenant.profiling.conditions import differences
        from cotenant.profiling.scenarios import SERVER

        served = {run.model for run in self.runs if run.result.scenario == SERVER}
        others = [] if self.before is None else list(differences(self.before, conditions, served))
        if others:
            raise ConfigError(f"{self.folder}: its runs are of {'; of '.join(others)}; {WAYS_OUT}")
        self._now = conditions.including(self.before)

    def add_run(self, run: Run) -> None:
        from cotenant.profiling.characterisation import write_runs

        self._prepare()
        self.runs.append(run)
        write_file(self.folder / RUNS, write_runs(self.runs), quiet=True)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        from cotenant.predictors.samples import write_samples

        self._prepare()
        self.samples.extend(samples)
        write_file(self.folder / PAIRS, write_samples(self.samples), quiet=True)

    def _prepare(self) -> None:
        """Write the conditions before the first that is made under them; runs of others must not be found with them."""
        from cotenant.profiling.conditions import write_conditions

        if self._now is None:
            return
        if self._replaces:
            for name in (RUNS, PAIRS):
                (self.folder / name).unlink(missing_ok=True)
        write_file(self.folder / CONDITIONS, write_conditions(self._now), quiet=True)
        self._now = None

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


def _conditions(
    options: Conditions, before: Conditions | None, deployment: Any, backend: Any, stated: Collection[str]
) -> Conditions:
    """Return all conditions of runs. stated: models whose SLO the settings say; that of others is derived from their
    profiles, which get finer with time, so that it stays what it was when they ran first."""
    from cotenant.profiling import cache
    from cotenant.profiling.conditions import ModelConditions

    isolation = backend.with_ceilings().isolation()
    devices = {
        kind.name: f"{cache.machine_fingerprint() if kind.name == 'cpu' else kind.name}, {isolation}"
        for kind in deployment.problem.fleet
    }
    models = {}
    for name, offer in _single_models(deployment).items():
        known = None if before is None or name in stated else before.models.get(name)
        config = msgspec.json.encode(offer.entry.config.fields, order="deterministic").decode()
        models[name] = ModelConditions(
            slo=offer.model.slo if known is None else known.slo,
            digest=cache.cache_key(cache.file_digest(offer.entry.path), config),
        )
    return msgspec.structs.replace(options, devices=devices, models=models)


def _single_models(deployment: Any) -> dict[str, Any]:
    """Return the models that are no ensembles, by name."""
    return {name: each for name, each in deployment.offered.items() if each.ensemble is None}


async def _run_all(
    measured: Measured,
    deployment: Any,
    targets: Mapping[str, float],
    backend: Any,
    steps: StepProgress,
    wanted: Wanted,
) -> None:
    from cotenant.cli.pairs import candidate

    candidates = {name: candidate(each) for name, each in _single_models(deployment).items()}
    for kind in deployment.problem.fleet:
        await _run_alone(measured, candidates, targets, kind, backend, steps, wanted)
        await _run_together(measured, candidates, kind, backend, steps, wanted)


async def _run_alone(
    measured: Measured, candidates: Any, targets: Any, kind: Any, backend: Any, steps: StepProgress, wanted: Wanted
) -> None:
    """Run the scenarios that the folder does not have yet."""
    from cotenant.profiling.characterisation import Run, default_shares, run_scenarios

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
                measured.add_run(found)
                finished += 1
                steps(f"alone on {kind.name}", finished, len(asked))
            else:
                name, share, reason = found
                measured.leave_out(f"{name} on {share / 10:g} % of {kind.name}: {reason}")


async def _run_together(
    measured: Measured, candidates: Any, kind: Any, backend: Any, steps: StepProgress, wanted: Wanted
) -> None:
    """Co-locate the pairs that the folder does not have yet."""
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
            measured.add_samples(both)
            finished += 1
            steps(f"co-located on {kind.name}", finished, count)


def _legal_shares(shares: Sequence[float], kind: Any) -> tuple[int, ...]:
    from cotenant.core.units import parse_share

    parsed = [parse_share(share, "--share") for share in shares]
    for share in parsed:
        if share not in kind.cuts:
            legal = ", ".join(f"{cut / 10:g}" for cut in kind.cuts)
            raise ConfigError(f"--share {share / 10:g}: {kind.name} has no such share; available: {legal}")
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
