"""Learn how long it takes from the decision to plan again until the plan is in force, launches of devices included."""

from __future__ import annotations

from collections import Counter, deque

REMEMBERED = 4  # latest plans, and launches, of which the longest counts


class LeadTime:
    """Measure by what a controller asked for and when it came. Times are seconds of any monotonic clock.

    plan, launch: seconds that either is expected to take, until one was seen.
    """

    def __init__(self, plan: float = 0.0, launch: float = 0.0) -> None:
        self._expected = plan, launch
        self._plans: deque[float] = deque(maxlen=REMEMBERED)
        self._launches: deque[float] = deque(maxlen=REMEMBERED)
        self._acquired: deque[tuple[float, str]] = deque()  # launches under way: since when, of which kind

    @property
    def plan(self) -> float:
        """Seconds until a plan is in force that needs no further devices."""
        return max(self._plans, default=self._expected[0])

    @property
    def launch(self) -> float:
        """Seconds until further devices can be used."""
        return max(self._launches, default=self._expected[1])

    @property
    def total(self) -> float:
        """Seconds until a plan is in force that needs further devices, where any can be had."""
        return self.plan + self.launch

    def in_force(self, asked: float, now: float) -> None:
        """A plan that was asked for at `asked` is in force."""
        self._plans.append(now - asked)

    def acquired(self, kind: str, count: int, now: float) -> None:
        """Devices have been asked for."""
        self._acquired.extend([(now, kind)] * count)

    def acquired_before(self, time: float) -> dict[str, int]:
        """Return by kind how many devices were asked for before that time, and have neither come nor failed."""
        return dict(Counter(kind for since, kind in self._acquired if since < time))

    def found(self, kind: str, now: float) -> None:
        """A device has come."""
        since = self._ended(kind)
        if since is not None:
            self._launches.append(now - since)

    def failed(self, kind: str, count: int) -> None:
        """Devices that were asked for do not come."""
        for _ in range(count):
            self._ended(kind)

    def _ended(self, kind: str) -> float | None:
        for each in self._acquired:
            if each[1] == kind:
                self._acquired.remove(each)
                return each[0]
        return None
