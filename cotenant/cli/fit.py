"""Fit a predictor to samples of pairs, or compare the errors of predictors: `cotenant fit`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cotenant.cli.loading import write_file
from cotenant.cli.options import Json, PlotFile, Seed
from cotenant.cli.output import StepProgress, aside, console, print_written, progress_bars, show_json
from cotenant.cli.report_file import ReportFile, check_report, write_report
from cotenant.config import read_profiles_file, read_samples_file
from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError, PlanError
from cotenant.predictors.fitting import PREDICTORS, check, to_json
from cotenant.predictors.fitting import fit as fitted_to
from cotenant.predictors.samples import Sample
from cotenant.profiling.cross_validation import PredictionErrors, cross_validate
from cotenant.render.figure import COLOURS, figure_for, save_figure
from cotenant.render.page import Section, drawn
from cotenant.render.table import table

REPEATS = 5
# Published sets of samples; their files do not come along.
PUBLISHED = ("v100", "a100", "kace")


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
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            envvar="COTENANT_DATA",
            help="Folder of the published sets' files, as their authors distribute them.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help=f"Predictor: {', '.join(PREDICTORS)}. Default: gaussian-process. With --compare repeat for several; "
            "default: all.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the fitted predictor into this JSON file.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Cross-validate predictors and show their errors; fit none.")
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, help="Number of random splits of the cross-validation (--compare, --report)."),
    ] = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Fit an interference predictor to samples of co-located runs, or compare predictors on them."""
    logging.getLogger("flaml.tune").setLevel(logging.WARNING)  # it advises on options that nobody here chooses
    for name in model or ():
        if name not in PREDICTORS:
            raise ConfigError(f"--model {name}: unknown; available: {', '.join(PREDICTORS)}")
    if repeats is not None and not compare and report is None:
        raise ConfigError("--repeats is for cross-validation; add --compare or --report")
    if compare and output is not None:
        raise ConfigError("--compare writes no predictor; leave out --output, or leave out --compare")
    if not compare and len(model or ()) > 1:
        raise ConfigError("only one --model can be fitted; leave out the others, or add --compare")
    if not compare and plot is not None:
        raise ConfigError("--plot draws a comparison; add --compare")
    check_report(report)
    known, of = _read(samples, profiles or [], data)
    names = model or (list(PREDICTORS) if compare else ["gaussian-process"])
    try:
        check(known, of)
        verdicts = None
        if compare or report is not None:
            verdicts = _cross_validated(names, known, of, repeats=repeats or REPEATS, seed=seed)
        if compare and verdicts is not None:
            _show(verdicts, known, plot, json=json)
        else:
            _fit(names[0], known, of, output)
    except PlanError as error:
        raise ConfigError(f"{samples}: {error}") from None
    if report is not None and verdicts is not None:
        _report(report, verdicts, known, [Path(samples), *(profiles or [])])


def _read(samples: str, profiles: Sequence[Path], data: Path | None) -> tuple[list[Sample], Profiles]:
    if samples in PUBLISHED and not Path(samples).exists():
        return _published(samples, data)
    read = read_samples_file(Path(samples))
    if not profiles:
        raise ConfigError(f"{samples}: give the models' profiles with --profiles; predictors learn from them, too")
    known: dict[tuple[str, str], Any] = {}
    for path in profiles:
        known |= read_profiles_file(path)
    return read, known


def _published(name: str, folder: Path | None) -> tuple[list[Sample], Profiles]:
    from cotenant.published import a100, kace, v100

    if name == "kace":
        return kace.samples(folder=folder), kace.profiles(folder=folder)
    source = v100 if name == "v100" else a100
    return source.pairs(folder), source.profiles(folder)


def _fit(name: str, samples: Sequence[Sample], profiles: Profiles, output: Path | None) -> None:
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


def _cross_validated(
    names: Sequence[str], samples: Sequence[Sample], profiles: Profiles, *, repeats: int, seed: int
) -> list[PredictionErrors]:
    with progress_bars("cross-validating") as progress:
        return list(
            cross_validate(names, samples, profiles, repeats=repeats, seed=seed, progress=StepProgress(progress))
        )


def _show(verdicts: Sequence[PredictionErrors], samples: Sequence[Sample], plot: Path | None, *, json: bool) -> None:
    if plot is not None:
        save_verdicts(verdicts, plot)
        print_written(plot)
    if json:
        show_json(verdicts)
    else:
        console.print(verdict_table(verdicts, samples))


def _report(path: Path, verdicts: Sequence[PredictionErrors], samples: Sequence[Sample], files: Sequence[Path]) -> None:
    shows = "90th percentile of the error of each predictor, by what was held out."
    write_report(
        path,
        title=f"How well slowdown on {samples[0].victim.kind} is predicted",
        question="By how much are predictors of interference wrong on co-located runs that they have not seen?",
        answer=_best(verdicts),
        good=None,
        sections=[
            Section(
                heading="Errors",
                parts=(drawn(lambda file: save_verdicts(verdicts, file), shows), verdict_table(verdicts, samples)),
            ),
            Section(
                heading="What was asked",
                parts=(
                    f"{len(samples)} co-located runs on {escape(samples[0].victim.kind)}, of "
                    f"{len({sample.victim.model for sample in samples})} models. An error is of the predicted "
                    "slowdown, in percent of the measured one.",
                ),
            ),
        ],
        files=files,
    )


def _best(verdicts: Sequence[PredictionErrors]) -> list[str]:
    """Say which predictor is best, for each way to hold samples out."""
    sentences = []
    for what in dict.fromkeys(verdict.held_out for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.held_out == what and verdict.p90 is not None]
        if mine:
            best = min(mine, key=lambda verdict: verdict.p90 or 0.0)
            sentences.append(f"Held out {what}: {best.predictor} is within {best.p90:.1f} % in 90 of 100 cases.")
    return sentences or ["No predictor could be validated on these samples."]


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
