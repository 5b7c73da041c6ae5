"""Represent a plan: which model runs on which partition of which device, with what largest batch.

The classes below also define the file: `Plan.to_json` and `Plan.from_json` use the format of docs/reference.md
("Plan"), with shares in percent and durations in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.provenance import Provenance
from cotenant.core.units import WHOLE, parse_share
from cotenant.errors import ConfigError


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Place one model on one partition.

    batch: its largest batch there. rate: requests/s that it is planned to serve. duty: length of one round of the
    partition in seconds; latency: of one batch of that size under co-location, in seconds. procs: concurrent workers of
    the model.
    """

    model: str
    batch: int
    rate: float
    duty: float
    latency: float
    procs: int = 1


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a partition of a device. share: ‰; its placements share it in time."""

    share: int
    placements: tuple[Placement, ...]


class JobPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Let one best-effort job run on what a device's partitions leave idle. model: the profile of its steps."""

    name: str
    model: str
    batch: int


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a device, its partitions, and the best-effort jobs that take what these leave idle."""

    id: DeviceId
    partitions: tuple[Partition, ...]
    jobs: tuple[JobPlacement, ...] = ()

    @property
    def kind(self) -> str:
        return self.id.kind

    @property
    def free(self) -> int:
        """The unallocated share, in ‰."""
        return WHOLE - sum(partition.share for partition in self.partitions)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Describe what runs where, and what is not served.

    devices: those that are used. unserved: the rate of each model that could not be placed, where above 0. scale: the
    multiple of the requested rates that is served; 1 when all are. bound: a proven limit on the objective, where the
    planner has one. split: application → stage → its budget of the application's target, in seconds. provenance: how
    the plan was made, where known. waiting_jobs: best-effort jobs that no device takes, and why.
    """

    planner: str
    objective: str = "devices"
    devices: tuple[Device, ...] = ()
    unserved: dict[str, float] = {}
    scale: float = 1.0
    bound: float | None = None
    cost_per_hour: float | None = None
    solve_s: float = 0.0
    split: dict[str, dict[str, float]] = {}
    provenance: Provenance | None = None
    waiting_jobs: dict[str, str] = {}

    @property
    def devices_used(self) -> int:
        return len(self.devices)

    def placements(self) -> Iterator[tuple[Device, Partition, Placement]]:
        """Yield every placement with its device and partition."""
        for device in self.devices:
            for partition in device.partitions:
                for placement in partition.placements:
                    yield device, partition, placement

    def rate(self, model: str) -> float:
        """Return the requests/s that the plan serves for a model."""
        return sum(placement.rate for _, _, placement in self.placements() if placement.model == model)

    def rates(self) -> dict[str, float]:
        """Return the requests/s that the plan serves, for each model that it places."""
        rates: dict[str, float] = {}
        for _, _, placement in self.placements():
            rates[placement.model] = rates.get(placement.model, 0.0) + placement.rate
        return rates

    def to_json(self) -> bytes:
        """Encode as the file format."""
        file = _PlanFile(
            objective=self.objective,
            scale=self.scale,
            devices_used=self.devices_used,
            cost_per_hour=self.cost_per_hour,
            bound=self.bound,
            solve_s=self.solve_s,
            planner=self.planner,
            devices=[
                _DeviceFile(
                    kind=device.kind,
                    id=device.id.index,
                    partitions=[
                        _PartitionFile(
                            share_pct=_plain(partition.share / 10),
                            placements=[
                                _PlacementFile(
                                    model=placement.model,
                                    batch=placement.batch,
                                    procs=placement.procs,
                                    rate=placement.rate,
                                    duty_ms=placement.duty * 1e3,
                                    latency_ms=placement.latency * 1e3,
                                )
                                for placement in partition.placements
                            ],
                        )
                        for partition in device.partitions
                    ],
                    jobs=[_JobFile(name=job.name, model=job.model, batch=job.batch) for job in device.jobs]
                    or msgspec.UNSET,
                )
                for device in self.devices
            ],
            unserved=self.unserved,
            split_ms={
                name: {stage: seconds * 1e3 for stage, seconds in stages.items()} for name, stages in self.split.items()
            }
            or msgspec.UNSET,
            provenance=self.provenance or msgspec.UNSET,
            waiting_jobs=self.waiting_jobs or msgspec.UNSET,
        )
        return msgspec.json.format(msgspec.json.encode(file), indent=2)

    @classmethod
    def from_json(cls, text: bytes | str, place: str = "plan") -> Plan:
        """Decode the file format. Raises ConfigError, with `place` and the field, for anything that is not a plan."""
        try:
            file = msgspec.json.decode(text, type=_PlanFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: not a plan: {error}") from None
        return cls(
            planner=file.planner,
            objective=file.objective,
            devices=tuple(
                Device(
                    id=DeviceId(device.kind, device.id),
                    partitions=tuple(
                        Partition(
                            share=parse_share(partition.share_pct, f"{place}: {device.kind} {device.id}"),
                            placements=tuple(
                                Placement(
                                    model=placement.model,
                                    batch=placement.batch,
                                    procs=placement.procs,
                                    rate=placement.rate,
                                    duty=placement.duty_ms / 1e3,
                                    latency=placement.latency_ms / 1e3,
                                )
                                for placement in partition.placements
                            ),
                        )
                        for partition in device.partitions
                    ),
                    jobs=tuple(
                        JobPlacement(name=job.name, model=job.model, batch=job.batch) for job in device.jobs or ()
                    ),
                )
                for device in file.devices
            ),
            unserved=file.unserved,
            scale=file.scale,
            bound=file.bound,
            cost_per_hour=file.cost_per_hour,
            solve_s=file.solve_s,
            split={
                name: {stage: ms / 1e3 for stage, ms in stages.items()}
                for name, stages in (file.split_ms or {}).items()
            },
            provenance=file.provenance or None,
            waiting_jobs=file.waiting_jobs or {},
        )


def _plain(value: float) -> float | int:
    """Return whole numbers as integers, for readable files: 20.0 → 20."""
    return int(value) if value == int(value) else value


class _PlacementFile(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    batch: int
    rate: float
    duty_ms: float
    latency_ms: float
    procs: int = 1


class _PartitionFile(msgspec.Struct, forbid_unknown_fields=True):
    share_pct: float
    placements: list[_PlacementFile]


class _JobFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    model: str
    batch: int


class _DeviceFile(msgspec.Struct, forbid_unknown_fields=True):
    kind: Annotated[str, msgspec.Meta(pattern="^[^/]+(/[^/]+)?$")]  # as in a DeviceId
    id: Annotated[int, msgspec.Meta(ge=0)]
    partitions: list[_PartitionFile]
    jobs: list[_JobFile] | msgspec.UnsetType = msgspec.UNSET  # only with best-effort jobs


class _PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    objective: str
    scale: float
    devices_used: int
    cost_per_hour: float | None
    bound: float | None
    solve_s: float
    planner: str
    devices: list[_DeviceFile]
    unserved: dict[str, float]
    split_ms: dict[str, dict[str, float]] | msgspec.UnsetType = msgspec.UNSET  # only with applications
    provenance: Provenance | msgspec.UnsetType = msgspec.UNSET
    waiting_jobs: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # only where some wait
