"""Contexts for autoscaling policies: one model, one or more kinds of device, and observations at equal intervals."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.control.scaling import Observation, ScalingContext
from cotenant.core.identity import DeviceId
from cotenant.core.model import Kind, Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.core.units import WHOLE
from cotenant.planners import Problem

GPU = Kind(name="gpu", count=8)


def problem(rates: dict[str, float], *kinds: Kind, latency: float = 0.01, slo: float = 0.1) -> Problem:
    """Return a problem of models whose batches of one take `latency` on any whole device."""
    fleet = kinds or (GPU,)
    points = [Point(share=WHOLE, batch=1, latency=latency, memory=0)]
    return Problem(
        models=tuple(Model(name=name, slo=slo) for name in rates),
        rates=rates,
        fleet=fleet,
        profiles={(name, kind.name): Profile(name, kind.name, points) for name in rates for kind in fleet},
    )


def instances(*models: tuple[str, str, int]) -> Plan:
    """Return a plan with whole devices for instances: model, kind and how many of them."""
    devices: list[Device] = []
    for model, kind, count in models:
        for _ in range(count):
            index = sum(device.kind == kind for device in devices)
            placement = Placement(model=model, batch=1, rate=1.0, duty=0.01, latency=0.01)
            partition = Partition(share=WHOLE, placements=(placement,))
            devices.append(Device(id=DeviceId(kind, index), partitions=(partition,)))
    return Plan(planner="hand", devices=tuple(devices))


def context(
    history: Sequence[Observation] = (),
    *,
    ready: int = 0,
    launching: int = 0,
    rates: dict[str, float] | None = None,
    plan: Plan | None = None,
    of: Problem | None = None,
) -> ScalingContext:
    """Return a context of GPU devices at the time of the latest observation."""
    return ScalingContext(
        now=history[-1].time if history else 0.0,
        problem=of or problem(rates or {"a": 100.0}),
        plan=plan or instances(("a", "gpu", ready)),
        ready={"gpu": ready} if ready else {},
        launching={"gpu": launching} if launching else {},
        history=tuple(history),
    )
