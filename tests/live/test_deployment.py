from __future__ import annotations

from pathlib import Path

import msgspec

from cotenant.core.identity import DeviceId
from cotenant.core.plan import Device, Partition, Placement
from cotenant.live.deployment import with_planned_batches
from tests.live.deployment import repository, sample_deployment


def test_planned_batches_bound_the_rows_of_a_request(tmp_path: Path) -> None:
    given = sample_deployment(repository(tmp_path), ("identity",))
    placements = [
        Placement(model="identity", batch=batch, rate=1.0, duty=0.1, latency=0.1, procs=batch) for batch in (1, 2)
    ]
    cuts = tuple(Partition(share=500, placements=(placement,)) for placement in placements)
    plan = msgspec.structs.replace(given.plan, devices=(Device(id=DeviceId("cpu", 0), partitions=cuts),))
    planned = with_planned_batches(msgspec.structs.replace(given, plan=plan))
    assert planned.offered["identity"].info.max_batch_size == 2
