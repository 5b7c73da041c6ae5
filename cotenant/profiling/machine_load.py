"""Measure what other programs leave of the machine's processors, and remember it with profiles."""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Mapping

import msgspec

from cotenant.backends.cgroup import cpu_limit
from cotenant.core.profile import Profile, Profiles
from cotenant.live.foreign_load import ForeignLoad, available_cores

BUSY = 0.1  # of the processors that other programs use, above which a machine is not quiet
FOREIGN = "foreign_pct"  # the feature of a point: percent of the processors that other programs used meanwhile
NOTABLE = 0.05  # part by which batches take longer from which on it is planned for
WATCHED = 0.4  # seconds for which the load is measured, and then, on a busy machine, what it costs
BLOCK = bytes(1 << 20)  # of which a thread makes digests, without the interpreter's lock


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Describe what other programs take. used: processors; processors: that there are. slowdown: of batches on all of
    them, by who else wants them; at least 1."""

    used: float
    processors: int
    slowdown: float = 1.0

    @property
    def busy(self) -> bool:
        return self.used > BUSY * self.processors

    def __str__(self) -> str:
        return f"other programs use {self.used:.1f} of {self.processors} processors"


def measure_load(seconds: float = WATCHED) -> MachineLoad | None:
    """Measure the load of the machine, which takes `seconds`, and on a busy one as long again; None where the system
    does not tell. For a moment at which this program does nothing else; not for an event loop."""
    cores = available_cores()
    meter = ForeignLoad(cores)
    meter.read(time.monotonic())
    time.sleep(seconds)
    part = meter.read(time.monotonic())
    if part is None:
        return None
    load = MachineLoad(used=part * len(cores), processors=len(cores))
    return msgspec.structs.replace(load, slowdown=_slowdown(len(cores), seconds)) if load.busy else load


def _slowdown(cores: int, seconds: float) -> float:
    """Return how much less a program that wants all processors gets of them than on a quiet machine."""
    got = [0.0] * cores

    def work(number: int) -> None:
        begun, used = time.monotonic(), time.thread_time()
        while time.monotonic() < begun + seconds:
            hashlib.blake2b(BLOCK)
        got[number] = (time.thread_time() - used) / (time.monotonic() - begun)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(1.0, min(cores, cpu_limit()) / max(sum(got), 0.01))


def foreign_load(profile: Profile) -> float:
    """Return the part of the processors that other programs used while a profile was measured; 0 where it does not
    tell."""
    parts = [point.features[FOREIGN] / 100 for point in profile.points if FOREIGN in point.features]
    return statistics.fmean(parts) if parts else 0.0


def is_busy(profile: Profile) -> bool:
    """Return whether a profile was measured on a busy machine."""
    return foreign_load(profile) > BUSY


def slowdowns_under(load: MachineLoad | None, profiles: Profiles) -> dict[str, float]:
    """Return how many times as long as profiled batches take now, by model; none where they take no longer. What slowed
    the measurements counts once."""
    if load is None:
        return {}
    slowdowns: dict[str, float] = {}
    for (model, _), profile in profiles.items():
        slowdown = load.slowdown / (1.0 + foreign_load(profile))
        if slowdown > 1.0 + NOTABLE:
            slowdowns[model] = max(slowdown, slowdowns.get(model, 1.0))
    return slowdowns


def describe_load(load: MachineLoad, slowdowns: Mapping[str, float]) -> str:
    """Return what other programs take and what it costs, in words."""
    if slowdowns:
        return f"{load}; batches take {max(slowdowns.values()):.1f} x as profiled"
    return str(load) if load.slowdown <= 1.0 + NOTABLE else f"{load}, as when the models were profiled"
