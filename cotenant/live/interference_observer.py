"""Collect batch latencies observed under co-location, as training samples for interference predictors.

A co-located model that is mostly idle interferes little, and says nothing about its interference when busy, which is
what plans assume. So a batch counts only where each of the device's other lanes was either busy or idle for all of its
time, up to TOLERANCE of it, and at least one was busy.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping

from cotenant.core.identity import LaneId
from cotenant.live.statistics import DurationSum
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample, is_plausible

TOLERANCE = 0.1  # fraction of a batch's time, in which another lane may have been both busy and idle
MIN_BATCHES = 10  # of a sample
RECENT_BATCHES = 64  # of a co-located lane, which may have run during one batch
MAX_COMBINATIONS = 4096  # of co-located loads that are remembered


class InterferenceObserver:
    """Take note of batches as they end, in order of time."""

    def __init__(self) -> None:
        self._ended: defaultdict[LaneId, deque[tuple[float, float, bool]]] = defaultdict(
            lambda: deque(maxlen=RECENT_BATCHES)
        )
        self._last: dict[LaneId, Load] = {}  # of each lane's last batch
        # By the victim's load and the co-located ones: profiled and observed latencies.
        self._alone: defaultdict[tuple[Load, ...], DurationSum] = defaultdict(DurationSum)
        self._together: defaultdict[tuple[Load, ...], DurationSum] = defaultdict(DurationSum)

    def ran(
        self,
        lane: LaneId,
        load: Load,
        *,
        since: float,
        now: float,
        alone: float,
        others: Mapping[LaneId, float | None],
        unlike_planned: bool = False,
    ) -> None:
        """Take note of a batch that has ended. since, now: when it began and ended. alone: its profiled latency, in
        seconds.

        others: the other lanes of its device, with the time since when each is running a batch, None for an idle one.
        unlike_planned: it ran on more than its share, or while its worker warmed up. Such a batch says nothing about
        shares, nor do batches beside it.
        """
        self._ended[lane].append((since, now, unlike_planned))
        self._last[lane] = load
        if unlike_planned or any(self._was_unlike_planned(other, since) for other in others):
            return
        colocated = []
        for other, begun in others.items():
            busy = (now - max(since, begun) if begun is not None else 0.0) + self._busy_seconds(other, since)
            if busy >= (1 - TOLERANCE) * (now - since) and other in self._last:
                colocated.append(self._last[other])
            elif busy > TOLERANCE * (now - since):
                return
        if colocated:
            run = (load, *sorted(colocated, key=lambda other: (other.model, other.batch, other.share)))
            if len(self._together) >= MAX_COMBINATIONS and run not in self._together:
                self._forget()
            self._alone[run].add(alone)
            self._together[run].add(now - since)

    def forget_lanes(self, kept: Collection[LaneId]) -> None:
        """Forget the batches of all lanes but these; what they have told of loads stays."""
        for lane in self._ended.keys() - kept:
            del self._ended[lane]
        self._last = {lane: load for lane, load in self._last.items() if lane in kept}

    def _forget(self) -> None:
        """Forget the half that was seen least often: batches of many sizes combine in very many ways."""
        rarest = sorted(self._together, key=lambda run: self._together[run].count)[: MAX_COMBINATIONS // 2]
        for run in rarest:
            del self._together[run], self._alone[run]

    def _was_unlike_planned(self, lane: LaneId, since: float) -> bool:
        """Tell whether a batch of a lane that was unlike planned has ended since then."""
        for _, ended, unlike_planned in reversed(self._ended[lane]):
            if ended <= since:
                return False
            if unlike_planned:
                return True
        return False

    def _busy_seconds(self, lane: LaneId, since: float) -> float:
        """Return the seconds since then that a lane spent in batches that have ended."""
        total = 0.0
        for began, ended, _ in reversed(self._ended[lane]):
            if ended <= since:
                break
            total += ended - max(began, since)
        return total

    def samples(self) -> list[Sample]:
        """Return the means of the combinations that were seen often enough, and for plausible times."""
        return [
            Sample(victim, tuple(colocated), self._alone[run].seconds / seen.count, seen.seconds / seen.count)
            for run, seen in self._together.items()
            if seen.count >= MIN_BATCHES and is_plausible(self._alone[run].seconds, seen.seconds)
            for victim, *colocated in [run]
        ]
