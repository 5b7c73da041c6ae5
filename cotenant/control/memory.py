"""Enforce the one memory rule of rollouts: the workers that a device holds at once must fit its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cotenant.control.revision import PlannedLane
from cotenant.core.identity import DeviceId
from cotenant.core.units import show_memory


def shortages(lanes: Iterable[PlannedLane], capacity: Mapping[DeviceId, int]) -> dict[DeviceId, str]:
    """Return by device, in words, how far the workers of these lanes exceed its memory. Unknown amounts count as 0: a
    device is short of memory only where that is certain."""
    needs: Counter[DeviceId] = Counter()
    for lane in lanes:
        needs[lane.device] += lane.memory or 0
    return {
        device: f"{device} has {show_memory(capacity[device])} of memory, and its workers need {show_memory(need)}"
        for device, need in needs.items()
        if device in capacity and need > capacity[device]
    }
