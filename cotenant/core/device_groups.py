"""Group identical devices: a fleet of a thousand is a few device configurations, each many times."""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Device, Plan


class DeviceGroup(msgspec.Struct, frozen=True):
    """Group devices with the same partitions and placements, rates to three digits. device: the first of them."""

    device: Device
    count: int

    @property
    def name(self) -> str:
        return str(self.device.id) if self.count == 1 else f"{self.count} x {self.device.kind}"


def group_devices(plan: Plan) -> list[DeviceGroup]:
    """Group the devices of a plan, in the order of the first of each group."""
    groups: dict[object, list[Device]] = {}
    for device in plan.devices:
        partitions = sorted(
            (partition.share, *sorted((p.model, p.batch, p.procs, f"{p.rate:.3g}") for p in partition.placements))
            for partition in device.partitions
        )
        groups.setdefault((device.kind, *partitions), []).append(device)
    return [DeviceGroup(devices[0], len(devices)) for devices in groups.values()]
