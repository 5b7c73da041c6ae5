"""Work in the background, in threads of this process."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from cotenant.worker import background
from cotenant.worker.background import (
    LOWEST_PRIORITY,
    in_background,
    leave_background,
    lower_priority,
    restore_priority,
)

T = TypeVar("T")

if sys.platform != "linux":
    pytest.skip("only Linux has it", allow_module_level=True)


@pytest.fixture
def allowed() -> None:
    with ThreadPoolExecutor(1) as thread:
        if not thread.submit(background._may_return).result():
            pytest.skip("this process may not leave the background again")


def policy(thread: int = 0) -> int:
    return os.sched_getscheduler(thread)


def test_block_runs_in_the_background_and_what_follows_does_not(allowed: None) -> None:
    def work() -> tuple[int, int]:
        with in_background():
            inside = policy()
        return inside, policy()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result() == (os.SCHED_IDLE, os.SCHED_OTHER)


def test_lowered_priority_is_restored_to_that_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> tuple[int, int]:
        lower_priority(threading.get_native_id())
        lowered = os.getpriority(os.PRIO_PROCESS, 0)
        restore_priority(os.getpid())
        return lowered, os.getpriority(os.PRIO_PROCESS, 0)

    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    with ThreadPoolExecutor(1) as thread:
        lowered, restored = thread.submit(work).result()
    assert restored == own and lowered == (LOWEST_PRIORITY if background._priority_may_return() else own)
    monkeypatch.setattr(background, "_priority_may_return", lambda: False)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result() == (own, own), "a priority that cannot be restored is not lowered"


def test_threads_that_the_block_made_leave_the_background_with_it(allowed: None) -> None:
    over = threading.Event()

    def work() -> tuple[int, int]:
        with in_background():
            made = threading.Thread(target=over.wait)
            made.start()
            assert made.native_id is not None
            inside = policy(made.native_id)
        after = policy(made.native_id)
        over.set()
        made.join()
        return inside, after

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result() == (os.SCHED_IDLE, os.SCHED_OTHER)


def test_block_that_raises_leaves_the_background(allowed: None) -> None:
    def work() -> int:
        with pytest.raises(ValueError, match="broken"), in_background():
            raise ValueError("broken")
        return policy()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result() == os.SCHED_OTHER


def test_another_may_end_the_background_early(allowed: None) -> None:
    def work() -> int:
        with in_background():
            leave_background(os.getpid())
            return policy()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work).result() == os.SCHED_OTHER


def test_process_that_could_not_return_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, *, idle: bool) -> None:
        if not idle:
            raise PermissionError("may not")

    monkeypatch.setattr(background, "_set_policy", refuse)
    with in_background():
        assert policy() == os.SCHED_OTHER


def test_leaving_is_harmless_where_the_process_is_gone() -> None:
    before = policy()
    leave_background(2**22 + 1)
    assert policy() == before
