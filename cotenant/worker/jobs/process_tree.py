"""Look at a process and all that descend from it, and signal them, by what /proc tells."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OWN = (11, 12)  # fields of /proc/…/stat behind the name: user and system time of a process
_WITH_CHILDREN = (11, 12, 13, 14)  # the same, and that of children that it has waited for
_MAX_PASSES = 100  # over processes that start others while they are signalled


def descendants(pid: int) -> list[int]:
    """Return all that descend from a process, without itself, parents first; none where there is no such process."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        with contextlib.suppress(OSError):  # it has just ended: its children are its parent's, or its reaper's, now
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                with contextlib.suppress(OSError):
                    children = [int(child) for child in (task / "children").read_text().split()]
                    found += children
                    waiting += children
    return found


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds of processes that live, those included of children that they have waited for."""
    return sum(_seconds(pid, _WITH_CHILDREN) for pid in pids)


def private_memory(pids: Iterable[int]) -> int:
    """Return the bytes in memory that processes share with no file; pages that they share with each other count for
    each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            pages += int(resident) - int(shared)
    return pages * _PAGE


def proportional_memory(pids: Iterable[int]) -> int:
    """Return the bytes of anonymous memory of processes, each page divided among those that share it. It takes
    milliseconds."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return total


def signal_all(root: int, number: signal.Signals) -> None:
    """Send a signal to all that descend from a process, those included that they start meanwhile."""
    reached: set[int] = set()
    for _ in range(_MAX_PASSES):
        fresh = [pid for pid in descendants(root) if pid not in reached]
        if not fresh:
            return
        for pid in fresh:
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(pid, number)
        reached.update(fresh)


def _seconds(pid: int, fields: tuple[int, ...]) -> float:
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(values[field]) for field in fields) / _TICK
    except (OSError, ValueError, IndexError):
        return 0.0
