"""Build example models, and copy the example files of the documentation: `cotenant examples`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cotenant.cli.example_files import copy_examples
from cotenant.cli.options import Json, Seed
from cotenant.cli.output import console, print_written, progress_bars, show_json
from cotenant.errors import ConfigError
from cotenant.zoo import TORCH, ZOO, Built, build_models, recipe_of

ExampleRepository = Annotated[
    Path,
    typer.Option(
        "--model-repository",
        "-r",
        envvar="COTENANT_MODEL_REPOSITORY",
        help="Model repository to write the models into.",
    ),
]


def examples(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Models to build. Default: those of the demo.")
    ] = None,
    model_repository: ExampleRepository = Path("models"),
    torch: Annotated[
        bool,
        typer.Option(
            "--torch",
            help="Build PyTorch models, for GPUs. MODEL may also be `gpulet` or `kace`: the papers' models.",
        ),
    ] = False,
    files: Annotated[
        Path | None,
        typer.Option(
            "--files", metavar="FOLDER", help="Copy the documentation's example files into this folder and exit."
        ),
    ] = None,
    seed: Seed = 0,
    list_: Annotated[bool, typer.Option("--list", help="List the models that can be built and exit.")] = False,
    json: Json = False,
) -> None:
    """Build example models: the papers' architectures, small trained models, and a sentence embedder."""
    if list_:
        recipes = TORCH if torch else ZOO
        if json:
            show_json(recipes)
        else:
            for name, recipe in recipes.items():
                console.print(f"{name:16} {recipe.summary}", highlight=False)
        return
    if files is not None:
        if names or torch:
            raise ConfigError("--files copies example files and builds no models; leave out the models")
        for path in copy_examples(files):
            print_written(path)
        return
    built = build_zoo(model_repository, names, seed, torch=torch)
    if json:
        show_json(msgspec.json.format(msgspec.json.encode(built, enc_hook=str), indent=2))


def build_zoo(
    repository: Path, names: Iterable[str] | None, seed: int, *, quiet: bool = False, torch: bool = False
) -> list[Built]:
    """Build example models, with a progress bar, and a line for each model unless `quiet`."""
    with progress_bars("building", transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(name: str, done: int, total: int) -> None:
            progress.start()
            progress.update(task, description=name, completed=done, total=total)

        built = build_models(repository, names, seed, show, torch=torch)
    if not quiet:
        for model in built:
            score = f"; {model.notes['score']}" if "score" in model.notes else ""
            state = "built" if model.fresh else "up to date"
            console.print(
                f"{model.name:16} {state}: {recipe_of(model.name, torch=torch).summary}{score}", highlight=False
            )
    return built
