"""Devices of a plan that are alike: a fleet of a thousand is a few geometries, each many times."""

from __future__ import annotations

import msgspec

from cotenant.core.plan import Device, Plan


class DeviceGroup(msgspec.Struct, frozen=True):
    """Devices that are cut and filled alike, rates to three digits. device: the first of them."""

    device: Device
    count: int

    @property
    def name(self) -> str:
        return str(self.device.id) if self.count == 1 else f"{self.count} x {self.device.kind}"


def group_devices(plan: Plan) -> list[DeviceGroup]:
    """The devices of a plan in groups, in the order of the first of each."""
    found: dict[object, list[Device]] = {}
    for device in plan.devices:
        cuts = sorted(
            (cut.share, *sorted((p.model, p.batch, p.procs, f"{p.rate:.3g}") for p in cut.placements))
            for cut in device.partitions
        )
        found.setdefault((device.kind, *cuts), []).append(device)
    return [DeviceGroup(devices[0], len(devices)) for devices in found.values()]
