import multiprocessing
import os
import time

import pytest

from cotenant.errors import PlanError
from cotenant.sim.parallel import task_pool


def doubled(number: int) -> tuple[int, int]:
    if number < 0:
        raise PlanError(f"{number} is negative")
    return 2 * number, os.getpid()


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_tasks_and_errors_as_they_are(jobs: int) -> None:
    with task_pool(jobs) as workers:
        results = workers.all(doubled, [3, 1, 2])
        assert [number for number, _ in results] == [6, 2, 4]
        assert (os.getpid() in {pid for _, pid in results}) is (jobs == 1)
        assert sorted(number for number, _ in workers.each(doubled, [3, 1])) == [0, 1]
        with pytest.raises(PlanError, match=r"^-1 is negative$"):
            workers.all(doubled, [1, -1])


def interrupted() -> None:
    with task_pool(2) as workers:
        for _ in workers.each(time.sleep, [0.0, 600.0]):
            raise KeyboardInterrupt


def test_an_interruption_waits_for_nobody() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    # The pool's own thread waits for them, too; whoever comes second learns of an end a little later.
    deadline = time.monotonic() + 20
    while (left := multiprocessing.active_children()) and time.monotonic() < deadline:
        left[0].join(0.1)
    assert not left
