"""How experiments are asked for, and work over several processes, with word of how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from cotenant.sim.parallel import task_pool

Task = TypeVar("Task")
Result = TypeVar("Result")

# What, done, of how many.
Progress = Callable[[str, int, int], None]


def quiet(what: str, done: int, of: int) -> None:
    pass


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How an experiment is to be run; each takes what has a meaning for it.

    profiles: only with these; empty: all. every: of many scenarios, one in so many. full: all scenarios, also for
    planners that take long. jobs: processes.
    """

    seed: int = 0
    profiles: tuple[str, ...] = ()
    every: int = 1
    full: bool = False
    jobs: int = 1
    progress: Progress = quiet


def spread(work: Callable[[Task], Result], tasks: Sequence[Task], options: Options, what: str) -> list[Result]:
    """What `work`, a function of a module, makes of each task, in order. With one job, this process does it."""
    options.progress(what, 0, len(tasks))
    results: dict[int, Result] = {}
    with task_pool(options.jobs) as workers:
        for number, result in workers.each(work, tasks):
            results[number] = result
            options.progress(what, len(results), len(tasks))
    return [results[number] for number in range(len(tasks))]
