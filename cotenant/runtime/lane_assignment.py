"""Match running lanes to the partitions of the next plan; shared by the simulator and the live server.

A partition that both plans have keeps its lanes, and with them its workers; any other gets lanes with new names, so
that old and new lanes can coexist while the new workers start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.runtime.events import LaneSpec
from cotenant.runtime.lane_specs import workers_per_partition


class LaneAssignment(msgspec.Struct, frozen=True):
    """Assign a lane to one worker of a partition. `device` and `partition` are as in the last plan that wanted them."""

    spec: LaneSpec
    device: Device
    partition: Partition
    worker: int = 0

    @property
    def placements(self) -> list[Placement]:
        """Return the placements that the worker holds."""
        return [placement for placement in self.partition.placements if placement.procs > self.worker]


class LaneMatcher:
    """Match lanes from plan to plan. lanes: those in force, by name. Set it once all workers that `match` wants are
    ready."""

    def __init__(self) -> None:
        self.lanes: dict[LaneId, LaneAssignment] = {}
        self._slots: defaultdict[DeviceId, int] = defaultdict(int)  # by device: no lane gets the name of an earlier one

    def match(
        self, plan: Plan, specs: Iterable[LaneSpec], unchanged: Callable[[str], bool] = lambda model: True
    ) -> dict[LaneId, LaneAssignment]:
        """Return the lanes of a plan by name: the lane that serves the same partition already, or a new one.

        specs: the plan's lanes. unchanged: whether workers hold the present version of a model.
        """
        wanted: dict[LaneId, LaneAssignment] = {}
        given = iter(specs)
        for device in plan.devices:
            for partition in device.partitions:
                kept = all(unchanged(placement.model) for placement in partition.placements)
                first = next(
                    (n for n in self.lanes if kept and n not in wanted and self._holds(n, device, partition)), None
                )
                if first is None:
                    first = LaneId(device.id, self._slots[device.id])
                    self._slots[device.id] += 1
                for worker in range(workers_per_partition(partition)):
                    own = LaneId(device.id, first.slot, worker)
                    wanted[own] = LaneAssignment(
                        msgspec.structs.replace(next(given), id=own), device, partition, worker
                    )
        return wanted

    def _holds(self, name: LaneId, device: Device, partition: Partition) -> bool:
        """Return whether a lane is the first worker of a partition whose workers can serve this one as they are."""
        lane = self.lanes[name]
        return (
            lane.worker == 0
            and lane.device.id == device.id
            and lane.partition.share == partition.share
            and len(lane.partition.placements) == len(partition.placements)
            and all(
                any(
                    old.model == new.model and old.batch >= new.batch and old.procs == new.procs
                    for old in lane.partition.placements
                )
                for new in partition.placements
            )
        )
