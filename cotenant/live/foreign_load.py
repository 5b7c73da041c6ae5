"""Measure how much of the machine's processors programs other than this server use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

PROC = Path("/proc")
TICK = os.sysconf("SC_CLK_TCK")
BUSY = (0, 1, 2, 5, 6, 7)  # of the fields of a processor in /proc/stat: user, nice, system, irq, softirq, steal
OWN = (11, 12, 13, 14)  # of those of a process: user and system time, its own and that of children that are gone


def available_cores() -> tuple[int, ...]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def busy_seconds(cores: Iterable[int], proc: Path = PROC) -> float:
    """Return the seconds for which all programs together have used these processors since the system started. Raises
    OSError, ValueError or IndexError where it does not tell. It reads a file of /proc: not for an event loop."""
    names = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in (proc / "stat").read_text().splitlines())
    return sum(float(line[1 + field]) for line in lines if line and line[0] in names for field in BUSY) / TICK


class ForeignLoad:
    """Compare processor time between two readings. It reads files of /proc: not for an event loop.

    cores: those to look at. proc: where the system tells.
    """

    def __init__(self, cores: Iterable[int], proc: Path = PROC) -> None:
        self._cores = frozenset(cores)
        self._proc = proc
        self._before: tuple[float, float, float] | None = None  # when, and seconds of all programs and of this one

    @property
    def processors(self) -> int:
        """How many it looks at."""
        return len(self._cores)

    def read(self, now: float) -> float | None:
        """Return the part of the processors that other programs used since the last reading, from 0 to 1; None for the
        first, and where the system does not tell. now: in seconds of any monotonic clock."""
        try:
            reading = now, busy_seconds(self._cores, self._proc), sum(self._own("self"))
        except (OSError, ValueError, IndexError):
            self._before = None
            return None
        before, self._before = self._before, reading
        if before is None or now <= before[0]:
            return None
        seconds, all_, own = (after - earlier for after, earlier in zip(reading, before, strict=True))
        return min(max((all_ - own) / (seconds * len(self._cores)), 0.0), 1.0)

    def _own(self, pid: str) -> Iterator[float]:
        """Yield the seconds of a process and of its descendants."""
        fields = (self._proc / pid / "stat").read_text().rpartition(")")[2].split()
        yield sum(int(fields[field]) for field in OWN) / TICK
        for children in (self._proc / pid / "task").glob("*/children"):
            try:
                names = children.read_text().split()
            except OSError:
                continue  # a thread that has just ended
            for name in names:
                try:
                    yield from self._own(name)
                except (OSError, ValueError, IndexError):
                    continue  # it has just ended; its time is its parent's now
