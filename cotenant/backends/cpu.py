"""Share the processors of this machine: a fraction of their time, not of their caches or of memory bandwidth.

With `enforcement="throttle"` a worker limits itself (`worker.cpu_throttle`), which needs no privileges and makes
latency grow as 1/share. With `enforcement="quota"` the kernel limits it, through a control group that this user must be
able to write; a batch then either fits into what is left of a period or waits for the next.

With `lend` a share is a floor: what other lanes leave idle is used by whoever has work (`runtime.lending`). Under
`enforcement="quota"` a lane then has a weight, and no quota.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Collection, Mapping
from typing import Literal

from cotenant.backends import Launch, cgroup
from cotenant.core.cpu_shares import CorePins, threads_of
from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.units import WHOLE
from cotenant.errors import ConfigError

CUT = 50  # ‰: shares are multiples of it


class Cpu:
    """Partition one device: the cores that this process may use, to the extent of its limits.

    reserve: the fraction of their time that is kept for the server itself.
    """

    name = "cpu"
    divides = True

    def __init__(
        self, *, enforcement: Literal["throttle", "quota"] = "throttle", reserve: float = 0.0, lend: bool = False
    ) -> None:
        if not 0 <= reserve < 1:
            raise ConfigError(f"reserve: {reserve:g} is not a fraction of the cores; give 0 or more, and less than 1")
        self._enforcement = enforcement
        self._reserve = reserve
        self._lend = lend
        self._lock = threading.Lock()
        self._pins = CorePins()

    @functools.cached_property
    def cores(self) -> tuple[int, ...]:
        if hasattr(os, "sched_getaffinity"):
            return tuple(sorted(os.sched_getaffinity(0)))
        return tuple(range(os.cpu_count() or 1))

    @functools.cached_property
    def capacity(self) -> float:
        """Return the processor seconds per second of the whole device."""
        return min(len(self.cores), cgroup.cpu_limit()) * (1 - self._reserve)

    def fleet(self) -> tuple[Kind, ...]:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = int(min(installed, cgroup.memory_limit()))
        cuts = tuple(range(CUT, WHOLE + 1, CUT))
        return (
            Kind(
                name="cpu",
                memory=memory,
                cuts=cuts,
                in_place=self._same_threads(),
                batches_grow=True,
                processors=self.capacity,
            ),
        )

    def _same_threads(self) -> tuple[int, ...]:
        """The largest shares that have one thread, two threads, …: a session keeps the threads that it was made
        with."""
        shares = range(1, WHOLE + 1)
        return tuple(share for share in shares if share == WHOLE or self._threads(share) < self._threads(share + 1))

    def _threads(self, share: int) -> int:
        return threads_of(share, self.capacity)

    def capacity_fingerprint(self) -> str:
        return f"{self.capacity:.3f} processor seconds per second on {len(self.cores)} cores"

    def isolation(self) -> str:
        lent = "; idle share is lent" if self._lend else ""
        if self._enforcement == "quota":
            by = "CPU weights" if self._lend else "quotas in periods of 10 ms"
            return f"CPU limits: cgroup {by}, enforced by the kernel{lent}"
        return f"CPU limits: self-throttling workers, verified by the server{lent}"

    def hardware_ids(self) -> tuple[str, ...]:
        return ()

    def with_ceilings(self) -> Cpu:
        return self.beside() if self._lend else self

    def beside(self) -> Cpu:
        """Return the same device with partitions of its own, whose shares are ceilings: what is opened there counts for
        nothing here."""
        beside = Cpu(enforcement=self._enforcement, reserve=self._reserve)
        beside.cores, beside.capacity = self.cores, self.capacity
        return beside

    def open(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        """Open the largest partitions first: each is pinned to the cores that have the most room for it, and one that
        finds none floats over all of them."""
        with self._lock:
            return self._launch(lane, share, leaving)

    def resize(self, shares: Mapping[LaneId, int]) -> dict[LaneId, Launch]:
        with self._lock:
            self._pins.free(shares)
            ordered = sorted(shares.items(), key=lambda item: -item[1])
            return {lane: self._launch(lane, share) for lane, share in ordered}

    def _launch(self, lane: LaneId, share: int, leaving: Collection[LaneId] = ()) -> Launch:
        budget = self.capacity * share / WHOLE
        threads = self._threads(share)
        pinned = self._pins.pin(lane, self.cores, threads, budget / threads, leaving)
        if self._enforcement == "quota":
            self._quotas.make(lane, budget, weight=share if self._lend else None)
        return Launch(
            cores=pinned or self.cores,
            threads=threads,
            cpu_limit=budget if self._enforcement == "throttle" or self._lend else None,
            lend=self._lend,
            lent_by_kernel=self._lend and self._enforcement == "quota",
            budget=budget,
        )

    def on_worker_started(self, lane: LaneId, pid: int) -> None:
        if self._enforcement == "quota":
            self._quotas.put(lane, pid)

    def close(self, lane: LaneId) -> None:
        with self._lock:
            self._pins.free([lane])
        if self._enforcement == "quota":
            self._quotas.remove(lane)

    def open_job(self, device: DeviceId) -> Launch:
        """Let a job run on all cores, where and when nobody else wants one: its shim puts it into the background."""
        return Launch(cores=self.cores, threads=len(self.cores))

    def lost(self) -> dict[DeviceId, str]:
        return {}

    def stop(self) -> None:
        pass

    @functools.cached_property
    def _quotas(self) -> cgroup.Quotas:
        group = cgroup.own_cgroup("cpu")
        if group is None:
            raise ConfigError(
                'enforcement = "quota" needs control groups, which this system lacks; use enforcement = "throttle"'
            )
        quotas = cgroup.Quotas(group)
        quotas.prepare()
        return quotas
