"""Measure which share of the processors serving and other programs leave idle; what jobs use counts as idle."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from cotenant.core.units import WHOLE
from cotenant.live.foreign_load import PROC, busy_seconds
from cotenant.worker.jobs.process_tree import descendants, private_memory, processor_seconds

GAIN = 1 / 3  # of the exponential average over readings
ROOM = 0.05  # of the machine's memory that stays free of jobs


class IdleMeter:
    """Compare processor time between two readings. It reads files of /proc: not for an event loop.

    cores: those to look at. capacity: processors that they may be used as, where a limit is below their number.
    """

    def __init__(self, cores: Collection[int], capacity: float, proc: Path = PROC) -> None:
        self._cores = frozenset(cores)
        self._capacity = capacity
        self._proc = proc
        self._before: tuple[float, float] | None = None  # when, and seconds of all programs
        self._jobs: dict[int, float] = {}  # seconds of jobs, by their shim
        self._idle: float | None = None

    def read(self, now: float, shims: Collection[int]) -> int | None:
        """Return the idle share in ‰, smoothed; None for the first reading, and where the system does not tell. now: in
        seconds of any monotonic clock. shims: of the jobs that run here."""
        used = {shim: processor_seconds([shim, *descendants(shim)]) for shim in shims}
        jobs = sum(max(seconds - self._jobs.get(shim, 0.0), 0.0) for shim, seconds in used.items())
        self._jobs = used
        try:
            reading = now, busy_seconds(self._cores, self._proc)
        except (OSError, ValueError, IndexError):
            self._before = None
            return None
        before, self._before = self._before, reading
        if before is None or now <= before[0]:
            return None
        others = (reading[1] - before[1] - jobs) / (now - before[0])
        idle = min(max(1 - others / self._capacity, 0.0), 1.0)
        self._idle = idle if self._idle is None else self._idle + GAIN * (idle - self._idle)
        return round(WHOLE * self._idle)

    def forget(self) -> None:
        """Begin anew, after a while in which nothing was read."""
        self._before, self._jobs, self._idle = None, {}, None


def memory_for_jobs(shims: Collection[int], proc: Path = PROC) -> int | None:
    """Return the bytes that jobs together may have: what is available, and what they have already, but for a reserve.
    None where the system does not tell. It reads files of /proc: not for an event loop."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if len(line.split()) > 1}
        available, installed = sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, ValueError, KeyError):
        return None
    theirs = private_memory(pid for shim in shims for pid in descendants(shim))
    return max(available + theirs - round(ROOM * installed), 0)


def processors(cores: Collection[int], limit: float) -> float:
    """Return the processor seconds that jobs and serving together have in a second. limit: of this process, by its
    control group."""
    return min(len(cores) or os.cpu_count() or 1, limit)
