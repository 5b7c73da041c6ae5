"""Choose which lanes have a standby worker: one that has loaded the models already, and takes over when theirs dies.

A standby takes memory, and memory that a rollout may need: it gets what the workers leave, and gives it up first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from cotenant.control.memory import shortages
from cotenant.control.revision import PlannedLane
from cotenant.core.identity import DeviceId, LaneId


def choose_standbys(
    lanes: Iterable[PlannedLane],
    capacity: Mapping[DeviceId, int],
    each: int,
    cost: Callable[[PlannedLane], float],
) -> frozenset[LaneId]:
    """Return the lanes that are to have a standby worker: on each device those `each` whose death costs most, as long
    as their memory fits beside all workers.

    capacity: bytes of memory of each device. A device whose memory is not known has none: it may be that of a MIG
    instance, or its lanes share a process, which dies with all of them. cost: of a death, such as requests that arrive
    until a new worker has started.
    """
    lanes = list(lanes)
    chosen: list[PlannedLane] = []
    for device in {lane.device for lane in lanes} & capacity.keys():
        candidates = sorted((lane for lane in lanes if lane.device == device), key=lambda lane: (-cost(lane), lane.id))
        held = [lane for lane in lanes if lane.device == device]
        fitting = (lane for lane in candidates if not shortages([*held, *_of(device, chosen), lane], capacity))
        chosen += islice(fitting, each)
    return frozenset(lane.id for lane in chosen)


def fitting_standbys(
    standbys: Iterable[LaneId], lanes: Iterable[PlannedLane], capacity: Mapping[DeviceId, int]
) -> frozenset[LaneId]:
    """Return the lanes whose standby workers may stay while all these lanes have workers: none of a device that is too
    small for them."""
    held = {lane.id: lane for lane in lanes}
    there = [held[lane] for lane in standbys if lane in held]
    short = shortages([*held.values(), *there], capacity)
    return frozenset(lane.id for lane in there if lane.device in capacity and lane.device not in short)


def _of(device: DeviceId, lanes: Iterable[PlannedLane]) -> list[PlannedLane]:
    return [lane for lane in lanes if lane.device == device]
