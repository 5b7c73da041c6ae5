import math

import pytest

from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Model
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.core.profile import Point, Profile
from cotenant.errors import PlanError
from cotenant.runtime.events import LaneModel, LaneSpec
from cotenant.runtime.lane_specs import lane_specs

PROFILES = {
    ("m", "cpu"): Profile(
        "m", "cpu", [Point(share=400, batch=b, latency=s, memory=0) for b, s in ((1, 0.002), (2, 0.003), (4, 0.005))]
    )
}
MODELS = {"m": Model(name="m", slo=0.1, max_queue_delay=0.001)}


def plan(**changes: object) -> Plan:
    fields = {"model": "m", "batch": 2, "rate": 7.0, "duty": 0.01, "latency": 0.003, "procs": 1} | changes
    partition = Partition(share=400, placements=(Placement(**fields),))  # type: ignore[arg-type]
    return Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 3), partitions=(partition, partition)),))


def test_lane_specs_each_partition_has_a_lane_with_batch_latencies() -> None:
    model = LaneModel(model="m", latencies=(0.002, 0.003), max_queue_delay=0.001, rate=7.0)
    expected = tuple(LaneSpec(id=id_, models=(model,)) for id_ in (LaneId.parse("cpu-3/0"), LaneId.parse("cpu-3/1")))
    assert lane_specs(plan(), MODELS, PROFILES) == expected


def test_lane_specs_planned_slowdown_applies_to_smaller_batches() -> None:
    lane = lane_specs(plan(latency=0.0045), MODELS, PROFILES)[0]
    assert lane.models[0].latencies == pytest.approx((0.003, 0.0045))


def test_lane_specs_of_an_unprofiled_plan_raise() -> None:
    with pytest.raises(PlanError, match=r"^the plan places 'm', which is not among the models other; plan again$"):
        lane_specs(plan(), {"other": Model(name="other", slo=1.0)}, {})
    for latency in (0.0, -0.001, math.inf):
        with pytest.raises(PlanError, match=r"^the plan has a batch of 'm' on 40 % of 'cpu' take .* ms; plan again$"):
            lane_specs(plan(latency=latency), MODELS, PROFILES)
    unprofiled = r"^the plan has batches of 8 of 'm' on 40 % of 'cpu'; that was not profiled, profile it first$"
    with pytest.raises(PlanError, match=unprofiled):
        lane_specs(plan(batch=8), MODELS, PROFILES)
    with pytest.raises(PlanError, match=r"^the plan has batches of 2 of 'm' on 40 % of 'cpu'; that was not profiled"):
        lane_specs(plan(), MODELS, {})
    several = r"^the plan has batches of 2 of 'm' on 40 % of 'cpu' in 2 workers at once; that was not profiled"
    with pytest.raises(PlanError, match=several):
        lane_specs(plan(procs=2), MODELS, PROFILES)
    with pytest.raises(PlanError, match=r"^the plan has 0 workers of 'm' on 40 % of 'cpu'; set procs to 1 or more$"):
        lane_specs(plan(procs=0), MODELS, PROFILES)


def test_lane_specs_each_worker_of_a_partition_has_a_lane() -> None:
    """Of three workers that share a partition each takes 5 ms, and two have the second model, too."""
    points = [Point(share=400, batch=1, latency=0.003 + 0.001 * n, memory=0, procs=n) for n in (1, 2, 3)]
    profiles = {(name, "cpu"): Profile(name, "cpu", points) for name in "ab"}
    a, b = (
        Placement(model=name, batch=1, rate=30.0, duty=0.01, latency=0.003 + 0.001 * n, procs=n)
        for name, n in (("a", 3), ("b", 2))
    )
    device = Device(id=DeviceId("cpu", 0), partitions=(Partition(share=400, placements=(a, b)),))
    lanes = lane_specs(
        Plan(planner="hand", devices=(device,)), {name: Model(name=name, slo=0.1) for name in "ab"}, profiles
    )
    assert {lane.id: [model.model for model in lane.models] for lane in lanes} == {
        "cpu-0/0": ["a", "b"],
        "cpu-0/0.2": ["a", "b"],
        "cpu-0/0.3": ["a"],
    }
    assert lanes[1].models == (
        LaneModel(model="a", latencies=(0.006,), rate=10.0),
        LaneModel(model="b", latencies=(0.005,), rate=15.0),
    )
