"""Reproduce figures of the papers with the experiments of a checkout: `cotenant reproduce`.

An experiment is a module `experiments/<paper>/<figure>.py` with TITLE, `run(options) -> rows` and `plot(rows, path)`;
a row is a struct, and its fields are the columns. Experiments are not part of the package: they need a checkout, and
most need data that others published.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from cotenant.cli.output import StepProgress, console, print_written, progress_bars, show_json
from cotenant.errors import ConfigError
from cotenant.render.table import table

CHECKOUT = Path(__file__).resolve().parents[2]


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments, such as gpulet/fig16. Default: all.")] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the papers' figures with their state, and the experiments, and exit.")
    ] = False,
    profiles: Annotated[
        list[str] | None, typer.Option("--profiles", help="Sets of profiles to use; repeat for several. Default: all.")
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Take every N-th scenario.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Run all scenarios, also with slow planners.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Worker processes to use.")] = 2,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw each figure into this folder, as SVG.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Reproduce figures of the papers next to the published numbers. Needs a checkout and its data."""
    known = experiment_titles()
    if listed:
        show_catalogue(known, json=json)
        return
    for name in names or ():
        if name not in known:
            raise ConfigError(f"no experiment {name!r}; there are {', '.join(known)}")
    parallel, results = experiment_module("parallel"), {}
    for name in names or known:
        experiment = experiment_module(name)
        with progress_bars(name) as progress:
            rows = experiment.run(
                parallel.Options(
                    seed=seed,
                    profiles=tuple(profiles or ()),
                    every=every,
                    full=full,
                    jobs=jobs,
                    progress=StepProgress(progress),
                )
            )
        results[name] = rows
        if plot is not None:
            path = plot / f"{name.replace('/', '-')}.svg"
            experiment.plot(rows, path)
            print_written(path)
        if not json:
            console.print(rows_table(experiment.TITLE, rows))
    if json:
        show_json(results)


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
    """What each experiment shows, by name. Raises ConfigError where there is no checkout."""
    folder = _experiments()
    files = sorted(file for pattern in ("fig[0-9]*.py", "table[0-9]*.py") for file in folder.glob(f"*/{pattern}"))
    names = [f"{file.parent.name}/{file.stem}" for file in files]
    return {name: experiment_module(name).TITLE for name in names}


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
    checkout."""
    _experiments()
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module(f"experiments.{name.replace('/', '.')}")


def rows_table(title: str, rows: Sequence[msgspec.Struct]) -> Table:
    """Return the fields of the rows as columns, numbers right-aligned."""
    fields = rows[0].__struct_fields__ if rows else ()
    cells = [[getattr(row, field) for field in fields] for row in rows]
    kinds = [{type(value) for value in column} for column in zip(*cells, strict=True)]
    headings = [
        f"{'>' if kind & {int, float} else ''}{field.replace('_', ' ')}"
        for field, kind in zip(fields, kinds, strict=True)
    ]
    shown = table(title, *headings)
    for row in cells:
        shown.add_row(*(escape(_text(value)) for value in row))
    return shown


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
