"""Count how rollouts ended, and how long their phases took, since the server started."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from cotenant.control.events import RolloutEnded
from cotenant.control.revision import RolloutOutcome
from cotenant.measure.histogram import Histogram

KEPT = 20  # rollouts that are told of one by one


class Past(NamedTuple):
    """A rollout that ended. at: when, by the clock. late: requests that missed their target meanwhile, because of it or
    not."""

    at: float
    ended: RolloutEnded
    late: int


class RolloutStatistics:
    """outcomes: rollouts by how they ended. phases: durations of those phases that were gone through, in seconds;
    whole: of whole rollouts, those that began. late: requests that missed their target while any rollout was under way,
    each once, because of it or not, as of the last request or end of a rollout. last: the rollouts that ended last, the
    latest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.outcomes: Counter[RolloutOutcome] = Counter(dict.fromkeys(RolloutOutcome, 0))
        self.last: deque[Past] = deque(maxlen=KEPT)
        self.phases = {phase: Histogram() for phase in ("queued", "prepare", "switch", "drain", "rollback")}
        self.whole = Histogram()
        self.late = 0
        self._late_before: dict[int, int] = {}  # by revision under way
        self._late_seen = 0

    def requested(self, revision: int, late: int) -> None:
        """A revision is requested. late: requests that have missed their target so far."""
        self._count_late(late)
        self._late_before[revision] = late

    def ended(self, ended: RolloutEnded, late: int) -> Past:
        """Count a rollout that has ended, and return what is kept of it. late: requests that have missed their target
        so far."""
        self._count_late(late)
        self.outcomes[ended.outcome] += 1
        past = Past(self._clock(), ended, late - self._late_before.pop(ended.revision.number))
        self.last.appendleft(past)
        phases = ["queued"]
        match ended.outcome:
            case RolloutOutcome.COMPLETED:
                phases += ["prepare", "switch", "drain"]
            case RolloutOutcome.ROLLED_BACK:
                phases += ["prepare", "rollback"]
        for phase in phases:
            self.phases[phase].extend([getattr(ended.durations, phase)])
        if len(phases) > 1:
            self.whole.extend([ended.durations.total])
        return past

    def late_until(self, late: int) -> int:
        """Return the requests that missed their target while any rollout was under way, those of the present ones
        included. late: requests that have missed their target so far."""
        return self.late + (late - self._late_seen if self._late_before else 0)

    def _count_late(self, late: int) -> None:
        self.late, self._late_seen = self.late_until(late), late
