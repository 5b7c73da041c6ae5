"""Define the options of experiments, and run their tasks in several processes with progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from cotenant.sim.parallel import task_pool

Task = TypeVar("Task")
Result = TypeVar("Result")

# Takes the kind of task, the number done, and the total.
Progress = Callable[[str, int, int], None]


def no_progress(label: str, done: int, of: int) -> None:
    pass


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Configure an experiment; each uses the options that apply to it.

    profiles: sets of profiles to use, all if empty; every: use every N-th scenario; full: use all scenarios also with
    slow planners; jobs: worker processes.
    """

    seed: int = 0
    profiles: tuple[str, ...] = ()
    every: int = 1
    full: bool = False
    jobs: int = 1
    progress: Progress = no_progress


def run_tasks(work: Callable[[Task], Result], tasks: Sequence[Task], options: Options, label: str) -> list[Result]:
    """Apply `work`, a module-level function, to each task in order. With one job, this process does it."""
    options.progress(label, 0, len(tasks))
    results: dict[int, Result] = {}
    with task_pool(options.jobs) as workers:
        for number, result in workers.each(work, tasks):
            results[number] = result
            options.progress(label, len(results), len(tasks))
    return [results[number] for number in range(len(tasks))]
