"""How experiments are asked for, and work over several processes, with word of how far it is."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import msgspec

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
    jobs, progress = options.jobs, options.progress
    progress(what, 0, len(tasks))
    if jobs == 1:
        results = []
        for task in tasks:
            results.append(work(task))
            progress(what, len(results), len(tasks))
        return results
    # Spawned rather than forked: the bar has a thread, and a fork would copy its locks.
    # Ctrl-C reaches the workers, too, and ends them without a word.
    ended = (signal.SIGINT, signal.SIG_DFL)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, initializer=signal.signal, initargs=ended) as pool:
        futures = [pool.submit(work, task) for task in tasks]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(what, done, len(tasks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
