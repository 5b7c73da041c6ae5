"""Reproduce figures of the papers with the experiments of a checkout: `cotenant reproduce`.

An experiment is a module `experiments/<paper>/<figure>.py` with TITLE, `run(options) -> rows` and `plot(rows, path)`;
a row is a struct, and its fields are the columns. Experiments are not part of the package: they need a checkout, and
most need data that others published.
"""

from __future__ import annotations

import ast
import importlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from cotenant.cli.options import Jobs
from cotenant.cli.output import StepProgress, console, print_written, progress_bars, show_json
from cotenant.cli.reproduced import ReproducedFigures, cells_table
from cotenant.errors import ConfigError, CotenantError
from cotenant.render.table import table

CHECKOUT = Path(__file__).resolve().parents[2]


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Experiments, such as gpulet/fig16, or papers, such as thesis. Default: all."
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the papers' figures with their state, and the experiments, and exit.")
    ] = False,
    profiles: Annotated[
        list[str] | None, typer.Option("--profiles", help="Sets of profiles to use; repeat for several. Default: all.")
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Use every N-th scenario.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Run all scenarios, including those of slow planners.")] = False,
    jobs: Jobs = 2,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw each figure into this folder, as SVG.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="FOLDER",
            help="Keep each result and figure in this folder, go on from there, and write report.html into it. Default "
            "for one paper without --plot: reproduced/PAPER.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Reproduce figures of the papers next to the published numbers. Needs a checkout and its data."""
    known = experiment_titles()
    if listed:
        show_catalogue(known, json=json)
        return
    wanted = _wanted(names or (), known)
    if results is not None and plot is not None:
        raise ConfigError("--plot and --results exclude each other; --results includes the figures")
    if results is None and plot is None and names and len(names) == 1 and names[0] not in known:
        results = Path("reproduced", names[0])
    options = experiment_module("parallel").Options(
        seed=seed, profiles=tuple(profiles or ()), every=every, full=full, jobs=jobs
    )
    if results is not None:
        made = _kept_results(wanted, options, results, json=json)
    else:
        made = {}
        for name in wanted:
            with progress_bars(name) as progress:
                rows = experiment_module(name).run(msgspec.structs.replace(options, progress=StepProgress(progress)))
            made[name] = rows
            if plot is not None:
                _plotted(name, rows, plot)
            if not json:
                console.print(rows_table(known[name], rows))
    if json:
        show_json(made)


def _wanted(names: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Return the experiments that names of experiments and papers mean. Raises ConfigError for others."""
    wanted: dict[str, None] = {}
    for name in names or known:
        found = [name] if name in known else [each for each in known if each.startswith(f"{name}/")]
        if not found:
            papers = dict.fromkeys(each.partition("/")[0] for each in known)
            raise ConfigError(f"no experiment {name!r}; available: {', '.join(known)}; or all of {', '.join(papers)}")
        wanted.update(dict.fromkeys(found))
    return list(wanted)


def _plotted(name: str, rows: Any, folder: Path) -> Path:
    path = folder / f"{name.replace('/', '-')}.svg"
    experiment_module(name).plot(rows, path)
    print_written(path)
    return path


def _kept_results(wanted: Sequence[str], options: Any, folder: Path, *, json: bool) -> dict[str, Any]:
    """Make the experiments that a folder does not have yet, and a report of all. Raises ConfigError, once the others
    are made, for those that could not be."""
    kept = ReproducedFigures(folder, CHECKOUT, options)
    failed: dict[str, CotenantError] = {}
    with progress_bars("figures") as progress:
        shown = StepProgress(progress)
        for done, name in enumerate(wanted):
            shown("experiments", done, len(wanted))
            if kept.has(name):
                continue
            begun = time.monotonic()
            try:
                rows = experiment_module(name).run(msgspec.structs.replace(options, progress=shown))
            except CotenantError as error:
                failed[name] = error
                continue
            _plotted(name, rows, folder)
            kept.keep(name, rows, seconds=time.monotonic() - begun)
        shown("experiments", len(wanted), len(wanted))
    if not json:
        for name in wanted:
            if name not in failed:
                console.print(cells_table(experiment_module(name).TITLE, *kept.cells(name)))
    kept.write_report(wanted, experiment_module("catalogue").items(), failed)
    if failed:
        raise ConfigError("; ".join(f"{name}: {error}" for name, error in failed.items()))
    return {name: kept.rows(name) for name in wanted}


def show_catalogue(known: Mapping[str, str], *, json: bool) -> None:
    """Print every figure of the papers: how far it is made, by which experiments, and what is missing. known: titles of
    experiments by name; those that are none of the papers' figures come last."""
    catalogue = experiment_module("catalogue")
    listed = [msgspec.structs.replace(item, state=item.state_with(known)) for item in catalogue.items()]
    if json:
        show_json({"figures": listed, "experiments": known})
        return
    counts = Counter(item.state for item in listed)
    view = table(
        f"{len(listed)} figures and tables: " + ", ".join(f"{counts[state]} {state}" for state in sorted(counts)),
        *("paper", "item", "shows", "state", "by", "what is missing"),
    )
    for item in listed:
        made = ", ".join(name for name in item.experiments if name in known) or "-"
        view.add_row(*map(escape, (item.paper, item.item, item.shows, item.state, made, item.why)))
    console.print(view)
    named = {name for item in listed for name in item.experiments}
    for name, title in known.items():
        if name not in named:
            console.print(f"{name:16} {title}", highlight=False, markup=False, soft_wrap=True)


def experiment_titles() -> dict[str, str]:
    """What each experiment shows, by name. Raises ConfigError where there is no checkout.

    Titles are read, not imported: to list experiments takes none of the extras that some of them need.
    """
    folder = _experiments()
    files = sorted(file for pattern in ("fig[0-9]*.py", "table[0-9]*.py") for file in folder.glob(f"*/{pattern}"))
    return {f"{file.parent.name}/{file.stem}": _title(file) for file in files}


def _title(file: Path) -> str:
    for statement in ast.parse(file.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name("TITLE")], value=ast.Constant(str(title))):
                return title
    raise ConfigError(f'{file}: an experiment has its title in a line TITLE = "…"')


def _experiments() -> Path:
    folder = CHECKOUT / "experiments"
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no experiments; they are not part of the installed package: get a checkout of Cotenant and "
            "install it with `pip install --editable .`"
        )
    return folder


def experiment_module(name: str) -> Any:
    """Return the module of an experiment, from the folder next to the package. Raises ConfigError where there is no
    checkout, or an extra is missing that the experiment needs."""
    _experiments()
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    try:
        return importlib.import_module(f"experiments.{name.replace('/', '.')}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} needs {error.name}: pip install --editable '.[learn,plot]' in the checkout"
        ) from None


def rows_table(title: str, rows: Sequence[msgspec.Struct]) -> Table:
    """Return the fields of the rows as columns, numbers right-aligned."""
    fields = rows[0].__struct_fields__ if rows else ()
    return cells_table(title, fields, [[getattr(row, field) for field in fields] for row in rows])
