"""What breaks during a simulated run, and when it is back."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from cotenant.errors import ConfigError
from cotenant.runtime.events import Died, Event, LaneSpec, Ready


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What fails at once at `time`; `back` seconds later its workers are up again, or never.

    parts: a worker by its lane (``v1000/1``), a device by its name (``v1000``), a node by the names of its devices.
    """

    parts: tuple[str, ...]
    time: float
    back: float = math.inf


def failing(failures: Iterable[Failure], lanes: Iterable[LaneSpec]) -> list[tuple[float, Event]]:
    """The deaths and returns of workers that failures amount to, in the order of time.

    Raises ConfigError for parts that no lane is on.
    """
    names = [lane.id for lane in lanes]
    events: list[tuple[float, Event]] = []
    for failure in failures:
        for part in failure.parts:
            hit = [name for name in names if name == part or name.rpartition("/")[0] == part]
            if not hit:
                raise ConfigError(f"a failure of {part!r}: no partition is there; the plan has {', '.join(names)}")
            events += [(failure.time, Died(name, f"{part} failed")) for name in hit]
            if failure.back < math.inf:
                events += [(failure.time + failure.back, Ready(name)) for name in hit]
    return sorted(events, key=lambda event: event[0])
