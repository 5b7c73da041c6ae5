"""Run a function over many tasks in several processes, and yield each result as soon as it is ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from cotenant.errors import WorkerError

ENDING = (signal.SIGINT, signal.SIGTERM)

Task = TypeVar("Task")
Result = TypeVar("Result")


class TaskPool:
    """A pool of worker processes, or this process alone. Create it with `task_pool`, which also ends it."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def each(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Yield (task index, result) in the order of completion. work: a function of a module.

        Raises WorkerError where a process ends before its result, such as one that the kernel kills for its memory.
        """
        if self._pool is None:
            for number, task in enumerate(tasks):
                yield number, work(task)
            return
        # Processes start here; one that is terminated before it got its task would print a traceback.
        with _whole(), _undisturbed():
            futures = {self._pool.submit(work, task): number for number, task in enumerate(tasks)}
        for future in as_completed(futures):
            with _whole():
                result = future.result()
            yield futures[future], result

    def all(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """Return the result of each task, in the order of the tasks."""
        return [result for _, result in sorted(self.each(work, tasks), key=lambda done: done[0])]


@contextmanager
def _whole() -> Iterator[None]:
    """Raise WorkerError where a process of the pool has ended within the block, or before it."""
    try:
        yield
    except BrokenProcessPool:
        raise WorkerError(
            "a process ended before its result; was it killed, or out of memory? Run fewer at once (--jobs 1)"
        ) from None


def _initialize() -> None:
    """Let Ctrl-C, and the end of the parent, end a pool process silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block. A signal mask would not do: another thread would take them."""
    deferred: list[int] = []
    handlers = {number: signal.getsignal(number) for number in ENDING}
    on_main_thread = threading.current_thread() is threading.main_thread()  # only it receives signals
    try:
        for number in handlers if on_main_thread else ():
            signal.signal(number, lambda number, frame: deferred.append(number))
        yield
    finally:
        for number, handler in handlers.items() if on_main_thread else ():
            signal.signal(number, handler)
        for late in deferred:
            signal.raise_signal(late)


@contextmanager
def task_pool(jobs: int) -> Iterator[TaskPool]:
    """Start `jobs` processes that end with the block, at once if it is left by an error or Ctrl-C."""
    if jobs == 1:
        yield TaskPool(None)
        return
    # Spawned rather than forked: a progress bar has a thread, and a fork would copy its locks.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_initialize)
    try:
        yield TaskPool(pool)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()  # nobody waits for its result any more
        raise
    pool.shutdown()
