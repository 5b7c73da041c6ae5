"""Learn how long to keep devices that are not needed at the moment.

Under arrivals in bursts, devices that were released are wanted again soon, and are launched too late. Nothing known of
the rates tells beforehand. So each release that turns out to have been too early lengthens the cool-down, and each that
does not shortens it.
"""

from __future__ import annotations

GROWTH = 4.0  # factor after a release that was too early
SHRINKAGE = 2.0  # divisor after one that was not
TOO_EARLY = 4.0  # cool-downs within which devices must not be wanted again after a release


class Cooldown:
    """Hold a cool-down, and adapt it.

    least, most: seconds. Times are of any monotonic clock.
    """

    def __init__(self, least: float, most: float) -> None:
        self.seconds = least
        self._least = least
        self._most = max(least, most)
        self._released: float | None = None  # when devices were released last; None where that is judged

    def released(self, now: float) -> None:
        """Devices were released. The release before stood the test if it has not been judged."""
        if self._released is not None and now - self._released > TOO_EARLY * self.seconds:
            self.seconds = max(self._least, self.seconds / SHRINKAGE)
        self._released = now

    def wanted(self, now: float) -> None:
        """Further devices are wanted."""
        if self._released is not None and now - self._released <= TOO_EARLY * self.seconds:
            self.seconds = min(self._most, self.seconds * GROWTH)
            self._released = None
