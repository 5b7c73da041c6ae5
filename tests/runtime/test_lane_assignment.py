from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.runtime.events import LaneModel, LaneSpec
from cotenant.runtime.lane_assignment import LaneMatcher

ANY = LaneId(DeviceId("any"), 0)  # the lanes that it assigns have ids of their own


def partition(share: int, *models: str, batch: int = 4) -> Partition:
    placements = (Placement(model=name, batch=batch, rate=1.0, duty=0.1, latency=0.05) for name in models)
    return Partition(share=share, placements=tuple(placements))


def moved(layout: LaneMatcher, *partitions: Partition, number: int = 0) -> list[str]:
    """The lanes of one device cut so, once they are in force."""
    plan = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", number), partitions=partitions),))
    specs = [
        LaneSpec(id=ANY, models=tuple(LaneModel(model=it.model, latencies=(0.05,) * it.batch) for it in cut.placements))
        for cut in partitions
    ]
    layout.lanes = layout.match(plan, specs)
    assert all(lane.spec.id == name for name, lane in layout.lanes.items())
    assert [lane.partition for lane in layout.lanes.values()] == list(partitions)
    return list(layout.lanes)


def test_lane_assignment_equal_partitions_keep_their_lanes_with_unique_ids() -> None:
    layout = LaneMatcher()
    assert moved(layout, partition(500, "a"), partition(500, "b")) == ["cpu-0/0", "cpu-0/1"]
    assert moved(layout, partition(500, "b"), partition(500, "c")) == ["cpu-0/1", "cpu-0/2"]
    assert moved(layout, partition(500, "a"), partition(500, "b")) == ["cpu-0/3", "cpu-0/1"]


def test_lane_assignment_changed_partition_needs_a_new_lane() -> None:
    layout = LaneMatcher()
    assert moved(layout, partition(500, "a")) == ["cpu-0/0"]
    assert moved(layout, partition(400, "a")) == ["cpu-0/1"]
    assert moved(layout, partition(400, "a"), number=1) == ["cpu-1/0"]
    assert moved(layout, partition(400, "a", "b"), number=1) == ["cpu-1/1"]
    assert moved(layout, partition(400, "a"), number=1) == ["cpu-1/2"]
    assert moved(layout, partition(400, "a", batch=5), number=1) == ["cpu-1/3"]
    assert moved(layout, partition(400, "a", batch=3), number=1) == ["cpu-1/3"]


def test_lane_assignment_identical_partitions_are_two_lanes() -> None:
    layout = LaneMatcher()
    assert moved(layout, partition(500, "a"), partition(500, "a")) == ["cpu-0/0", "cpu-0/1"]
    assert moved(layout, partition(500, "a")) == ["cpu-0/0"]
    assert moved(layout, partition(500, "a"), partition(500, "a")) == ["cpu-0/0", "cpu-0/2"]


def test_lane_assignment_changed_model_file_needs_a_new_worker() -> None:
    layout = LaneMatcher()
    moved(layout, partition(500, "a"), partition(500, "b"))
    plan = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=(partition(500, "b"),)),))
    spec = LaneSpec(id=ANY, models=(LaneModel(model="b", latencies=(0.05,) * 4),))
    assert list(layout.match(plan, [spec], lambda model: model != "b")) == ["cpu-0/2"]
    assert list(layout.match(plan, [spec])) == ["cpu-0/1"]


def test_lane_assignment_workers_of_a_partition_stay_together() -> None:
    def workers(count: int, layout: LaneMatcher) -> list[str]:
        placement = Placement(model="a", batch=4, rate=1.0, duty=0.05, latency=0.05, procs=count)
        cut = Partition(share=500, placements=(placement,))
        plan = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=(cut, cut)),))
        layout.lanes = layout.match(plan, [LaneSpec(id=ANY, models=())] * count * 2)
        return list(layout.lanes)

    layout = LaneMatcher()
    assert workers(2, layout) == ["cpu-0/0", "cpu-0/0.2", "cpu-0/1", "cpu-0/1.2"]
    assert workers(2, layout) == ["cpu-0/0", "cpu-0/0.2", "cpu-0/1", "cpu-0/1.2"]
    assert workers(3, layout) == ["cpu-0/2", "cpu-0/2.2", "cpu-0/2.3", "cpu-0/3", "cpu-0/3.2", "cpu-0/3.3"]
