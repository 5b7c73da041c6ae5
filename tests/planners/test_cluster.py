from __future__ import annotations

import msgspec
import pytest

from cotenant.core.model import Kind
from cotenant.planners.capacity import DeviceDraft, PartitionDraft
from cotenant.planners.cluster import place_on_smallest_cluster

CHEAP = Kind(name="cheap", count=3, price=1.0)
DEAR = Kind(name="dear", count=None, price=2.0)


@pytest.mark.parametrize("needed", [1, 2, 7, 13, 40])
def test_smallest_cluster_is_the_smallest_that_takes_everything(needed: int) -> None:
    """Fifty instances, of which devices take all once there are enough of them."""

    def schedule(cluster: list[DeviceDraft]) -> int:
        for device in cluster:
            device.cuts = [PartitionDraft(1000, {"a": 1.0})]
        return 50 if len(cluster) >= needed else len(cluster)

    placed = place_on_smallest_cluster([DEAR, CHEAP], 50, schedule)
    cheap = min(3, (needed + 1) // 2)  # there are three; of equally many of both, the odd one is cheap
    assert [device.kind.name for device in placed] == ["cheap"] * cheap + ["dear"] * (needed - cheap)


def test_smallest_cluster_where_not_everything_fits_is_the_smallest_that_takes_as_much() -> None:
    def schedule(cluster: list[DeviceDraft]) -> int:
        for device in cluster:
            device.cuts = [PartitionDraft(1000, {"a": 1.0})]
        return min(len(cluster), 4)

    assert len(place_on_smallest_cluster([DEAR], 50, schedule)) == 4
    assert len(place_on_smallest_cluster([msgspec.structs.replace(DEAR, count=2)], 50, schedule)) == 2
    assert place_on_smallest_cluster([msgspec.structs.replace(DEAR, count=0)], 50, schedule) == []


def test_devices_on_which_nothing_was_placed_are_left_out() -> None:
    def schedule(cluster: list[DeviceDraft]) -> int:
        cluster[0].cuts = [PartitionDraft(500, {}), PartitionDraft(500, {"a": 1.0})]
        return 1

    (device,) = place_on_smallest_cluster([CHEAP, DEAR], 5, schedule)
    assert [cut.rates for cut in device.cuts] == [{"a": 1.0}]
