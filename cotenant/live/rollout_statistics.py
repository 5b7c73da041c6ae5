"""Count how rollouts ended, and how long their phases took, since the server started."""

from __future__ import annotations

from collections import Counter, deque

from cotenant.control.events import RolloutEnded
from cotenant.control.revision import RolloutOutcome
from cotenant.measure.histogram import Histogram

KEPT = 5  # rollouts that are told of one by one


class RolloutStatistics:
    """outcomes: rollouts by how they ended. phases: durations of those phases that were gone through, in seconds. last:
    the rollouts that ended last, the latest first."""

    def __init__(self) -> None:
        self.outcomes: Counter[RolloutOutcome] = Counter(dict.fromkeys(RolloutOutcome, 0))
        self.last: deque[RolloutEnded] = deque(maxlen=KEPT)
        self.phases = {phase: Histogram() for phase in ("queued", "prepare", "switch", "drain", "rollback")}

    def ended(self, ended: RolloutEnded) -> None:
        self.outcomes[ended.outcome] += 1
        self.last.appendleft(ended)
        phases = ["queued"]
        match ended.outcome:
            case RolloutOutcome.COMPLETED:
                phases += ["prepare", "switch", "drain"]
            case RolloutOutcome.ROLLED_BACK:
                phases += ["prepare", "rollback"]
        for phase in phases:
            self.phases[phase].extend([getattr(ended.durations, phase)])
