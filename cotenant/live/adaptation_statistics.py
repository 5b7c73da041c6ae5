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
    deciding: from the event that made the controller plan anew to its answer to the plan; solving with what it took to
    handle both.
    rollouts: whole rollouts that the controller asked for, from its request to their end. late: requests that missed
    their target while such a rollout was under way, because of it or not."""

    def __init__(self) -> None:
        self.replans: Counter[tuple[Cause, str]] = Counter(
            {(cause, str(step)): 0 for cause in Cause for step in SolveStep}
        )
        self.handling = Histogram()
        self.solving = Histogram()
        self.deciding = Histogram()
        self.rollouts = Histogram()
        self.late = 0
        self._solves: dict[int, tuple[Cause, float]] = {}  # what is being solved: why, and what it took to ask for it

    def decided(self, event: ControllerEvent, commands: Sequence[ControllerCommand], seconds: float) -> None:
        """Count an event that the controller has handled in so many seconds."""
        self.handling.extend([seconds])
        if isinstance(event, Solved) and (solve := self._solves.pop(event.number, None)) is not None:
            cause, asking = solve
            self.solving.extend([event.seconds])
            self.deciding.extend([asking + event.seconds + seconds])
            self.replans[cause, "failed" if event.plan is None else str(event.step)] += 1
        for command in commands:
            if isinstance(command, Solve):
                self._solves[command.number] = command.cause, seconds

    def rolled(self, past: Past) -> None:
        """Count a rollout that the controller asked for, and that has ended."""
        self.rollouts.extend([past.ended.durations.total])
        self.late += past.late
