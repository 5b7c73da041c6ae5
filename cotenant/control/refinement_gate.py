"""Decide when profiles are refined while a server serves: only while nobody else needs the machine.

The worker that measures takes processor time that nobody wants, but it shares caches and memory bandwidth with those
that serve, and what it measures beside other load is worth little. So it starts after a while without any, and stops
as soon as there is some.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.core.units import show_seconds


class MachineUse(NamedTuple):
    """Say what else runs. foreign: part of the processors that other programs use, from 0 to 1; None where that is not
    known. own: batches under way on average, or the part of a processor that the event loop uses, whichever is more.
    changing: whether a rollout, a load or an unload is in progress. jobs: whether a best-effort job runs, which a
    measurement would slow as it would the measurement."""

    foreign: float | None
    own: float
    changing: bool
    jobs: bool = False


class RefinementGate:
    """Observe what else runs, and say whether a measurement may.

    foreign, own: use of the machine above which it is not quiet. seconds: for which it has to be quiet first. reason:
    why nothing may be measured, in words; empty where it may.
    """

    def __init__(self, *, foreign: float, own: float, seconds: float) -> None:
        self.reason = ""
        self._foreign = foreign
        self._own = own
        self._seconds = seconds
        self._quiet_since: float | None = None

    def observe(self, use: MachineUse, now: float) -> bool:
        """Return whether a measurement may begin, or go on. now: seconds of any monotonic clock."""
        self.reason = self._busy(use)
        if self.reason:
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < self._seconds:
            self.reason = f"the machine has been quiet for less than {show_seconds(self._seconds)}"
        return not self.reason

    def _busy(self, use: MachineUse) -> str:
        """Return what keeps the machine from being quiet; empty where nothing does."""
        if use.changing:
            return "the plan is changing"
        if use.jobs:
            return "a best-effort job runs"
        if use.own > self._own:
            return "requests are served"
        if use.foreign is None:
            return "what other programs use is not known"
        return "other programs use the processors" if use.foreign > self._foreign else ""
