"""Audit workers' CPU use from outside: workers limit themselves, and may fail to."""

from __future__ import annotations

import logging
from collections import deque

from cotenant.core.identity import LaneId
from cotenant.core.units import show_share

logger = logging.getLogger(__name__)

WINDOW = 2.0  # minimum seconds over which a used share is averaged
EXCESS = 30  # ‰ above its share beyond which a worker is over its share


class ShareAudit:
    """Follow the processor time of one lane's worker.

    share: ‰ that it should keep to. budget: processor seconds per second that this allows. lent: it may use more, as
    others leave it. used_share: ‰ that it used of late, None where that is not known. over_share: it used more than its
    share, and that was not lent.
    """

    def __init__(self, lane: LaneId, share: int, budget: float, *, lent: bool = False) -> None:
        self.used_share: float | None = None
        self.over_share = False
        self._lane = lane
        self._share = share
        self._budget = budget
        self._lent = lent
        self._samples: deque[tuple[float, float]] = deque()  # time, and processor time used until then

    def sample(self, used: float, now: float) -> None:
        """Record the CPU seconds that the worker has used so far."""
        samples = self._samples
        samples.append((now, used))
        while len(samples) > 2 and now - samples[1][0] >= WINDOW:
            samples.popleft()
        since, before = samples[0]
        if now - since < WINDOW:
            return
        self.used_share = self._share * (used - before) / ((now - since) * self._budget)
        over_share = not self._lent and self.used_share > self._share + EXCESS
        if over_share and not self.over_share:
            logger.warning(
                "%s uses %s of its device, and its share is %s",
                self._lane,
                show_share(round(self.used_share)),
                show_share(self._share),
            )
        self.over_share = over_share
