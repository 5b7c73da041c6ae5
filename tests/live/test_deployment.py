from __future__ import annotations

import pytest

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.errors import PlanError
from cotenant.live.deployment import Deployment, with_planned_batches
from cotenant.planners import Problem


def test_deployment_with_several_workers_on_a_partition_is_rejected() -> None:
    placement = Placement(model="a", batch=1, rate=1.0, duty=0.1, latency=0.1, procs=2)
    device = Device(id=DeviceId("cpu", 0), partitions=(Partition(share=500, placements=(placement,)),))
    deployment = Deployment(
        offered={},
        problem=Problem(models=(), rates={}, fleet=(), profiles={}),
        plan=Plan(planner="hand", devices=(device,)),
    )
    with pytest.raises(
        PlanError, match=r"^the plan has 2 workers of 'a' on 50 % of cpu-0, and a server runs one; take"
    ):
        with_planned_batches(deployment)
