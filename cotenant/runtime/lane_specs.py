"""Derive the lane specifications of a plan, for the dispatcher; shared by the simulator and the live server."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotenant.core.identity import LaneId
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Profiles
from cotenant.errors import PlanError
from cotenant.runtime.events import LaneModel, LaneSpec


def lane_specs(plan: Plan, models: Mapping[str, Model], profiles: Profiles) -> tuple[LaneSpec, ...]:
    """Return the lanes of a plan: one for each worker of a partition. The first has all of its models, another those
    that are to have as many workers. Raises PlanError where the plan places a model that is not in `models` or was not
    profiled.

    A placement has the latency of its largest batch under co-location. Its ratio to the profiled latency is the
    slowdown, which applies to smaller batches as well. So no predictor is evaluated twice, or differently.
    """
    return tuple(
        LaneSpec(
            id=LaneId(device.id, slot, worker),
            models=tuple(
                LaneModel(
                    model=_model(placement.model, models).name,
                    latencies=_latencies(device, partition, placement, profiles),
                    max_queue_delay=_model(placement.model, models).max_queue_delay,
                    rate=placement.rate / placement.procs,
                )
                for placement in partition.placements
                if placement.procs > worker or not worker  # less than one is an error below
            ),
        )
        for device in plan.devices
        for slot, partition in enumerate(device.partitions)
        for worker in range(workers_per_partition(partition))
    )


def workers_per_partition(partition: Partition) -> int:
    """Return the number of concurrent workers of each partition."""
    return max([1, *(placement.procs for placement in partition.placements)])


def _model(name: str, models: Mapping[str, Model]) -> Model:
    if name not in models:
        raise PlanError(f"the plan places {name!r}, which is not among the models {', '.join(models)}; plan again")
    return models[name]


def _latencies(device: Device, partition: Partition, placement: Placement, profiles: Profiles) -> tuple[float, ...]:
    where = f"{placement.model!r} on {partition.share / 10:g} % of {device.kind!r}"
    if placement.procs < 1:
        raise PlanError(f"the plan has {placement.procs} workers of {where}; set procs to 1 or more")
    profile = profiles.get((placement.model, device.kind))
    alone = math.inf if profile is None else profile.latency(placement.batch, partition.share, placement.procs)
    if profile is None or not math.isfinite(alone):
        raise PlanError(
            f"the plan has batches of {placement.batch} of {where}{_beside(placement)}; that was not profiled, profile"
            " it first"
        )
    if not 0 < placement.latency < math.inf:
        raise PlanError(f"the plan has a batch of {where} take {placement.latency * 1e3:g} ms; plan again")
    slowdown = placement.latency / alone
    return tuple(latency * slowdown for latency in profile.curve(partition.share, placement.procs)[: placement.batch])


def _beside(placement: Placement) -> str:
    return f" in {placement.procs} workers at once" if placement.procs > 1 else ""
