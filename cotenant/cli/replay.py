"""Replay an event log, and compare decisions: `cotenant replay`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cotenant.cli.options import Json
from cotenant.cli.output import aside, console, show_json
from cotenant.control.event_log import replay as run
from cotenant.core.units import show_count
from cotenant.errors import ConfigError


def replay(
    log: Annotated[
        Path, typer.Argument(metavar="EVENT_LOG", help="Event log written by `cotenant serve --event-log`.")
    ],
    json: Json = False,
) -> None:
    """Replay an event log through a fresh dispatcher and a fresh controller, and compare their decisions."""
    result = run(_lines(log), str(log))
    outcomes = [
        {"model": model, "outcome": outcome, "count": count}
        for (model, outcome), count in sorted(result.outcomes.items())
    ]
    if json:
        show_json(
            msgspec.json.encode(
                {
                    "events": result.events,
                    "seconds": result.seconds,
                    "outcomes": outcomes,
                    "controller_events": result.controller_events,
                    "solves": result.solves,
                    "rolls": result.rolls,
                    "identical": not result.difference,
                    "difference": result.difference,
                }
            )
        )
    else:
        console.print(f"{show_count(result.events, 'event')} in {result.seconds:.3f} s", highlight=False)
        for row in outcomes:
            console.print(f"  {row['model']}: {row['count']} {row['outcome']}", highlight=False)
        if result.controller_events:
            asked = f"asked for {show_count(result.solves, 'plan')}, rolled out {result.rolls}"
            events = show_count(result.controller_events, "event")
            console.print(f"  controller: {events}, {asked}", highlight=False)
        console.print("decisions identical" if not result.difference else f"[red]differs[/] at {result.difference}")
    if result.difference:
        raise typer.Exit(1)


def _lines(log: Path) -> Iterator[bytes]:
    """Yield the lines of a log one by one: hours of it do not fit in memory. A full disk cuts off the last."""
    try:
        with log.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
                else:
                    aside.print(
                        f"{log}: the last line was cut off, and is left out",
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
    except OSError as error:
        raise ConfigError(f"{log}: cannot be read: {error.strerror}") from None
