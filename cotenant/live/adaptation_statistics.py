"""How often a server planned anew, why, and how long each step took, since it started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cotenant.control.adaptation import Cause, ControllerCommand, ControllerEvent, Solve, Solved, SolveStep
from cotenant.live.rollout_statistics import Past
from cotenant.measure.histogram import Histogram


class AdaptationStatistics:
    """replans: answers of the solver by cause and by the step that it had to go to, "failed" where there was none.
    handling: seconds of the event loop that the controller took for an event. solving: until the solver had answered.
    rollouts: whole rollouts that the controller asked for, from its request to their end. late: requests that missed
    their target while such a rollout was under way, because of it or not."""

    def __init__(self) -> None:
        self.replans: Counter[tuple[Cause, str]] = Counter(
            {(cause, str(step)): 0 for cause in Cause for step in SolveStep}
        )
        self.handling = Histogram()
        self.solving = Histogram()
        self.rollouts = Histogram()
        self.late = 0
        self._causes: dict[int, Cause] = {}  # of what is being solved

    def decided(self, event: ControllerEvent, commands: Sequence[ControllerCommand], seconds: float) -> None:
        """Count an event that the controller has handled in so many seconds."""
        self.handling.extend([seconds])
        if isinstance(event, Solved) and (cause := self._causes.pop(event.number, None)) is not None:
            self.solving.extend([event.seconds])
            self.replans[cause, "failed" if event.plan is None else str(event.step)] += 1
        for command in commands:
            if isinstance(command, Solve):
                self._causes[command.number] = command.cause

    def rolled(self, past: Past) -> None:
        """Count a rollout that the controller asked for, and that has ended."""
        self.rollouts.extend([past.ended.durations.total])
        self.late += past.late
