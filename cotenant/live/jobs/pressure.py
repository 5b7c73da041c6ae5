"""See at once that serving needs its devices: a rate steps up, a queue grows, attainment is in danger.

It compares counts that the server keeps anyway, some 20 times a second and only while a job runs, so requests pay
nothing for it. Values in, words out: no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

STEP = 2.0  # times the usual rate: what is looked for
ALARM = 5.0  # log likelihood ratio: some 1 % of the time false, and half of the doubled rates seen in 0.2 s at 80/s
MEMORY = 10.0  # seconds of the average that is the usual rate
FIRST = 2.0  # seconds until the usual rate is known
LEAST = 5.0  # requests/s: a usual rate below counts as this, so that a few requests after a pause are no step
SETTLED = 2.0  # seconds without trouble after a step, from which on the new rate is the usual one
STILL = 1.4  # times the usual rate, above which a rate that has stepped up still is
RECENT = 0.5  # seconds of the average that is the rate now
BATCHES = 3.0  # full batches that wait, from which on a queue grows
ROWS = 4  # that wait at least
WINDOW = 5.0  # seconds for which requests that missed their target count
MISSES = 2  # of them at least


class ServingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has counted so far.

    arrived: requests. ended: requests that have ended, and missed: those of them that did not within their target.
    allowed: the fraction that may. waiting: rows that wait now, and full batches that they make, by model. changing: a
    rollout is in progress.
    """

    arrived: int
    ended: int
    missed: int
    allowed: float = 0.01
    waiting: Mapping[str, tuple[int, float]] = {}
    changing: bool = False


class Pressure(msgspec.Struct, frozen=True):
    """Say why serving needs devices, in words. model: those that have this one; "": all."""

    reason: str
    model: str = ""


_CHANGING = Pressure("a rollout is in progress")


class PressureWatch:
    """Observe counts; say why serving needs devices, None where it does not."""

    def __init__(self) -> None:
        self._last: tuple[float, ServingCounts] | None = None
        self._since = 0.0
        self._usual = 0.0  # requests/s
        self._recent = 0.0
        self._ratio = 0.0  # log likelihood ratio of a doubled rate to the usual one (Page's test)
        self._stepped_at: float | None = None
        self._trouble_at = -math.inf  # when a queue grew, or requests missed their target
        self._counts: deque[tuple[float, int, int]] = deque()  # when, ended, missed

    def observe(self, counts: ServingCounts, now: float) -> Pressure | None:
        """now: seconds of any monotonic clock."""
        if self._last is None:
            self._last, self._since = (now, counts), now
            self._counts.append((now, counts.ended, counts.missed))
            return _CHANGING if counts.changing else None
        before, self._last = self._last, (now, counts)
        self._count_rate(counts.arrived - before[1].arrived, now - before[0], now)
        trouble = self._queues(counts) or self._attainment(counts, now)
        if trouble is not None:
            self._trouble_at = now
        self._settle(now)
        if counts.changing:
            return _CHANGING
        if trouble is None and self._stepped_at is not None:
            return Pressure(f"requests come at {self._recent:.3g}/s, and came at {self._usual:.3g}/s")
        return trouble

    def _count_rate(self, arrived: int, seconds: float, now: float) -> None:
        """Test for a rate that has doubled: Poisson counts gather evidence as fast as any test can (Page 1954)."""
        if seconds <= 0:
            return
        known = now - self._since
        rate = arrived / seconds
        self._recent += (1 - math.exp(-seconds / RECENT)) * (rate - self._recent)
        if known < FIRST:
            self._usual += seconds / known * (rate - self._usual)
            return
        usual = max(self._usual, LEAST)
        step = arrived * math.log(STEP) - usual * (STEP - 1) * seconds
        self._ratio = max(0.0, self._ratio + step)
        if self._ratio >= ALARM:
            self._ratio = 0.0
            if self._stepped_at is None:
                self._stepped_at = now
                self._recent = max(self._recent, STEP * usual)
        self._usual += (1 - math.exp(-seconds / MEMORY)) * (rate - self._usual)

    def _settle(self, now: float) -> None:
        """End a step where the rate is back, or where serving has done well at the new one for a while."""
        if self._stepped_at is None:
            return
        if self._recent <= STILL * max(self._usual, LEAST):
            self._stepped_at = None
        elif now - max(self._stepped_at, self._trouble_at) >= SETTLED:
            self._usual, self._stepped_at, self._ratio = self._recent, None, 0.0

    def _queues(self, counts: ServingCounts) -> Pressure | None:
        for model, (rows, batches) in counts.waiting.items():
            if rows >= ROWS and batches >= BATCHES:
                return Pressure(f"{rows} requests wait for {model}", model)
        return None

    def _attainment(self, counts: ServingCounts, now: float) -> Pressure | None:
        self._counts.append((now, counts.ended, counts.missed))
        while self._counts[0][0] < now - WINDOW:
            self._counts.popleft()
        _, ended, missed = self._counts[0]
        late, of = counts.missed - missed, counts.ended - ended
        if late >= MISSES and late > counts.allowed * of:
            return Pressure(f"{late} of {of} requests missed their target in the last {WINDOW:g} s")
        return None
