"""Do work in the processor time that nobody else wants, so that a start does not slow what is being served.

On Linux a thread with the policy SCHED_IDLE runs where a processor has nothing else to do. Threads that it creates
inherit that. To go back takes CAP_SYS_NICE, or RLIMIT_NICE to allow the niceness of the process (`LimitNICE=` of a
systemd unit): without either, nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOWEST_PRIORITY = 19  # niceness


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Run the block in the background, and the threads that it has created as usual afterwards."""
    if not _may_return():
        yield
        return
    _set_policy(0, idle=True)
    try:
        yield
    finally:
        leave_background(os.getpid())


def lower_priority(pid: int) -> None:
    """Give a process that was just started the lowest priority, where `restore_priority` may take that back.

    Unlike the background, it leaves some processor time to the process however busy the machine is.
    """
    if sys.platform == "linux" and _priority_may_return():
        with contextlib.suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)


def lower_own_priority() -> None:
    """Give the calling thread the lowest priority, for good."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)


def restore_priority(parent: int) -> None:
    """Give the calling thread the priority of the process that started this one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it was not lowered, or the parent has ended
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, parent))


def lower_session(pid: int) -> bool:
    """Give the session of a process the lowest priority among sessions; return whether that is done.

    Linux may share processors out over sessions first (`sched_autogroup`). Priorities of threads, SCHED_IDLE included,
    count only within one then.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(LOWEST_PRIORITY))
    except FileNotFoundError:  # there are no such groups, or it has ended
        return True
    except OSError:  # unprivileged callers may do it ten times a second
        return False
    return True


@functools.cache
def _priority_may_return() -> bool:
    with ThreadPoolExecutor(1) as thread:  # which ends at the lowest where it may not return from that
        return thread.submit(_priority_returns).result()


def _priority_returns() -> bool:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
        os.setpriority(os.PRIO_PROCESS, 0, before)
    except OSError:
        return False
    return True


def leave_background(pid: int) -> None:
    """Let all threads of a process run as usual. Harmless where they do, and where there is no such process."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # so has the thread, or it must stay as it is
                if os.sched_getscheduler(int(thread.name)) == os.SCHED_IDLE:
                    _set_policy(int(thread.name), idle=False)


def _may_return() -> bool:
    """Tell whether a thread of this process may leave the background again. One that ends tries it."""
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_returns).result()


def _returns() -> bool:
    try:
        _set_policy(0, idle=True)
        _set_policy(0, idle=False)
    except OSError:
        return False
    return True


def _set_policy(thread: int, *, idle: bool) -> None:
    os.sched_setscheduler(thread, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
