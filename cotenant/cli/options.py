"""Arguments and flags that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cotenant.planners import PLANNERS

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
SettingsFile = Annotated[
    Path | None, typer.Argument(metavar="[SETTINGS]", help="TOML file; without it, the models of ./models are served.")
]
ProblemFile = Annotated[
    Path | None, typer.Argument(metavar="PROBLEM", help="TOML file; without it, the models of ./models.")
]
Repository = Annotated[Path | None, typer.Option("--repository", "-r", help="Folder of models, in Triton's layout.")]
ServerSettings = Annotated[
    Path | None, typer.Option("--settings", help="Take the models, targets and rates that a server is given.")
]
PlannerName = Annotated[
    str | None, typer.Option("--planner", "-p", help=f"Who plans: {', '.join(PLANNERS)}, or one that is installed.")
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="SECONDS", min=0.01, help="How long a planner may search at a time."),
]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the result into this .svg, .png or .pdf.")]
Seconds = Annotated[float, typer.Option("--seconds", "-s", min=0.1, help="How long requests arrive.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything random.")]
Rates = Annotated[
    list[str] | None, typer.Option("--rate", "--rates", help="MODEL=REQUESTS_PER_SECOND; may be given for each model.")
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        "--trace",
        help="Who asks, and when. TOML: curves, bursts, traces, failures. CSV: a trace with a column `model`.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes to work with.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="So many runs, with seeds from --seed on.")]
