"""Fit a predictor to samples of pairs, or compare the errors of predictors: `cotenant fit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.loading import write_file
from cotenant.cli.options import Json, PlotFile, Seed
from cotenant.cli.output import ProfileProgress, aside, console, print_written, progress_bars, show_json
from cotenant.cli.reproduce import experiment_module
from cotenant.config import read_profiles_file, read_samples_file
from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.predictors.fitting import PREDICTORS, check, to_json
from cotenant.predictors.fitting import fit as fitted_to
from cotenant.predictors.samples import Sample
from cotenant.profiling.cross_validation import PredictionErrors, cross_validate
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.render.table import table

REPEATS = 5
# Published sets that a checkout may have, and the function that reads their samples.
PUBLISHED = {"v100": "pairs", "a100": "pairs", "kace": "samples"}


def fit(
    samples: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLES",
            help=f"Samples of co-located runs (CSV file), or a published set: {', '.join(PUBLISHED)}.",
        ),
    ],
    profiles: Annotated[
        list[Path] | None,
        typer.Option("--profiles", help="Profiles of the models (CSV file); repeat for several."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", help=f"Predictor: {', '.join(PREDICTORS)}; with --report repeat for several. Default: all."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the fitted predictor into this JSON file.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Cross-validate predictors and show their errors.")] = False,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Random splits of --report. Default: 5.")
    ] = None,
    plot: PlotFile = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Fit an interference predictor to samples of co-located runs, or compare predictors on them."""
    for name in model or ():
        if name not in PREDICTORS:
            raise ConfigError(f"--model {name}: there are {', '.join(PREDICTORS)}")
    if repeats is not None and not report:
        raise ConfigError("--repeats is the number of splits of --report; it goes with --report")
    known, of = _read(samples, profiles or [])
    try:
        check(known, of)
        if report:
            if output is not None:
                raise ConfigError("--report writes no predictor; leave out --output, or leave out --report")
            _report(model or list(PREDICTORS), known, of, repeats=repeats or REPEATS, seed=seed, plot=plot, json=json)
        else:
            _fit(model or ["gaussian-process"], known, of, output, plot)
    except PlanError as error:
        raise ConfigError(f"{samples}: {error}") from None


def _read(samples: str, profiles: Sequence[Path]) -> tuple[list[Sample], Profiles]:
    if samples in PUBLISHED and not Path(samples).exists():
        data: Any = experiment_module(f"data.{samples}")
        return getattr(data, PUBLISHED[samples])(), data.profiles()
    read = read_samples_file(Path(samples))
    if not profiles:
        raise ConfigError(f"{samples}: give the models' profiles with --profiles; predictors learn from them, too")
    known: dict[tuple[str, str], Any] = {}
    for path in profiles:
        known |= read_profiles_file(path)
    return read, known


def _fit(
    names: Sequence[str], samples: Sequence[Sample], profiles: Profiles, output: Path | None, plot: Path | None
) -> None:
    if len(names) != 1:
        raise ConfigError("one --model is fitted at a time; --report compares several")
    if plot is not None:
        raise ConfigError("--plot draws a comparison; it goes with --report")
    (name,) = names
    text = to_json(name, fitted_to(name, samples, profiles)).decode()
    if output is None:
        console.file.write(text + "\n")
        return
    write_file(output, text + "\n")
    aside.print(
        f'to plan with it: interference = {{ model = "{name}", fit = "{output}" }} in a problem or in settings',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _report(
    names: Sequence[str],
    samples: Sequence[Sample],
    profiles: Profiles,
    *,
    repeats: int,
    seed: int,
    plot: Path | None,
    json: bool,
) -> None:
    with progress_bars("cross-validating") as progress:
        verdicts = list(
            cross_validate(names, samples, profiles, repeats=repeats, seed=seed, progress=ProfileProgress(progress))
        )
    if plot is not None:
        save_verdicts(verdicts, plot)
        print_written(plot)
    if json:
        show_json(verdicts)
    else:
        console.print(verdict_table(verdicts, samples))


def verdict_table(verdicts: Sequence[PredictionErrors], samples: Sequence[Sample]) -> RenderableType:
    kind = samples[0].victim.kind
    parts: list[RenderableType] = []
    for what in dict.fromkeys(verdict.held_out for verdict in verdicts):
        rows = table(
            f"error in % of {len(samples)} slowdowns on {kind}; held out: {what}",
            "predictor",
            ">mean",
            ">p50",
            ">p90",
            ">by split",
            ">p95",
            ">bias",
            ">covered by q90",
            ">fitted in",
        )
        mine = [verdict for verdict in verdicts if verdict.held_out == what]
        for verdict in sorted(mine, key=lambda verdict: (verdict.p90 is None, verdict.p90)):
            mean, p50, p90, p95 = (
                "-" if number is None else f"{number:.2f}"
                for number in (verdict.mean, verdict.p50, verdict.p90, verdict.p95)
            )
            rows.add_row(
                escape(verdict.predictor),
                mean,
                p50,
                p90,
                "-" if verdict.spread is None else f"±{verdict.spread:.2f}",
                p95,
                "-" if verdict.bias is None else f"{verdict.bias:+.2f}",
                "-" if verdict.coverage is None else f"{verdict.coverage:.1f} %",
                "-" if verdict.fit_s is None else f"{verdict.fit_s:.2g} s",
            )
        parts.append(rows)
        parts += [Text(f"{verdict.predictor}: {verdict.failed}", style="dim") for verdict in mine if verdict.failed]
        parts.append(Text())
    return Group(*parts[:-1])


def save_verdicts(verdicts: Sequence[PredictionErrors], path: Path) -> None:
    """Draw the 90th percentile of the error as bars, by predictor and held-out set. Raises as `save_plan` does."""
    known = [verdict for verdict in verdicts if verdict.p90 is not None]
    names = list(dict.fromkeys(verdict.predictor for verdict in known))
    kinds = list(dict.fromkeys(verdict.held_out for verdict in known))
    figure = figure_for(path, 2.5 + 1.1 * len(names), 3.6)
    axes = figure.subplots()
    width = 0.86 / max(len(kinds), 1)
    for i, what in enumerate(kinds):
        mine = [verdict for verdict in known if verdict.held_out == what]
        made = axes.bar(
            [names.index(verdict.predictor) + (i - (len(kinds) - 1) / 2) * width for verdict in mine],
            [verdict.p90 or 0.0 for verdict in mine],
            width * 0.92,
            label=what,
            color=COLOURS[i],
        )
        axes.bar_label(made, fmt="%.3g", fontsize=7, padding=2)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("90th percentile of the error, %", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="held out", fontsize=7, title_fontsize=7, frameon=False)
    save_figure(figure, path)
