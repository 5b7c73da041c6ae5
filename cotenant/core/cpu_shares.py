"""Say what a share of a machine's processors is: its threads, its cores, and how much of a batch it computes. Shared by
the CPU backend, the forecast and the simulator."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np

from cotenant.core.identity import LaneId
from cotenant.core.model import Kind
from cotenant.core.profile import Profile
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError


def check_lending(kinds: Iterable[Kind]) -> None:
    """Raise ConfigError where no kind of device has processors, whose idle share could be lent."""
    if not any(kind.processors for kind in kinds):
        raise ConfigError("only shares of processors are lent, and no device has any; give `processors` in [[devices]]")


def threads_of(share: int, processors: float) -> int:
    """Return how many threads run a batch on a share (‰) of so many processors."""
    return math.ceil(processors * share / WHOLE)


class CorePins:
    """Pin lanes to cores that have room for them."""

    def __init__(self) -> None:
        self.lanes: dict[LaneId, tuple[tuple[int, ...], float]] = {}  # its cores, and the fraction of each that it uses

    def pin(
        self, lane: LaneId, cores: Collection[int], threads: int, each: float, leaving: Collection[LaneId] = ()
    ) -> tuple[int, ...]:
        """Return cores for a lane of that many threads, each busy for that fraction, those with the most room; none
        where they do not fit. Cores of lanes that leave count as free."""
        used = dict.fromkeys(cores, 0.0)
        for other, (pinned, fraction) in self.lanes.items():
            for core in pinned if other not in leaving else ():
                used[core] += fraction
        roomy = [core for core in cores if used[core] + each < 1 + 1e-9]
        if len(roomy) < threads:
            return ()
        # Stacked on the first core, small lanes would wait for each other while another is idle.
        roomy.sort(key=lambda core: round(used[core], 9))
        self.lanes[lane] = (tuple(roomy[:threads]), each)
        return self.lanes[lane][0]

    def free(self, lanes: Collection[LaneId]) -> None:
        self.lanes = {lane: pinned for lane, pinned in self.lanes.items() if lane not in lanes}


def computing_parts(profile: Profile, share: int, processors: float) -> tuple[float, ...]:
    """Return which part of a batch of 1, 2, … rows on a share (‰) a worker computes, if it has its cores to itself; for
    the rest of the time it is held.

    One thread computes for as long as it uses its processor (``cpu_ms``), and a batch takes no less than on the whole
    device. Several threads, and profiles without ``cpu_ms``, compute as long as a batch takes on the largest share with
    as many threads.
    """
    threads = threads_of(share, processors)
    used = _processor_times(profile, share, processors) if threads == 1 else ()
    bound = WHOLE if used else max(share, min(math.floor(threads * WHOLE / processors), WHOLE))
    shortest = profile.curve(bound)
    used = used or (0.0,) * len(shortest)
    return tuple(
        min(max(alone, cpu) / held, 1.0) if held < math.inf else 1.0
        for held, alone, cpu in zip(profile.curve(share), shortest, used, strict=True)
    )


def _processor_times(profile: Profile, share: int, processors: float) -> tuple[float, ...]:
    """Return the processor seconds of batches of 1, 2, … rows, as measured on the nearest share with one thread; empty
    where that is not known."""
    shares = {point.share for point in profile.points if threads_of(point.share, processors) == 1}
    nearest = min(shares, key=lambda each: abs(each - share), default=0)
    known = {
        point.batch: point.features["cpu_ms"] / 1e3
        for point in profile.points
        if point.share == nearest and point.procs == 1 and "cpu_ms" in point.features
    }
    if not known:
        return ()
    batches = sorted(known)
    rows = np.arange(1, profile.max_batch + 1)
    times: list[float] = np.interp(rows, batches, [known[batch] for batch in batches]).tolist()
    return tuple(times)
