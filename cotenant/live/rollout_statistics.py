"""Count how rollouts ended, and how long their phases took, since the server started."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from cotenant.control.events import RolloutEnded
from cotenant.control.revision import RolloutOutcome
from cotenant.measure.histogram import Histogram

KEPT = 20  # rollouts that are told of one by one


class RolloutStatistics:
    """outcomes: rollouts by how they ended. phases: durations of those phases that were gone through, in seconds. last:
    the rollouts that ended last, the latest first, with the time of the clock when they did."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.outcomes: Counter[RolloutOutcome] = Counter(dict.fromkeys(RolloutOutcome, 0))
        self.last: deque[tuple[float, RolloutEnded]] = deque(maxlen=KEPT)
        self.phases = {phase: Histogram() for phase in ("queued", "prepare", "switch", "drain", "rollback")}

    def ended(self, ended: RolloutEnded) -> None:
        self.outcomes[ended.outcome] += 1
        self.last.appendleft((self._clock(), ended))
        phases = ["queued"]
        match ended.outcome:
            case RolloutOutcome.COMPLETED:
                phases += ["prepare", "switch", "drain"]
            case RolloutOutcome.ROLLED_BACK:
                phases += ["prepare", "rollback"]
        for phase in phases:
            self.phases[phase].extend([getattr(ended.durations, phase)])
