"""Print the output of commands: tables and progress for people, JSON for programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from cotenant.app.log_format import JsonLogFormatter, LogFormatter
from cotenant.profiling.pace import ProfilingPace

T = TypeVar("T")

logger = logging.getLogger(__name__)

console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = 150  # not a terminal: wide enough for all columns
aside = Console(stderr=True)  # progress and notes


def set_up_log(level: str, format: str, *, access: bool) -> None:
    """Set up the log of a server: with the time of each line. access: write the access log too, whatever the level."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    logging.getLogger("cotenant.access").setLevel(logging.INFO if access else logging.NOTSET)
    for handler in root.handlers:
        if isinstance(handler.formatter, JsonLogFormatter | LogFormatter):  # the command line's own
            handler.setFormatter(JsonLogFormatter() if format == "json" else LogFormatter(timed=True))


def print_labelled(word: str, text: str, to: Console = aside) -> None:
    """Print one line, however long, that begins with a word in red."""
    to.print(Text.assemble((word, "red"), f" {text}"), soft_wrap=True)


def print_written(path: Path) -> None:
    aside.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def show_json(value: object) -> None:
    """Print JSON on standard output. Bytes are JSON already."""
    text = (
        value if isinstance(value, bytes) else msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    )
    console.file.write(text.decode() + "\n")
    console.file.flush()  # the parent process may wait for it


@contextmanager
def only_told() -> Iterator[None]:
    """Print within what a program that serves may as well leave out: where nobody reads its output any more, or a disk
    is full, it goes on."""
    try:
        yield
    except (OSError, SystemExit) as error:  # Rich ends a program whose pipe is broken
        reason = error if isinstance(error, OSError) else "the pipe is broken"
        logger.warning("what is printed here is lost: %s", reason)


class StepProgress:
    """Show a bar for each part of a long run, from its first step on; where there is no terminal, a line."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, part: str, done: int, total: int) -> None:
        self.show(part, done, total, f"{part}: {total} to do")

    def show(self, part: str, done: int, total: int, words: str) -> None:
        """Show how far a part is. words: the line for it."""
        if not aside.is_terminal:
            if done == 0:
                aside.print(words, highlight=False, soft_wrap=True)
            return
        if part not in self._tasks:
            self._progress.start()
            self._tasks[part] = self._progress.add_task(part, total=total)
        self._progress.update(self._tasks[part], completed=done)


class ProfileProgress:
    """Show a bar for each model that is being profiled; where there is no terminal, a line with the time left."""

    def __init__(self, progress: Progress) -> None:
        self._steps = StepProgress(progress)
        self._pace = ProfilingPace()

    def __call__(self, model: str, done: int, total: int, number: int = 1, count: int = 1) -> None:
        with only_told():
            self._steps.show(model, done, total, self._pace(model, done, total, number, count))


@contextmanager
def profile_progress() -> Iterator[ProfileProgress]:
    with progress_bars("profiling") as progress:
        yield ProfileProgress(progress)


@contextmanager
def progress_bars(verb: str, *, transient: bool = False) -> Iterator[Progress]:
    """Return progress bars, to be started with the first progress. transient: they vanish at the end."""
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
    """Return results, which come in any order with their numbers from 0, by number; shows a progress bar."""
    collected: dict[int, T] = {}
    with progress_bars(verb, transient=True) as progress:
        if aside.is_terminal:
            progress.start()
        task = progress.add_task("", total=count)
        for number, result in results:
            collected[number] = result
            progress.advance(task)
    return [collected[number] for number in range(count)]
