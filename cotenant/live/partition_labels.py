"""Label partitions for metrics and charts by names that outlive their lanes.

A lane's name is never used again, so that one that drains and one that takes its place can be told apart. A series by
lane would end with every change of plan; a partition's number on its device does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from cotenant.core.identity import DeviceId, LaneId
from cotenant.live.serving_state import ServingState
from cotenant.runtime.lane_assignment import LaneAssignment


class PartitionLabel(NamedTuple):
    """Label one worker of a partition: its device, and its number there, such as ``1``, or ``1.2`` for the second
    worker of partition 1."""

    device: str
    partition: str


RETIRED = PartitionLabel("", "")  # of all lanes that are in no plan any more, and drain


class PartitionLabels:
    """Number the partitions in force, from 0 on each device: one that keeps its lanes over a change of plan keeps its
    number, and a new one gets the lowest that is free."""

    def __init__(self, state: ServingState) -> None:
        self._state = state
        self._lanes: Mapping[LaneId, LaneAssignment] | None = None  # those that the labels are of
        self._numbers: dict[tuple[DeviceId, int], int] = {}  # by slot
        self._labels: dict[LaneId, PartitionLabel] = {}

    def of(self, lane: LaneId) -> PartitionLabel:
        """Return the label of a lane; RETIRED for one that is not in force."""
        if self._state.lanes is not self._lanes:
            self._assign(self._state.lanes)
        return self._labels.get(lane, RETIRED)

    def _assign(self, lanes: Mapping[LaneId, LaneAssignment]) -> None:
        slots = sorted({(lane.device, lane.slot) for lane in lanes})
        numbers = {slot: self._numbers[slot] for slot in slots if slot in self._numbers}
        taken: defaultdict[DeviceId, set[int]] = defaultdict(set)
        for (device, _), number in numbers.items():
            taken[device].add(number)
        for slot in slots:
            if slot not in numbers:
                used = taken[slot[0]]
                numbers[slot] = next(number for number in range(len(slots)) if number not in used)
                used.add(numbers[slot])
        self._lanes, self._numbers = lanes, numbers
        self._labels = {lane: _label(lane, numbers[lane.device, lane.slot]) for lane in lanes}


def _label(lane: LaneId, number: int) -> PartitionLabel:
    return PartitionLabel(str(lane.device), f"{number}.{lane.worker + 1}" if lane.worker else str(number))
