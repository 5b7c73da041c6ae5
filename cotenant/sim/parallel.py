"""The same work on many tasks, over several processes, each result as soon as it is there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

ENDING = (signal.SIGINT, signal.SIGTERM)

Task = TypeVar("Task")
Result = TypeVar("Result")


class TaskPool:
    """With one job, this process does it. Start it with `task_pool`, which also ends it."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def each(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """(which task, what `work`, a function of a module, makes of it), in the order in which they are done."""
        if self._pool is None:
            for number, task in enumerate(tasks):
                yield number, work(task)
            return
        with _undisturbed():  # the processes start here, and one that is left before it was told what to do complains
            futures = {self._pool.submit(work, task): number for number, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def all(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """What becomes of each task, in their order."""
        return [result for _, result in sorted(self.each(work, tasks), key=lambda done: done[0])]


def _begin() -> None:
    """Of a process of a pool: Ctrl-C reaches it, too, and ends it without a word; and so does its parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals to end come when the block is over. Not by a mask: another thread would take them."""
    came: list[int] = []
    known = {number: signal.getsignal(number) for number in ENDING}
    ours = threading.current_thread() is threading.main_thread()  # no other thread is disturbed
    try:
        for number in known if ours else ():
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in known.items() if ours else ():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


@contextmanager
def task_pool(jobs: int) -> Iterator[TaskPool]:
    """So many processes, which end with the block, at once where it is left by an error or by Ctrl-C."""
    if jobs == 1:
        yield TaskPool(None)
        return
    # Spawned rather than forked: a progress bar has a thread, and a fork would copy its locks.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield TaskPool(pool)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()  # in the middle of what nobody waits for any more
        raise
    pool.shutdown()
