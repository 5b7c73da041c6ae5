"""What commands show: tables and progress for people, JSON for programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cotenant.core.application import Application
from cotenant.core.model import Model
from cotenant.core.units import show_seconds
from cotenant.planners.forecast import Forecast
from cotenant.render.table import table

T = TypeVar("T")

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 150  # nobody's screen sets it, so tables get room for all their columns
aside = Console(stderr=True)  # what is not the result: progress, notes


def set_log_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def print_labelled(word: str, text: str, to: Console = aside) -> None:
    """One line, however long, that begins with a word in red."""
    to.print(Text.assemble((word, "red"), f" {text}"), soft_wrap=True)


def print_written(path: Path) -> None:
    aside.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def show_json(value: object) -> None:
    """On standard output. Bytes are JSON already."""
    text = (
        value if isinstance(value, bytes) else msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    )
    console.file.write(text.decode() + "\n")
    console.file.flush()  # a program that started us may wait for it


def forecast_table(expected: Forecast, promises: Iterable[Model | Application]) -> Table:
    """What a plan will do under Poisson arrivals, promise by promise."""
    found = expected.models | expected.applications
    rows = table("forecast, under Poisson arrivals", "model", ">goodput/s", ">p50", ">p99", ">target", ">attained")
    for promise in promises:
        if promise.name in found:
            it = found[promise.name]
            colour = "green" if it.attainment >= promise.attainment else "red"
            attained = f"[{colour}]{it.attainment * 100:.2f} %[/]"
            times = (show_seconds(seconds) for seconds in (it.p50, it.p99, promise.slo))
            rows.add_row(escape(promise.name), f"{it.rate:.1f}", *times, attained)
    return rows


class ProfileProgress:
    """A bar for each model that is being measured, which appears with its first point. Without any, nothing shows."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, model: str, done: int, total: int) -> None:
        if model not in self._tasks:
            self._progress.start()
            self._tasks[model] = self._progress.add_task(model, total=total)
        self._progress.update(self._tasks[model], completed=done)


@contextmanager
def profile_progress() -> Iterator[ProfileProgress]:
    with progress_bars("profiling") as progress:
        yield ProfileProgress(progress)


@contextmanager
def progress_bars(verb: str, *, transient: bool = False) -> Iterator[Progress]:
    """Bars of progress, to be started when there is some. transient: they vanish at the end."""
    words = TextColumn(verb + " {task.description:<16}")
    progress = Progress(
        words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=aside, transient=transient
    )
    try:
        yield progress
    finally:
        if progress.live.is_started:
            progress.stop()


def collect_results(verb: str, results: Iterable[tuple[int, T]], count: int) -> list[T]:
    """Results that come in any order with their numbers, from 0, by number; with a bar while they come."""
    found: dict[int, T] = {}
    with progress_bars(verb, transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        task = progress.add_task("", total=count)
        for number, result in results:
            found[number] = result
            progress.advance(task)
    return [found[number] for number in range(count)]
