"""Work over several processes, with word of how far it is."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

# What, done, of how many.
Progress = Callable[[str, int, int], None]


def quiet(what: str, done: int, of: int) -> None:
    pass


def spread(
    work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, progress: Progress, what: str
) -> list[Result]:
    """What `work`, a function of a module, makes of each task, in order. jobs: processes; with 1, this one does it."""
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
