"""What batches were seen to take beside neighbours, as samples that predictors learn from.

A neighbour that has little to do slows little, and says nothing about what it costs when it is busy, which is what
plans reckon with. So a batch counts only where each of the device's other lanes was either at work all the while or
idle, but for a tenth, and at least one was at work.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from cotenant.core.identity import LaneId
from cotenant.live.statistics import DurationSum
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample

SLACK = 0.1  # of a batch's time
FEWEST = 10  # batches of a sample
LOOKED_AT = 64  # batches of a neighbour that may have run beside one
MOST = 4096  # kinds of run that are remembered


class InterferenceObserver:
    """Batches as they end, in order of time."""

    def __init__(self) -> None:
        self._ended: defaultdict[LaneId, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=LOOKED_AT))
        self._last: dict[LaneId, Load] = {}  # what each lane ran last
        self._alone: defaultdict[tuple[Load, ...], DurationSum] = defaultdict(DurationSum)  # by victim and neighbours
        self._together: defaultdict[tuple[Load, ...], DurationSum] = defaultdict(DurationSum)

    def ran(
        self, lane: LaneId, load: Load, *, since: float, now: float, alone: float, others: Mapping[LaneId, float | None]
    ) -> None:
        """A lane's batch is done. alone: seconds that it was profiled to take without neighbours.

        others: the other lanes of its device, with since when they are at work on a batch, None for idle ones.
        """
        self._ended[lane].append((since, now))
        self._last[lane] = load
        beside = []
        for other, begun in others.items():
            busy = (now - max(since, begun) if begun is not None else 0.0) + self._worked(other, since)
            if busy >= (1 - SLACK) * (now - since) and other in self._last:
                beside.append(self._last[other])
            elif busy > SLACK * (now - since):
                return
        if beside:
            run = (load, *sorted(beside, key=lambda it: (it.model, it.batch, it.share)))
            if len(self._together) >= MOST and run not in self._together:
                self._forget()
            self._alone[run].add(alone)
            self._together[run].add(now - since)

    def _forget(self) -> None:
        """The half that was seen least often: neighbours in many sizes come together in very many ways."""
        seldom = sorted(self._together, key=lambda run: self._together[run].count)[: MOST // 2]
        for run in seldom:
            del self._together[run], self._alone[run]

    def _worked(self, lane: LaneId, since: float) -> float:
        """Seconds since then, in batches that are done."""
        total = 0.0
        for began, ended in reversed(self._ended[lane]):
            if ended <= since:
                break
            total += ended - max(began, since)
        return total

    def samples(self) -> list[Sample]:
        """Means of what was seen often enough."""
        return [
            Sample(victim, tuple(colocated), self._alone[run].seconds / it.count, it.seconds / it.count)
            for run, it in self._together.items()
            if it.count >= FEWEST
            for victim, *colocated in [run]
        ]
