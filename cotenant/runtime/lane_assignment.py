"""Match running lanes to the partitions of the next plan; shared by the simulator and the live server.

A partition that both plans have keeps its lanes, and with them its workers; so does one whose share or batches change
where the kind of device lets workers follow. Any other gets lanes with new names, so that old and new lanes can coexist
while the new workers start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
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
        self,
        plan: Plan,
        specs: Iterable[LaneSpec],
        unchanged: Callable[[str], bool] = lambda model: True,
        kinds: Mapping[str, Kind] = MappingProxyType({}),
    ) -> dict[LaneId, LaneAssignment]:
        """Return the lanes of a plan by name: the lane that serves the same partition already, or a new one.

        specs: the plan's lanes. unchanged: whether workers hold the present version of a model. kinds: by name; on a
        kind that is absent every share needs a worker of its own.
        """
        places = [(device, partition) for device in plan.devices for partition in device.partitions]
        kept = {
            place
            for place, (_, partition) in enumerate(places)
            if all(unchanged(placement.model) for placement in partition.placements)
        }
        firsts: dict[int, LaneId] = {}  # by place
        for able in ({}, kinds):  # a lane that fits as it is goes first: nobody changes who need not
            for place in sorted(kept - firsts.keys()):
                device, partition = places[place]
                share = partition.share
                free = self.lanes.keys() - firsts.values()
                fitting = [
                    name
                    for name, lane in self.lanes.items()
                    if name in free and _holds(lane, device, partition, able.get(device.kind))
                ]
                if fitting:
                    firsts[place] = min(fitting, key=lambda name: abs(self.lanes[name].partition.share - share))
        return self._named(places, firsts, specs)

    def _named(
        self, places: Sequence[tuple[Device, Partition]], firsts: dict[int, LaneId], specs: Iterable[LaneSpec]
    ) -> dict[LaneId, LaneAssignment]:
        wanted: dict[LaneId, LaneAssignment] = {}
        given = iter(specs)
        for place, (device, partition) in enumerate(places):
            first = firsts.get(place)
            if first is None:
                first = LaneId(device.id, self._slots[device.id])
                self._slots[device.id] += 1
            for worker in range(workers_per_partition(partition)):
                own = LaneId(device.id, first.slot, worker)
                wanted[own] = LaneAssignment(msgspec.structs.replace(next(given), id=own), device, partition, worker)
        return wanted


def _holds(lane: LaneAssignment, device: Device, partition: Partition, kind: Kind | None) -> bool:
    """Return whether a lane is the first worker of a partition whose workers can serve this one: as they are or, with a
    kind, as it lets them change."""
    workers = workers_per_partition(partition)
    own, share = lane.partition.share, partition.share
    grow = kind is not None and kind.batches_grow
    return (
        lane.worker == 0
        and lane.device.id == device.id
        and (own == share or (kind is not None and kind.keeps_worker(own // workers, share // workers)))
        and len(lane.partition.placements) == len(partition.placements)
        and all(
            any(
                old.model == new.model and (grow or old.batch >= new.batch) and old.procs == new.procs
                for old in lane.partition.placements
            )
            for new in partition.placements
        )
    )
