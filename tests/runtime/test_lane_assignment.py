from cotenant.core.identity import DeviceId, LaneId
from cotenant.core.model import Kind
from cotenant.core.plan import Device, Partition, Placement, Plan
from cotenant.runtime.events import LaneModel, LaneSpec
from cotenant.runtime.lane_assignment import LaneMatcher

FIXED = Kind(name="cpu")
ANY = LaneId(DeviceId("any"), 0)  # the lanes that it assigns have ids of their own


def partition(share: int, *models: str, batch: int = 4) -> Partition:
    placements = (Placement(model=name, batch=batch, rate=1.0, duty=0.1, latency=0.05) for name in models)
    return Partition(share=share, placements=tuple(placements))


def moved(layout: LaneMatcher, *partitions: Partition, number: int = 0, kind: Kind = FIXED) -> list[str]:
    """The lanes of one device cut so, once they are in force."""
    plan = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", number), partitions=partitions),))
    specs = [
        LaneSpec(id=ANY, models=tuple(LaneModel(model=it.model, latencies=(0.05,) * it.batch) for it in cut.placements))
        for cut in partitions
    ]
    layout.lanes = layout.match(plan, specs, kinds={kind.name: kind})
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


IN_PLACE = Kind(name="cpu", in_place=(500, 1000))


def test_share_that_changes_in_place_keeps_its_lane() -> None:
    layout = LaneMatcher()
    assert moved(layout, partition(300, "a"), kind=IN_PLACE) == ["cpu-0/0"]
    assert moved(layout, partition(500, "a"), kind=IN_PLACE) == ["cpu-0/0"]
    assert moved(layout, partition(550, "a"), kind=IN_PLACE) == ["cpu-0/1"]
    assert moved(layout, partition(1000, "a"), kind=IN_PLACE) == ["cpu-0/1"]
    assert moved(layout, partition(900, "a", "b"), kind=IN_PLACE) == ["cpu-0/2"]
    assert moved(layout, partition(900, "a"), number=1, kind=IN_PLACE) == ["cpu-1/0"]


def test_batch_grows_in_place_only_where_the_kind_says_so() -> None:
    layout = LaneMatcher()
    grows = Kind(name="cpu", in_place=(500, 1000), batches_grow=True)
    moved(layout, partition(300, "a"))
    assert moved(layout, partition(400, "a", batch=8), kind=IN_PLACE) == ["cpu-0/1"]
    assert moved(layout, partition(300, "a", batch=16), kind=grows) == ["cpu-0/1"]


def test_lane_that_fits_as_it_is_changes_for_no_other_and_the_nearest_share_follows() -> None:
    layout = LaneMatcher()
    lanes = [partition(share, "a") for share in (100, 300, 450)]
    assert moved(layout, *lanes, kind=IN_PLACE) == ["cpu-0/0", "cpu-0/1", "cpu-0/2"]
    cut = [partition(share, "a") for share in (400, 300, 200)]
    assert moved(layout, *cut, kind=IN_PLACE) == ["cpu-0/2", "cpu-0/1", "cpu-0/0"]


def test_workers_of_a_partition_that_divide_its_share_are_compared_by_their_parts() -> None:
    layout = LaneMatcher()

    def cut(share: int) -> Partition:
        placement = Placement(model="a", batch=4, rate=1.0, duty=0.05, latency=0.05, procs=2)
        return Partition(share=share, placements=(placement,))

    def lanes(share: int) -> list[str]:
        plan = Plan(planner="hand", devices=(Device(id=DeviceId("cpu", 0), partitions=(cut(share),)),))
        layout.lanes = layout.match(plan, [LaneSpec(id=ANY, models=())] * 2, kinds={"cpu": IN_PLACE})
        return list(layout.lanes)

    assert lanes(400) == lanes(1000) == ["cpu-0/0", "cpu-0/0.2"]
