"""Show the progress of a job that is followed: a bar for terminals, else a line for each change of its state."""

from __future__ import annotations

import sys
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cotenant.cli.output import aside, console
from cotenant.core.job import JobState, JobStatus
from cotenant.core.units import show_rate, show_share
from cotenant.render.jobs_table import show_steps


class JobBar:
    """Show a job's steps, share and metrics, with its output above."""

    def __init__(self) -> None:
        words = TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[told]}")
        self._progress = Progress(*words, TimeElapsedColumn(), console=aside)
        self._task: TaskID | None = None
        self._said = ""

    def __enter__(self) -> Self:
        if aside.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def print(self, text: str) -> None:
        """Print output of the job, above the bar where both are on one terminal."""
        if aside.is_terminal and console.is_terminal:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
            return
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, status: JobStatus) -> None:
        """Show where the job stands."""
        if aside.is_terminal:
            if self._task is None:
                self._task = self._progress.add_task("", total=None, told="")
            total = status.progress.total
            if status.state.ended and total is None:
                total = max(status.progress.steps, 1)
            self._progress.update(
                self._task,
                description=escape(status.job.id),
                completed=status.progress.steps,
                total=total,
                told=escape(progress_words(status)),
            )
            return
        said = f"{status.job.id} {status.state}" + (f": {status.reason}" if status.reason else "")
        if said != self._said:
            aside.print(said, markup=False, highlight=False, soft_wrap=True)
            self._said = said


def progress_words(status: JobStatus) -> str:
    """Say in a few words how far a job is: steps, share, metrics, or why it gets nothing."""
    progress = status.progress
    words = [show_steps(progress)] if progress.total is not None or progress.steps else []
    if status.state is not JobState.RUNNING:
        words.append(str(status.state))
    elif status.granted:
        words.append(f"{show_rate(progress.throughput)}/s on {show_share(status.granted)}")
    words += [f"{name} {value:.4g}" for name, value in progress.metrics.items()]
    return "  ".join([*words, status.reason] if status.reason else words)
