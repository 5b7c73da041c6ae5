from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import pytest

from cotenant.errors import PlanError, WorkerError
from cotenant.sim.parallel import task_pool

PATIENCE = 60.0  # seconds
ENDLESS = 100 * PATIENCE


def doubled(number: int) -> tuple[int, int]:
    if number < 0:
        raise PlanError(f"{number} is negative")
    return 2 * number, os.getpid()


@pytest.mark.parametrize("jobs", [1, 2])
def test_task_pool_results_are_in_task_order_and_errors_are_raised(jobs: int) -> None:
    with task_pool(jobs) as workers:
        results = workers.all(doubled, [3, 1, 2])
        assert [number for number, _ in results] == [6, 2, 4]
        assert (os.getpid() in {pid for _, pid in results}) is (jobs == 1)
        assert sorted(number for number, _ in workers.each(doubled, [3, 1])) == [0, 1]
        with pytest.raises(PlanError, match=r"^-1 is negative$"):
            workers.all(doubled, [1, -1])


def test_task_pool_process_that_is_killed_is_an_error_with_a_way_out() -> None:
    with task_pool(2) as workers:
        for _ in range(2):  # the second time the pool knows, and takes no task
            with pytest.raises(WorkerError, match=r"ended before its result; .* Run fewer at once"):
                workers.all(os._exit, [9])


def interrupted(processes: list[BaseProcess]) -> None:
    with task_pool(2) as workers:
        # The first task occupies a process until the end, so that the second needs another.
        for _ in workers.each(time.sleep, [ENDLESS, 0.0]):
            processes += multiprocessing.active_children()
            raise KeyboardInterrupt


def test_task_pool_interrupted_in_a_long_task_ends_its_processes() -> None:
    """By their sentinels, which tell an end even where the pool's own thread was first to wait for it."""
    processes: list[BaseProcess] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(processes)
    assert len(processes) == 2
    for process in processes:
        assert wait([process.sentinel], PATIENCE), f"{process.name} goes on"
